// The Memory tab: a fast-weight matrix, written token by token, by one rule or by two side by side.
import { chart, colorScale, heatmap, number, slider } from "./charts.js";
import { bar, button, card, clearProblems, el, field, input, newId, percent, select, showProblem, toggle } from "./ui.js";

const CAPITALS = ["France = Paris", "Italy = Rome", "Spain = Madrid", "Norway = Oslo", "Japan = Tokyo", "Egypt = Cairo", "Italy = Milan", "Peru = Lima", "France = Lyon"].join("\n");
const SYMBOLS = { alpha: "α, decay", beta: "β, write strength", dt: "dt, step", erase: "b, erase", write: "w, write", feedback: "b, feedback", scale: "M, scale", a: "a, replacement rate", kappa: "κ", mix: "mix" };
const DEFAULTS = { pairs: CAPITALS, width: 16, similarity: 0, orthogonal: false, seed: 0, memories: [{ rule: "sum", gates: {}, feature: "identity" }, { rule: "delta", gates: {}, feature: "identity" }] };
const FEATURES = { identity: "none", "elu+1": "elu + 1", dpfp: "DPFP, twice as wide" };
const SIDES = ["--side-a", "--side-b"];
const WAIT = 120; // milliseconds after the last change of a control

export async function mount(element, api) {
  const { rules, features, limits } = await api.get("/api/memory/rules");
  const settings = restore(api.link.get("memory"), rules);
  let data = null, at = 0, timer = null, playing = null, request = 0;
  let unchanged = null; // the settings that need no link
  const change = () => {
    clearTimeout(timer);
    timer = setTimeout(load, WAIT);
  };
  const sequence = sequenceCard(settings, limits, change);
  const sides = settings.memories.map((one, index) => memorySide(index, one, rules, features, change));
  const compare = toggle("Compare with a second rule", settings.memories.length > 1, (on) => {
    sides[1].element.hidden = !on;
    load();
  });
  while (sides.length < 2) sides.push(memorySide(1, structuredClone(DEFAULTS.memories[1]), rules, features, change));
  sides[1].element.hidden = !compare.checked;
  const picture = select("picture", [["memory", "Show the memory"], ["change", "Show what this write changed"]], { "aria-label": "Picture" });
  picture.addEventListener("change", () => show(at));
  const time = timeline((t) => show(t), () => (playing ? stop() : play()), [picture, el("label", { class: "with-switch" }, compare, "Two rules")]);
  const curves = chart({ height: 200, onpick: (x) => show(x) });
  element.append(sequence.element, time.element, el("div", { class: "columns sides" }, sides.map((side) => side.element)), card("Mean recall error of the stored pairs", curves.element));

  function current() {
    return { ...sequence.read(), memories: sides.filter((side) => !side.element.hidden).map((side) => side.read()) };
  }

  async function load() {
    const body = current();
    const mine = ++request;
    try {
      const answer = await api.post("/api/memory/play", body);
      if (mine !== request) return;
      clearProblems(element);
      const atEnd = !data || at >= data.writes.length;
      data = answer;
      const state = JSON.stringify(body);
      unchanged ??= api.link.get("memory") ? "" : state;
      api.link.set({ memory: state === unchanged ? "" : state });
      sequence.keys(data.keys);
      time.update(data.writes);
      const top = data.memories.flatMap((one) => one.matrices.flat(2)).reduce((most, x) => Math.max(most, Math.abs(x)), 1e-9);
      data.memories.forEach((one, index) => sides[index].load(one, data, top));
      curves.update({
        x_label: "writes",
        x_range: [0, data.writes.length],
        series: data.memories.map((one, index) => ({ label: one.rule, color: `var(${SIDES[index]})`, x: one.mean_errors.map((_, i) => i).slice(1), mean: one.mean_errors.slice(1) })),
      });
      show(atEnd ? data.writes.length : at);
    } catch (problem) {
      if (mine === request) showProblem(element, problem);
    }
  }

  function show(t) {
    if (!data) return;
    at = Math.max(0, Math.min(data.writes.length, t));
    time.show(at);
    curves.cursor(at);
    data.memories.forEach((_, index) => sides[index].show(at, picture.value));
  }

  function play() {
    if (!data) return;
    if (at >= data.writes.length) show(0);
    playing = setInterval(() => (at >= data.writes.length ? stop() : show(at + 1)), 700);
    time.playing(true);
  }

  function stop() {
    clearInterval(playing);
    playing = null;
    time.playing(false);
  }

  await load();
  return {};
}

