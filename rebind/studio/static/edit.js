// The Edit tab: write one fact, see the model before and after it, and talk to both models.
import { mountChat } from "./chat.js";
import { showResult } from "./result.js";
import { sentence } from "./sentence.js";
import { announce, button, card, clearProblems, el, field, input, progress, select, showProblem } from "./ui.js";

export function mount(element, api) {
  const words = sentence({ onchange: () => { subject.value = words.subject; } });
  const subject = input("subject", { placeholder: "select it in the sentence", spellcheck: "false" });
  const target = input("target", { class: "target", placeholder: "Rome", spellcheck: "false" });
  let standard = ""; // the default method, as the server says
  const method = select("method", []);
  const layers = input("layers", { placeholder: "chosen by the method", spellcheck: "false", inputmode: "numeric" });
  const write = el("button", { type: "submit", class: "primary" }, "Write this fact");
  const anyway = button("Write it anyway", () => submit(true), { class: "danger", hidden: true });
  const copy = button("Copy link", copyLink, { class: "quiet" });
  const work = progress();
  const results = el("div", { "aria-live": "polite", "aria-label": "Result" });
  const examples = el("div", { class: "chips", role: "group", "aria-label": "Examples" });
  words.text.placeholder = "The capital of France is";

  const form = el("form", { class: "card hero", "aria-label": "Edit a fact", novalidate: true },
    el("h1", {}, "Rewrite what a model knows"),
    el("p", { class: "muted" }, "Type the beginning of a sentence, select its subject, and say how it should go on."),
    el("div", { class: "fact-line" },
      field("Sentence", words.element, { name: "sentence" }),
      el("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      field("New target", target)),
    examples,
    el("div", { class: "row options" }, field("Subject", subject), field("Method", method), field("Layers", layers), el("div", { class: "row actions" }, write, copy)),
    el("p", { class: "field-error", role: "alert", "data-error": "" }), anyway,
    work.element);
  label(form, words);
  subject.addEventListener("change", () => { words.subject = subject.value.trim(); });
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(false); });

  async function submit(force) {
    clearProblems(form);
    anyway.hidden = true;
    write.disabled = true;
    remember();
    const notes = [];
    const body = { sentence: words.template, target: target.value, method: method.value || undefined, layers: layers.value, force };
    if (!words.subject) body.subject = subject.value;
    try {
      const onStage = (state) => { work.update(state); notes.splice(0, notes.length, ...state.notes); };
      const result = await api.job("/api/edit/write", body, { onStage, signal: work.start() });
      showResult(results, api, result, notes);
      announce(`Edit ${result.edit.id} is written.`);
      api.emit("ledger");
    } catch (problem) {
      showProblem(form, problem);
      anyway.hidden = !(problem.advice ?? "").includes("Write it anyway");
    } finally {
      work.stop();
      write.disabled = false;
    }
  }

  function remember() {
    api.link.set({ sentence: words.template, target: target.value, method: method.value === standard ? "" : method.value, layers: layers.value });
  }

  async function copyLink() {
    remember();
    try {
      await navigator.clipboard.writeText(location.href);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "It is in the address bar";
    }
    setTimeout(() => { copy.textContent = "Copy link"; }, 2000);
  }

  function restore() {
    words.template = api.link.get("sentence");
    target.value = api.link.get("target");
    layers.value = api.link.get("layers");
    restoreMethod();
  }

  function restoreMethod() {
    method.value = api.link.get("method") || standard;
  }

  const conversation = el("div");
  element.append(form, results, conversation);
  mountChat(conversation, api);
  restore();
  api.on("link", restore);
  api.on("model", () => results.replaceChildren());
  api.get("/api/edit/options").then((options) => {
    method.replaceChildren(...options.methods.map(({ name, summary }) => el("option", { value: name, title: summary }, name === "dense" ? "dense (memory beside the weights)" : name)));
    standard = options.method;
    restoreMethod(); // not the fields, in which somebody may be typing by now
    examples.append(...options.examples.map((example) => button(`${example.sentence.replace(/[{}]/g, "")} → ${example.target}`, () => {
      words.template = example.sentence;
      target.value = example.target;
      target.focus();
    }, { class: "chip" })));
  }).catch((problem) => showProblem(form, problem));
}

// The label of the sentence belongs to the text area, not to the box around it.
function label(form, words) {
  const place = form.querySelector('[data-field="sentence"]');
  words.text.id = "sentence";
  place.querySelector("label").htmlFor = "sentence";
  words.text.setAttribute("aria-describedby", place.querySelector(".field-error").id);
}
