// The Trace tab: causal tracing and the logit lens of one sentence.
import { chart, colorScale, heatmap } from "./charts.js";
import { button, card, clearProblems, el, field, input, percent, progress, seconds, select, showProblem } from "./ui.js";

const KINDS = {
  hidden: ["hidden-state", "Block output", "one layer at a time"],
  mlp: ["mlp", "MLP output", ""],
  attention: ["attention", "Attention output", ""],
};
const EXAMPLE = "{The Eiffel Tower} is in the city of";

const layerText = (layers) => (layers.length > 1 ? `layers ${layers[0]} to ${layers.at(-1)}` : `layer ${layers[0]}`);
const visible = (token) => (token.trim() ? token.trim().replaceAll("\n", "⏎") : token.replaceAll(" ", "␣").replaceAll("\n", "⏎"));
const quoted = (token) => `“${token.trim() || token}”`;

export function mount(element, api) {
  const sentence = input("sentence", { value: api.link.get("traced", api.link.get("sentence", EXAMPLE)), spellcheck: "false" });
  const target = input("target", { value: api.link.get("answer"), placeholder: "the model's own answer" });
  const draws = select("draws", [["1", "1, fast"], ["4", "4"], ["10", "10, as in ROME"]]);
  draws.value = "4";
  const work = progress();
  const go = el("button", { type: "submit", class: "primary" }, "Trace");
  const mark = button("Mark the selection as the subject", markSelection, { class: "quiet under" });
  const form = el("form", { "aria-label": "Trace a sentence" },
    el("p", { class: "lead" }, "Noise hides the subject, then one hidden state at a time is put back. Where the answer returns, the model recalls the fact."),
    field("Sentence, with its subject in braces", sentence), mark,
    el("div", { class: "row" }, el("div", { class: "grow wide" }, field("Answer to trace (optional)", target)), field("Samples of noise", draws), el("div", { class: "field" }, go)),
    el("p", { class: "field-error", role: "alert", "data-error": "" }), work.element);
  const results = el("div", { "aria-live": "off" });
  element.append(card("Where does the model recall a fact?", form), results);

  function markSelection() {
    const { selectionStart: from, selectionEnd: to } = sentence;
    const text = (part) => part.replaceAll(/[{}]/g, "");
    const subject = sentence.value.slice(from, to);
    if (!text(subject).trim()) return showProblem(form, { sentence: "Select the subject in the sentence first.", field: "sentence" });
    clearProblems(form);
    const [lead, tail] = subject.match(/^\s*|\s*$/g);
    sentence.value = `${text(sentence.value.slice(0, from))}${lead}{${text(subject).trim()}}${tail}${text(sentence.value.slice(to))}`;
    sentence.focus();
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearProblems(form);
    go.disabled = true;
    api.link.set({ traced: sentence.value, answer: target.value });
    try {
      const body = { sentence: sentence.value, target: target.value, draws: Number(draws.value) };
      show(await api.job("/api/trace/run", body, { onStage: work.update, signal: work.start() }));
    } catch (problem) {
      showProblem(form, problem);
    } finally {
      go.disabled = false;
      work.stop();
    }
  });

  // Take the sentence and the recommended layer to the Edit tab.
  function useLayer(traced, layer) {
    api.link.set({ tab: "edit", sentence: traced, method: "memit", layers: layer }); // the trace restored an MLP
    dispatchEvent(new Event("hashchange"));
  }

  function show({ trace, lens, layers, advice, edits }) {
    const traced = sentence.value;
    const method = select("method", Object.keys(layers));
    const maps = Object.entries(trace.effects).map(([kind, effects]) => effectMap(kind, effects, trace));
    const table = lensMap(lens.edited, trace);
    const source = el("span", { class: "muted" });
    const markLayers = () => {
      const { layers: chosen, source: from } = layers[method.value];
      for (const map of maps) map.mark(chosen);
      table.mark(chosen);
      source.textContent = `${layerText(chosen)}, ${from}`;
    };
    method.addEventListener("change", markLayers);
    results.replaceChildren(
      card("", summary(trace, advice, edits), el("div", { class: "marked-by" }, el("label", { for: method.id = "trace-method" }, "Layers that an edit would change, by method"), method, source),
        el("div", { class: "marked-by" }, button(`Edit this fact at layer ${advice.layer}`, () => useLayer(traced, advice.layer), { class: "quiet" }))),
      el("div", { class: "effects" }, maps.map((map) => map.element)),
      lensCard(lens, table, trace),
    );
    markLayers();
  }
}