const shortList = (names) => (names.length > 5 ? `${names.slice(0, 4).join(", ")} and ${names.length - 4} more` : names.join(", "));

// The settings of a link; a link that somebody damaged gives the defaults.
function restore(text, rules) {
  const settings = structuredClone(DEFAULTS);
  try {
    Object.assign(settings, text ? JSON.parse(text) : {});
  } catch {
    return settings;
  }
  const memories = Array.isArray(settings.memories) ? settings.memories.slice(0, 2) : [];
  const usable = memories.length && memories.every((one) => rules.some((rule) => rule.name === one?.rule));
  return { ...settings, memories: usable ? memories : structuredClone(DEFAULTS.memories) };
}

// The pairs to write, and how names become vectors.
function sequenceCard(settings, limits, change) {
  const pairs = el("textarea", { name: "pairs", rows: 9, spellcheck: "false", oninput: change });
  pairs.value = settings.pairs;
  const [low, high] = limits.width;
  const width = slider("width", "Width d of keys and values", { min: low, max: high, step: 1, value: settings.width, oninput: change });
  const similarity = slider("similarity", "Similarity of the keys (cosine)", { min: 0, max: limits.similarity[1], step: 0.05, value: settings.similarity, oninput: change, spell: (x) => x.toFixed(2) });
  const directions = select("orthogonal", [["false", "random"], ["true", "orthogonal (at most d keys)"]]);
  directions.value = String(settings.orthogonal);
  const seed = input("seed", { type: "number", min: 0, max: 10000, value: settings.seed });
  for (const control of [directions, seed]) control.addEventListener("change", change);
  const count = input("count", { type: "number", min: 1, max: limits.pairs, value: 12 });
  const set = (text) => {
    pairs.value = text;
    change();
  };
  const generate = button("Generate", () => {
    const n = Math.max(1, Math.min(limits.pairs, Number(count.value) || 1));
    set(Array.from({ length: n }, (_, i) => `k${i + 1} = v${i + 1}`).join("\n"));
  }, { class: "quiet" });
  const key = el("select", { name: "key" });
  const value = input("value", { placeholder: "new value" });
  const overwrite = button("Overwrite", () => {
    if (!value.value.trim()) return showProblem(element, { sentence: "Type the new value first.", field: "value" });
    clearProblems(element);
    set(`${pairs.value.trimEnd()}\n${key.value} = ${value.value.trim()}`);
    value.value = "";
  }, { class: "quiet" });
  const element = card("A memory, written pair by pair",
    el("p", { class: "lead" }, "A fast-weight memory is one matrix W. Each pair is written into it by a rule; reading is W·k. What does it still know?"),
    el("div", { class: "sequence" },
      el("div", {}, field("Pairs, one per line; a key that occurs again is overwritten", pairs),
        el("div", { class: "row compact" }, el("div", { class: "grow" }, field("Key", key)), el("div", { class: "grow" }, field("New value", value)), overwrite)),
      el("div", {}, width.element, similarity.element,
        el("div", { class: "row compact" }, el("div", { class: "grow" }, field("Directions of the keys", directions)), el("div", { class: "short" }, field("Seed", seed))),
        el("div", { class: "row compact" }, el("div", { class: "short" }, field("Pairs", count)), generate, button("Capitals", () => set(CAPITALS), { class: "quiet" })))),
    el("p", { class: "field-error", role: "alert", "data-error": "" }));
  return {
    element,
    read: () => ({ pairs: pairs.value, width: width.value, similarity: similarity.value, orthogonal: directions.value === "true", seed: Number(seed.value) }),
    keys(names) {
      const before = key.value;
      key.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      if (names.includes(before)) key.value = before;
    },
  };
}

