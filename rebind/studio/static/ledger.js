// The Ledger tab: every fact with a switch, consolidation, export and import.
import { bar, button, card, clearProblems, el, field, input, percent, progress, select, showProblem, toggle } from "./ui.js";

const WATCHED = 3; // prompts that are asked again after a switch

const written = (time) => new Date(time).toLocaleString("en-US", { dateStyle: "medium", timeStyle: "short" });

export function mount(element, api) {
  const search = input("search", { type: "search", placeholder: "France, Rome, e0003, dense…" });
  const state = select("state", [["all", "All facts"], ["on", "Switched on"], ["off", "Switched off"]]);
  const count = el("p", { class: "muted count", role: "status" });
  const list = el("ul", { class: "facts" });
  const moves = el("ul", { class: "facts" });
  const pages = el("nav", { class: "pages", "aria-label": "Pages" });
  const watch = watchPanel(api);
  const box = card("Facts",
    el("div", { class: "row" },
      el("div", { class: "grow" }, field("Search", search)), field("Show", state),
      el("div", { class: "row field" }, button("Undo the newest", () => flip("newest", false)), button("Redo the newest", () => flip("newest", true)))),
    count, el("p", { class: "field-error", role: "alert", "data-error": "" }), list, moves, pages);
  let page = 1;
  let wanted = 0; // the number of the newest request, so that a slow answer does not replace a newer one

  async function load() {
    const mine = ++wanted;
    try {
      const query = new URLSearchParams({ search: search.value, state: state.value, page });
      const found = await api.get(`/api/ledger/facts?${query}`);
      if (mine === wanted) draw(found);
    } catch (problem) {
      if (mine === wanted) count.textContent = problem.sentence ?? String(problem);
    }
  }

  function draw(found) {
    page = found.page;
    const n = (number) => number.toLocaleString("en-US");
    const some = found.matches === found.facts ? "" : `${n(found.matches)} of `;
    count.textContent = found.facts
      ? `${some}${n(found.facts)} fact${found.facts === 1 ? "" : "s"}, ${n(found.on)} on, ${n(found.dense)} in the dense memory.`
      : "No facts yet. Write one in the Edit tab, or import a file below.";
    list.replaceChildren(...found.rows.map(factRow));
    moves.replaceChildren(...found.moves.map(moveRow));
    pages.replaceChildren(...(found.pages > 1 ? [
      button("← Newer", () => { page -= 1; load(); }, { disabled: page <= 1 }),
      el("span", {}, `Page ${n(page)} of ${n(found.pages)}`),
      button("Older →", () => { page += 1; load(); }, { disabled: page >= found.pages })] : []));
    watch.offer(found.rows.slice(0, WATCHED).map((row) => row.text));
    places.update(found);
  }

  function factRow(row) {
    const power = toggle(`${row.text} ${row.target}`, row.on, (on, control) => flip(row.edit, on, control), { "data-edit": row.edit });
    const where = row.memory === "dense" ? "dense memory" : row.moved_by ? `weights (moved by ${row.moved_by})` : "weights";
    return el("li", { class: row.on ? "fact-row" : "fact-row off" }, power,
      el("div", { class: "grow" },
        el("p", { class: "fact-text" }, row.before, el("mark", {}, row.subject), row.after, " ", el("b", { class: "new" }, row.target)),
        el("p", { class: "tags" },
          el("span", { class: "pill" }, row.edit),
          el("span", { class: `pill ${row.memory === "dense" ? "after" : "before"}` }, where),
          el("span", { class: "muted" }, row.method),
          row.together > 1 && el("span", { class: "muted" }, `switches with ${(row.together - 1).toLocaleString("en-US")} more`),
          el("time", { class: "muted", datetime: row.created }, written(row.created)),
          row.forced && el("span", { class: "pill bad" }, "forced"))),
      button("Watch", () => watch.add(row.text), { class: "quiet", "aria-label": `Watch the answer to ${row.text}` }));
  }

  function moveRow(move) {
    const text = `${move.edit} moved ${move.facts} fact${move.facts === 1 ? "" : "s"} into the weights`;
    return el("li", { class: move.on ? "fact-row" : "fact-row off" },
      toggle(text, move.on, (on, control) => flip(move.edit, on, control), { "data-edit": move.edit }), el("p", { class: "grow fact-text" }, text));
  }

  async function flip(edit, on, control, force = false) {
    clearProblems(box);
    if (control) control.disabled = true;
    const began = performance.now();
    const spent = {}; // milliseconds until the fact is switched, and until the model has answered
    const onStage = ({ is_committed: switched, data }) => {
      if (switched && !spent.switch) {
        spent.switch = performance.now() - began;
        load().then(() => focusSwitch(edit, control));
      }
      if (data) watch.answers(data.answers, spent, began);
    };
    try {
      const { answers } = await api.job("/api/ledger/switch", { edit, on, force, prompts: watch.prompts() }, { onStage });
      watch.answers(answers, spent, began);
    } catch (problem) {
      if (control) control.checked = !on;
      showProblem(box, problem);
      if ((problem.advice ?? "").includes("Write it anyway")) {
        box.querySelector('[data-error=""]').append(" ", button("Write it anyway", () => flip(edit, on, control, true), { class: "quiet danger" }));
      }
      if (control) control.disabled = false;
    }
  }

  // The list is drawn anew: the switch that had the focus is another one now.
  function focusSwitch(edit, control) {
    if (control && [document.body, control].includes(document.activeElement)) box.querySelector(`[data-edit="${edit}"]`)?.focus({ preventScroll: true });
  }

  let typing;
  search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => { page = 1; load(); }, 200); });
  state.addEventListener("change", () => { page = 1; load(); });
  const places = transfer(api, load);
  element.append(el("div", { class: "ledger" }, box, el("div", { class: "aside" }, watch.element)), places.element);
  api.on("ledger", () => { load(); watch.ask(); });
  api.on("model", () => { page = 1; watch.reset(); load(); });
  return { show: load };
}

