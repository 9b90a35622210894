// Widgets that the tabs share. Styles are classes of studio.css; nothing sets a style attribute in markup.

// Create an element: el("button", {class: "primary", onclick: f}, "Edit"). Text is text, never HTML.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

let ids = 0;
export const newId = (prefix = "id") => `${prefix}-${++ids}`;

export const percent = (p) => (p == null ? "–" : p >= 0.0995 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%");
export const seconds = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : s < 100 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`);

// Tell a screen reader something.
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

// A label, a control and the place for its problem. `name` is the field that the server names in a problem.
export function field(label, control, { name = control.name, hint = "", hidden = false } = {}) {
  const id = control.id || (control.id = newId(name || "field"));
  const error = el("p", { class: "field-error", id: `${id}-error`, role: "alert", "data-error": name });
  const help = hint && el("p", { class: "hint", id: `${id}-hint` }, hint);
  control.setAttribute("aria-describedby", [hint && `${id}-hint`, `${id}-error`].filter(Boolean).join(" "));
  return el("div", { class: "field", "data-field": name }, el("label", { for: id, class: hidden && "visually-hidden" }, label), control, help, error);
}

// Show a problem beside its field, or in the form's own place: an element with data-error="".
export function showProblem(form, problem) {
  clearProblems(form);
  const text = problem.sentence ?? String(problem.message ?? problem);
  const named = problem.field && form.querySelector(`[data-error="${CSS.escape(problem.field)}"]`);
  const place = named || form.querySelector('[data-error=""]');
  if (!place) return announce(text);
  place.textContent = text;
  place.closest(".field")?.querySelector("input, textarea, select, [contenteditable]")?.setAttribute("aria-invalid", "true");
}

export function clearProblems(form) {
  for (const place of form.querySelectorAll("[data-error]")) place.textContent = "";
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

export const input = (name, attributes = {}) => el("input", { name, type: "text", autocomplete: "off", ...attributes });

export function select(name, options, attributes = {}) {
  const entries = options.map((option) => (typeof option === "string" ? [option, option] : option));
  return el("select", { name, ...attributes }, entries.map(([value, text]) => el("option", { value }, text)));
}

export const button = (text, onclick, attributes = {}) => el("button", { type: "button", onclick, ...attributes }, text);

// A switch: a checkbox that a screen reader calls a switch.
export function toggle(label, checked, onchange, attributes = {}) {
  const box = el("input", { type: "checkbox", role: "switch", class: "switch", checked, "aria-label": label, ...attributes });
  box.addEventListener("change", () => onchange(box.checked, box));
  return box;
}

// A card with a heading.
export const card = (title, ...children) => el("section", { class: "card" }, title && el("h2", {}, title), ...children);

// A bar of a probability; `kind` is "before" or "after".
export function bar(fraction, kind = "") {
  const fill = el("span", { class: `bar-fill ${kind}` });
  fill.style.width = `${Math.max(0, Math.min(1, fraction ?? 0)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

// The stages of a job, with a button to cancel it. Use: const p = progress(); form.append(p.element);
// api.job(path, body, {onStage: p.update, signal: p.start()}) and p.stop() at the end.
export function progress() {
  let controller = null;
  const list = el("ol", { class: "stages" });
  const fill = el("span", { class: "bar-fill after" });
  const meter = el("span", { class: "bar wide", role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const cancel = button("Cancel", () => {
    cancel.disabled = true;
    cancel.textContent = "Canceling…";
    controller?.abort();
  }, { class: "quiet" });
  const element = el("div", { class: "progress", hidden: true }, el("div", { class: "progress-row" }, meter, cancel), list);
  let last = "";
  return {
    element,
    start() {
      controller = new AbortController();
      cancel.disabled = false;
      cancel.textContent = "Cancel";
      list.replaceChildren();
      last = "";
      element.hidden = false;
      return controller.signal;
    },
    update({ stages, fraction, seconds: spent, is_committed: committed }) {
      if (committed) cancel.disabled = true;
      list.replaceChildren(...stages.map(({ text, seconds: begin }, index) => {
        const end = stages[index + 1]?.seconds ?? spent;
        const current = index === stages.length - 1;
        return el("li", { class: current ? "current" : "past", "aria-current": current && "step" }, text, el("span", { class: "time" }, seconds(Math.max(0, end - begin))));
      }));
      meter.classList.toggle("unknown", fraction == null);
      if (fraction == null) meter.removeAttribute("aria-valuenow");
      else meter.setAttribute("aria-valuenow", Math.round(100 * fraction));
      fill.style.width = fraction == null ? "" : `${100 * fraction}%`;
      const text = stages.at(-1)?.text ?? "";
      if (text !== last) announce((last = text));
    },
    stop() {
      element.hidden = true;
    },
  };
}