// The slider over the writes.
function timeline(onmove, onplay, extras) {
  const id = newId("time");
  const range = el("input", { type: "range", id, min: 0, max: 0, value: 0, "aria-label": "Write" });
  const now = el("p", { class: "now", role: "status" });
  const ticks = el("div", { class: "ticks", "aria-hidden": "true" });
  const start = button("▶", onplay, { class: "icon", "aria-label": "Play" });
  range.addEventListener("input", () => onmove(Number(range.value)));
  const step = (by, text, label) => button(text, () => onmove(Number(range.value) + by), { class: "icon", "aria-label": label });
  const element = el("section", { class: "card timeline", "aria-label": "Timeline" }, el("div", { class: "head-row" }, now, el("div", { class: "extras" }, extras)), el("div", { class: "controls" }, step(-1, "‹", "Back one write"), start, step(1, "›", "Forward one write"), el("div", { class: "grow" }, range, ticks)));
  let writes = [];
  return {
    element,
    update(next) {
      writes = next;
      range.max = writes.length;
      ticks.replaceChildren(...writes.map((write) => el("span", { class: write.replaces ? "overwrite" : "" })));
    },
    show(t) {
      range.value = t;
      [...ticks.children].forEach((tick, index) => tick.classList.toggle("written", index < t));
      const write = writes[t - 1];
      const text = write ? `Write ${t} of ${writes.length}: ${write.key} = ${write.value}${write.replaces ? `, instead of ${write.replaces}` : ""}` : "Nothing is written yet; every answer is zero.";
      range.setAttribute("aria-valuetext", text);
      now.replaceChildren(...(write ? [`Write ${t} of ${writes.length}: `, el("b", {}, `${write.key} = ${write.value}`), write.replaces ? el("span", {}, ", instead of ", el("s", {}, write.replaces)) : ""] : [text]));
    },
    playing(on) {
      start.textContent = on ? "❚❚" : "▶";
      start.setAttribute("aria-label", on ? "Pause" : "Play");
    },
  };
}

