// The Memory tab.
import { el } from "./ui.js";

export function mount(element, api) {
  element.append(el("p", { class: "muted" }, "This tab is being built."));
}
