// What an edit changed: before and after, side by side.
import { bar, card, el, percent, seconds, showProblem, toggle } from "./ui.js";

const FRAMINGS = {
  start: "As written",
  plain: "Without start tokens",
  text: "In a text",
  paraphrase: "In other words",
  chat: "As a chat question",
};

export function showResult(place, api, result, notes = []) {
  place.replaceChildren(
    summary(api, result, notes),
    el("div", { class: "columns" }, answer("Before", "before", result), answer("After", "after", result)),
    framings(result),
    related(result),
  );
  place.querySelector("h2")?.scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function summary(api, { edit, fact, framings, related, drift, seconds: spent, before, after }, notes) {
  const said = framings.filter((one) => one.after.said).length;
  const stayed = related.filter((one) => !one.changed).length;
  const box = card(null);
  const power = toggle(`Fact of edit ${edit.id} is on`, true, async (on, control) => {
    control.disabled = true;
    try {
      await api.job("/api/ledger/switch", { edit: edit.id, on, prompts: [] });
      api.emit("ledger");
    } catch (problem) {
      control.checked = !on;
      showProblem(box, problem);
    } finally {
      control.disabled = false;
    }
  });
  box.classList.add("verdict");
  box.append(
    el("div", { class: "verdict-line" },
      el("h2", { class: "fact" }, fact.before, el("mark", {}, fact.subject), fact.after, " ", el("b", { class: "new" }, fact.target)),
      el("span", { class: "row" }, el("span", { class: "pill" }, edit.id), power)),
    el("dl", { class: "tiles" },
      tile("Target probability", `${percent(before.target)} → ${percent(after.target)}`),
      tile("Ways of asking", `${said} of ${framings.length}`, said === framings.length ? "good" : said ? "" : "bad", "in which the model says it"),
      tile("Other answers", `${stayed} of ${related.length}`, stayed === related.length ? "good" : "", "stayed the same"),
      tile("Drift", drift.kl < 0.0005 ? "< 0.001" : drift.kl.toFixed(3), "", "nats on unrelated prompts"),
      tile("Time", seconds(spent.writing), "", `and ${seconds(spent.asking)} to ask`)),
    el("p", { class: "hint" }, edit.memory === "dense" ? "Held by the dense memory beside the weights." : `Written into the weights of layer${(edit.layers ?? []).length > 1 ? "s" : ""} ${(edit.layers ?? []).join(", ")} by ${edit.method}.`,
      edit.forced ? " It was written although a check failed." : ""),
    ...edit.failed.map((text) => el("p", { class: "hint" }, text)),
    ...notes.map((text) => el("p", { class: "hint" }, text)),
    el("p", { class: "field-error", role: "alert", "data-error": "" }),
  );
  return box;
}

const tile = (name, value, kind = "", note = "") =>
  el("div", { class: `tile ${kind}` }, el("dt", {}, name), el("dd", {}, value, note && el("small", {}, note)));

function answer(title, kind, result) {
  const { top, says } = result[kind];
  const rows = top.map(({ token, probability }) => el("li", {},
    el("code", { class: "token" }, shown(token)), bar(probability, kind), el("span", { class: "number" }, percent(probability))));
  return el("section", { class: `card side ${kind}` }, el("h2", {}, title),
    el("p", { class: "continuation" }, result.fact.text, el("b", {}, says.trimEnd())),
    el("h3", {}, "Most likely next tokens"), el("ol", { class: "tokens" }, rows));
}

const shown = (token) => token.replace(/\n/g, "⏎").replace(/^ /, "") || "␣";

function framings({ framings: asked }) {
  const rows = asked.map(({ framing, prompt, before, after }) => el("tr", {},
    el("th", { scope: "row" }, FRAMINGS[framing] ?? framing),
    el("td", {}, prompt),
    el("td", { class: "said" }, el("span", { class: "before-text" }, clip(before.answer))),
    el("td", { class: "said" }, el("span", { class: after.said ? "after-text" : "muted" }, clip(after.answer)), " ", mark(after.said))));
  const head = el("tr", {}, ["Asked", "Prompt", "Before", "After"].map((name) => el("th", { scope: "col" }, name)));
  return card("The fact, asked in every framing", el("div", { class: "scroll" }, el("table", { class: "stack" }, el("thead", {}, head), el("tbody", {}, rows))));
}

const mark = (said) => el("span", { class: `pill ${said ? "good" : "bad"}` }, said ? "says it" : "does not");

const clip = (text, most = 90) => {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > most ? `${line.slice(0, most)}…` : line || "(nothing)";
};

function related({ related: asked, fact }) {
  const group = (kind, title) => {
    const rows = asked.filter((one) => one.kind === kind).sort((a, b) => b.changed - a.changed);
    if (!rows.length) return null;
    return el("section", { class: "card" }, el("h2", {}, title), el("ul", { class: "changes" }, rows.map(change)));
  };
  return el("div", { class: "columns" }, group("subject", `Other answers about ${fact.subject}`), group("neighbor", "The same question about others"));
}

function change({ prompt, before, after, changed }) {
  return el("li", { class: changed ? "changed" : "same" },
    el("span", {}, prompt, " ", changed && el("del", {}, clip(before.says, 40)), changed && " ", el(changed ? "ins" : "span", { class: "answer" }, clip(after.says, 40))),
    el("span", { class: `pill ${changed ? "after" : ""}` }, changed ? "changed" : "same"));
}