// Prompts that are asked again whenever a switch is flipped.
function watchPanel(api) {
  const list = el("ul", { class: "watched", "aria-live": "polite" });
  const prompt = input("prompt", { placeholder: "The capital of France is" });
  const form = el("form", { class: "chat-form" }, field("Prompt", prompt, { hidden: true }), el("button", { type: "submit" }, "Watch"));
  const time = el("p", { class: "hint", id: "switch-time" });
  const element = card("Answers, live", el("p", { class: "muted" }, "These prompts are asked again whenever you flip a switch."), list, time, form);
  let watched = [];
  let chosen = false; // whether the user chose, so that newer facts do not replace the prompts

  const draw = () => list.replaceChildren(...watched.map((one) => el("li", {},
    el("div", { class: "watched-head" }, el("span", { class: "fact-text" }, one.prompt),
      button("×", () => { chosen = true; watched = watched.filter((other) => other !== one); draw(); }, { class: "quiet close", "aria-label": `Stop watching ${one.prompt}` })),
    line("before", "base", one.base), line("after", "now", one.edited, one.fresh))));

  function line(kind, name, answer, fresh = false) {
    const best = answer?.top[0];
    return el("div", { class: `watched-line ${fresh ? "fresh" : ""}` }, el("span", { class: `${kind}-text` }, name),
      el("span", { class: "watched-answer" }, best ? answer.says.trim().replace(/\s+/g, " ") : "…"), bar(best?.probability, kind), el("span", { class: "number" }, best ? percent(best.probability) : ""));
  }

  async function ask() {
    const prompts = watched.map((one) => one.prompt);
    if (!prompts.length) return;
    clearProblems(form);
    try {
      const { answers } = await api.job("/api/ledger/ask", { prompts });
      watched = watched.map((one) => ({ ...one, ...answers.find((answer) => answer.prompt === one.prompt), fresh: false }));
      draw();
    } catch (problem) {
      showProblem(form, { sentence: problem.sentence, field: "prompt" });
    }
  }

  function add(text) {
    chosen = true;
    if (watched.every((one) => one.prompt !== text)) watched = [{ prompt: text }, ...watched].slice(0, WATCHED);
    draw();
    return ask();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (prompt.value.trim()) add(prompt.value.trim()).then(() => { prompt.value = ""; });
  });
  return {
    element, add, ask,
    prompts: () => watched.map((one) => one.prompt),
    reset() { watched = []; chosen = false; draw(); },
    offer(texts) {
      if (chosen || !texts.length || texts.every((text) => watched.some((one) => one.prompt === text))) return;
      watched = [...new Set(texts)].map((text) => ({ prompt: text }));
      draw();
      ask();
    },
    // Answers come twice: first the next tokens alone, then the rest. `spent` is shown after the first of them.
    answers(answers, spent, began) {
      spent.answer ??= performance.now() - began;
      watched = watched.map((one) => {
        const now = answers.find((answer) => answer.prompt === one.prompt)?.edited ?? one.edited;
        return { ...one, edited: now, fresh: now?.top[0].token !== one.edited?.top[0].token };
      });
      const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
      time.textContent = `Switched in ${seconds(spent.switch)}${answers.length ? `, answered in ${seconds(spent.answer)}` : ""}.`;
      draw();
    },
  };
}