function summary(trace, advice, edits) {
  const facts = [
    ["Answer", quoted(trace.answer), trace.first_choice ? "the first choice" : "not the first choice"],
    ["Probability", percent(trace.clean), `${percent(trace.corrupted)} with noise`],
    ["Recommended layer", `layer ${advice.layer}`, `its MLP at ${quoted(advice.token)} brings back ${percent(Math.max(0, advice.effect))}`],
    ["Time", seconds(trace.seconds), `${trace.settings.draws} sample${trace.settings.draws > 1 ? "s" : ""} of noise${edits ? `, model with ${edits} edit${edits > 1 ? "s" : ""}` : ""}`],
  ];
  return el("dl", { class: "facts" }, facts.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, note)))));
}

function effectMap(kind, effects, trace) {
  const [style, name, note] = KINDS[kind];
  const top = Object.values(trace.effects).flat(2).reduce((most, x) => Math.max(most, x ?? 0), 1e-9);
  const peak = trace.peaks[kind];
  const inSubject = (row) => row >= trace.subject[0] && row <= trace.subject[1];
  const signed = (x) => `${x < 0 ? "−" : "+"}${(100 * Math.abs(x)).toFixed(2)} points`;
  const map = heatmap({
    label: `${name}: indirect effect of each token and layer`,
    rows: trace.tokens.map(visible),
    columns: effects[0].map((_, layer) => String(layer)),
    kind: style,
    rowClass: (row) => (inSubject(row) ? "subject" : ""),
    describe: (row, column) => `${visible(trace.tokens[row])}, layer ${column}: ${signed(effects[row][column] ?? 0)}`,
  });
  map.update(effects.map((row) => row.map((x) => Math.max(0, x ?? 0) / top)));
  const best = effects[peak.token][peak.layer];
  const window = note || `${trace.window} layer${trace.window > 1 ? "s" : ""} at a time`;
  const element = card("", el("div", { class: "head-row" }, el("h2", {}, `${name} restored`), el("span", { class: "muted" }, window)), map.element,
    el("p", { class: "hint" }, `Largest: ${percent(Math.max(0, best))} of probability comes back at ${quoted(trace.tokens[peak.token])}, layer ${peak.layer}.`),
    colorScale("0", percent(top), { kind: style }));
  element.setAttribute("data-kind", kind);
  return { ...map, element };
}

// Rows are layers, the last one at the top; columns are tokens; a cell says the first choice.
function lensMap(lens, trace) {
  const order = lens.top.map((_, index) => lens.top.length - 1 - index);
  const map = heatmap({
    label: `Logit lens: what each layer would say after each token, colored by the probability of ${quoted(lens.answer)}`,
    rows: order.map(String),
    columns: lens.tokens.map(visible),
    kind: "lens text",
    every: 1,
    describe: (row, column) => {
      const layer = order[row];
      return `Layer ${layer}, after ${quoted(lens.tokens[column])}: says ${quoted(lens.top[layer][column])}, ${percent(lens.top_probability[layer][column])}.\n${quoted(lens.answer)}: ${percent(lens.probability[layer][column])}, rank ${lens.rank[layer][column].toLocaleString("en")}`;
    },
    text: (row, column) => visible(lens.top[order[row]][column]),
  });
  map.update(order.map((layer) => lens.probability[layer]));
  return { ...map, mark: (layers) => map.mark(layers.map((layer) => order.indexOf(layer)), { inRows: true }) };
}

function lensCard(lens, table, trace) {
  const names = { base: ["base model", "#2563eb"], edited: [lens.base ? "with edits" : "the model", "#d97706"] };
  const curves = chart({ height: 220, legend: Boolean(lens.base) });
  curves.update({
    title: `Probability of ${quoted(trace.answer)} after the sentence, if the model ended at each layer`,
    x_label: "layer",
    series: Object.entries(lens).map(([name, one]) => ({ label: names[name][0], color: names[name][1], x: one.probability.map((_, layer) => layer), mean: one.probability.map((row) => row.at(-1)) })),
  });
  const { appears } = lens.edited;
  return card("", el("div", { class: "head-row" }, el("h2", {}, "What each layer would say"), el("span", { class: "muted" }, appears == null ? `${quoted(trace.answer)} never stays the first choice to the end` : `${quoted(trace.answer)} is the first choice from layer ${appears} on`)),
    curves.element, el("div", { class: "scroll lens-scroll" }, table.element), colorScale("0", "100%", { kind: "lens" }));
}
