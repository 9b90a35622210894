// The frame of the page: the tabs, the choice of a model, and the color theme.
import { Problem, api } from "./api.js";
import { button, clearProblems, el, field, input, progress, showProblem } from "./ui.js";

const TITLES = { edit: "Edit", ledger: "Ledger", trace: "Trace", memory: "Memory", lab: "Lab" };
const POLL = 4000; // milliseconds
const panels = new Map();

function buildTabs() {
  const list = document.getElementById("tabs");
  const main = document.getElementById("main");
  for (const [name, title] of Object.entries(TITLES)) {
    const tab = button(title, () => show(name), { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, "aria-selected": "false", tabindex: -1 });
    const panel = el("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, class: "panel", hidden: true });
    list.append(tab);
    main.append(panel);
    panels.set(name, { tab, panel, mounted: null });
  }
  list.addEventListener("keydown", (event) => {
    const names = [...panels.keys()];
    const at = names.findIndex((name) => panels.get(name).tab === document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    const next = names[(to + names.length) % names.length];
    show(next);
    panels.get(next).tab.focus();
  });
}

async function show(name) {
  const current = panels.has(name) ? name : "edit";
  for (const [other, { tab, panel }] of panels) {
    const selected = other === current;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    panel.hidden = !selected;
  }
  api.link.set({ tab: current });
  document.title = `${TITLES[current]} · rebind studio`;
  const entry = panels.get(current);
  entry.mounted ??= import(`./${current}.js`).then((module) => module.mount(entry.panel, api) ?? {});
  (await entry.mounted).show?.();
}

function buildModelChoice(state) {
  const name = input("model", { value: state.model, list: "models", spellcheck: "false" });
  const options = el("datalist", { id: "models" }, state.models.map((value) => el("option", { value })));
  const load = el("button", { type: "submit", class: "quiet" }, "Load");
  const work = progress();
  const form = el("form", { class: "model-form", "aria-label": "Model" }, field("Model", name), options, load, work.element);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    wait((options) => api.job("/api/model", { model: name.value }, options));
  });

  async function wait(start) {
    clearProblems(form);
    load.disabled = true;
    try {
      const { model } = await start({ onStage: work.update, signal: work.start() });
      document.documentElement.dataset.model = model;
      api.emit("model", model);
      api.emit("ledger");
    } catch (problem) {
      const { model } = document.documentElement.dataset;
      const canceled = problem.code === "cancelled";
      if (canceled && model) name.value = model;
      const sentence = canceled ? `Canceled. ${model ? `${model} stays` : "No model is loaded"}.` : problem.sentence ?? String(problem);
      showProblem(form, { sentence, field: "model" });
    } finally {
      load.disabled = false;
      work.stop();
    }
  }

  document.getElementById("model").append(form);
  const loading = state.jobs.find((job) => job.name === "load");
  if (loading) wait((options) => api.follow(loading, options));
  else if (state.loaded) document.documentElement.dataset.model = state.model;
  else if (state.problem) showProblem(form, new Problem(state.problem));
}

// Another browser tab, or another program, may change the edits or the model.
function watchOthers(state) {
  let { ledger, model } = state;
  let own = 0; // changes by this page are known already: its tabs have shown them
  api.on("job", async () => {
    const mine = ++own;
    const now = await api.get("/api/state").catch(() => null);
    if (now && mine === own) ({ ledger, model } = now);
  });
  setInterval(async () => {
    const before = own;
    const now = document.hidden ? null : await api.get("/api/state").catch(() => null);
    if (!now?.loaded || own !== before || now.jobs.length) return;
    if (now.model !== model) api.emit("model", (model = now.model));
    if (now.ledger !== ledger) api.emit("ledger", (ledger = now.ledger));
  }, POLL);
}

function buildThemeSwitch() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const choice = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const apply = (theme) => {
    root.dataset.theme = theme;
    choice.textContent = theme === "dark" ? "☀" : "☾";
    choice.setAttribute("aria-label", theme === "dark" ? "Use light colors" : "Use dark colors");
    choice.title = choice.getAttribute("aria-label");
  };
  const current = () => stored() ?? (dark.matches ? "dark" : "light");
  apply(current());
  dark.addEventListener("change", () => apply(current()));
  choice.addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", theme); } catch { /* the choice lasts as long as the page */ }
    apply(theme);
  });
}

buildThemeSwitch();
buildTabs();
addEventListener("hashchange", () => { show(api.link.get("tab", "edit")); api.emit("link"); });
api.get("/api/state").then((state) => {
  buildModelChoice(state);
  watchOthers(state);
  show(api.link.get("tab", "edit"));
  document.documentElement.dataset.ready = "true";
}).catch((problem) => document.getElementById("main").replaceChildren(el("p", { class: "field-error", role: "alert" }, problem.sentence ?? String(problem))));