// Consolidate, export and import: three small forms, each a job.
function transfer(api, reload) {
  const exports = el("span", { class: "mono" });
  const ledger = el("span", { class: "mono" });
  const name = input("name", { placeholder: "my-edit" });
  const kind = select("kind", [["checkpoint", "Checkpoint (whole model)"], ["memory", "Dense memory"], ["adapter", "Adapter (PEFT LoRA)"], ["json", "Facts (JSON)"]]);
  const budget = input("budget", { type: "number", min: 1, placeholder: "all" });
  const file = el("input", { type: "file", name: "file", accept: ".json,.jsonl,.csv,.tsv" });
  const method = select("method", [["dense", "dense memory"], ["memit", "weights (memit)"], ["alphaedit", "weights (alphaedit)"]]);
  const separate = toggle("A switch for each fact", false, () => {}, { name: "separate" });

  const consolidate = jobForm(api, "Consolidate", [
    el("p", { class: "muted" }, "Move facts from the dense memory into the weights, the oldest first, as far as they fit."), field("Facts at most", budget)],
  "/api/ledger/consolidate", () => ({ budget: budget.value ? Number(budget.value) : 0 }),
  (done) => `${done.moved} moved, ${done.stayed} stayed${done.reason ? `: ${done.reason}` : ""}.`, reload);

  const out = jobForm(api, "Export", [el("p", { class: "muted" }, "Writes a new folder or file in ", exports), field("Kind", kind), field("Name", name)],
    "/api/ledger/export", () => ({ kind: kind.value, name: name.value }), (done) => `Written to ${done.path}.`, reload);

  const into = jobForm(api, "Import", [
    el("p", { class: "muted" }, "A file of facts: JSONL, JSON or CSV with prompt, subject and target."),
    field("File", file), field("Into", method), el("label", { class: "row inline" }, separate, "A switch for each fact (slower)"),
    el("p", { class: "field-error", role: "alert", "data-error": "separate" })],
  "/api/ledger/import", async () => ({ name: file.files[0]?.name ?? "", text: (await file.files[0]?.text()) ?? "", method: method.value, separate: separate.checked }),
  (done) => `${done.facts} fact${done.facts === 1 ? "" : "s"} written as ${done.edits.length === 1 ? done.edits[0] : `${done.edits.length} edits`}.`, reload);

  const element = el("div", {}, el("div", { class: "columns three" }, consolidate, out, into), el("p", { class: "hint" }, "Ledger: ", ledger));
  return {
    element,
    update(found) {
      exports.textContent = found.exports;
      ledger.textContent = found.ledger || "in memory";
    },
  };
}

function jobForm(api, title, fields, path, body, describe, reload) {
  const start = el("button", { type: "submit" }, title);
  const done = el("p", { class: "done", role: "status" });
  const work = progress();
  const form = el("form", { class: "card", "aria-label": title, novalidate: true }, el("h2", {}, title), ...fields, start,
    el("p", { class: "field-error", role: "alert", "data-error": "" }), done, work.element);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearProblems(form);
    done.textContent = "";
    start.disabled = true;
    try {
      done.textContent = describe(await api.job(path, await body(), { onStage: work.update, signal: work.start() }));
      await reload();
    } catch (problem) {
      showProblem(form, problem.field === "text" ? { sentence: "Choose a file.", field: "file" } : problem);
    } finally {
      work.stop();
      start.disabled = false;
    }
  });
  return form;
}