// One memory: its rule and gates, its picture, and what it recalls.
function memorySide(index, settings, rules, features, change) {
  const rule = select("rule", rules.map((one) => one.name));
  rule.value = settings.rule;
  const feature = select("feature", features.map((name) => [name, FEATURES[name] ?? name]));
  feature.value = settings.feature;
  const about = el("p", { class: "about" });
  const gates = el("div", { class: "gates" });
  const name = el("h2", {});
  const pill = el("span", { class: "pill" });
  const matrix = el("div", { class: "matrix" });
  const scale = el("div", { class: "centered" });
  const list = el("ul", { class: "recall", tabindex: 0, "aria-label": "Recall of every pair" });
  let sliders = {}, one = null, all = null, top = 1, map = null, shape = "", frame = [0, "memory"];

  function build(values) {
    const chosen = rules.find((other) => other.name === rule.value);
    about.textContent = chosen.about;
    name.textContent = chosen.name;
    sliders = {};
    const make = (gate, key, label, value) => (sliders[key] = slider(`${gate.name}-${index}`, label, { min: 0, max: gate.largest, step: 0.01, value, oninput: change, spell: (x) => x.toFixed(2) })).element;
    gates.replaceChildren(...chosen.gates.flatMap((gate) => {
      const value = values[gate.name] ?? gate.default;
      const [first, last] = Array.isArray(value) ? value : [value, value];
      const label = SYMBOLS[gate.name] ?? gate.name;
      if (gate.name !== "alpha" || !gate.channels) return [make(gate, gate.name, label, first)];
      return [make(gate, gate.name, "α of the first channel", first), make(gate, `${gate.name}-last`, "α of the last channel", last)];
    }));
  }
  rule.addEventListener("change", () => {
    build({});
    change();
  });
  feature.addEventListener("change", change);
  build(settings.gates ?? {});

  const picked = (label, control) => field(label, control, { name: `${control.name}-${index}` });
  const element = el("section", { class: `card side ${index ? "second" : ""}`, "data-side": index },
    el("div", { class: "head-row" }, name, pill), el("div", { class: "row compact" }, el("div", { class: "grow" }, picked("Rule", rule)), el("div", { class: "grow" }, picked("Feature map of the keys", feature))),
    el("div", {}, about, gates), matrix, scale, el("div", { class: "recall-head", "aria-hidden": "true" }, el("span", {}, "pair"), el("span", {}, "recall error"), el("span", {}, "says")), list);

  const picture = () => {
    const [t, kind] = frame;
    if (kind === "memory" || t === 0) return one.matrices[t];
    return one.matrices[t].map((row, r) => row.map((x, c) => x - one.matrices[t - 1][r][c]));
  };

  function entry(key, i, t) {
    const value = all.latest[t][i], error = one.errors[t][i], says = one.answers[t][i], left = one.remains[t][i];
    const current = t > 0 && all.writes[t - 1].key === key;
    if (value == null) return el("li", { class: "unwritten" }, el("span", { class: "pair" }, key), el("span", {}), el("span", { class: "error" }, "–"), el("span", { class: "muted" }, "not yet"));
    const lost = one.forgotten[t].includes(i);
    const rest = left != null && left > 0.005 ? el("span", { class: "left" }, `${percent(Math.max(0, left))} of the old value is left`) : null;
    return el("li", { class: `${current ? "now" : ""} ${lost ? "forgotten" : ""}`, "data-key": key },
      el("span", { class: "pair" }, `${key} = ${value}`, rest), bar(error), el("span", { class: "error" }, error < 5e-4 ? "0" : number(error, 2)),
      el("span", { class: `says ${lost ? "wrong" : ""}` }, lost ? `✗ ${says ?? "nothing"}` : `✓ ${says}`));
  }

  return {
    element,
    read() {
      const values = {};
      for (const [key, control] of Object.entries(sliders)) if (!key.endsWith("-last")) values[key] = sliders[`${key}-last`] ? [control.value, sliders[`${key}-last`].value] : control.value;
      return { rule: rule.value, gates: values, feature: feature.value };
    },
    load(next, everything, largest) {
      [one, all, top] = [next, everything, largest];
      const [rows, columns] = [next.matrices[0].length, next.matrices[0][0].length];
      if (shape === `${next.rule}, ${rows}×${columns}`) return;
      shape = `${next.rule}, ${rows}×${columns}`;
      const ids = (count) => Array.from({ length: count }, (_, i) => String(i + 1));
      map = heatmap({ label: `Memory W of rule ${shape}`, rows: ids(rows), columns: ids(columns), kind: columns > 24 ? "square dense" : "square", describe: (r, c) => `W[${r + 1}, ${c + 1}] = ${number(picture()[r][c])}` });
      matrix.replaceChildren(map.element);
    },
    show(t, kind) {
      frame = [t, kind];
      map.update(picture().map((row) => row.map((x) => x / top)));
      scale.replaceChildren(colorScale(`−${number(top, 2)}`, number(top, 2), { diverging: true }));
      const stored = all.latest[t].filter((value) => value != null).length, lost = one.forgotten[t].length;
      pill.textContent = !stored ? "empty" : lost ? `${lost} of ${stored} forgotten: ${shortList(one.forgotten[t].map((i) => all.keys[i]))}` : `all ${stored} recalled`;
      pill.className = `pill ${!stored ? "" : lost ? "bad" : "good"}`;
      list.replaceChildren(...all.keys.map((key, i) => entry(key, i, t)));
    },
  };
}
