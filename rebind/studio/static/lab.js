// The Lab tab: an experiment in its quick version, with live curves, then its claims.
import { chart } from "./charts.js";
import { card, clearProblems, el, progress, seconds, showProblem } from "./ui.js";

export async function mount(element, api) {
  const { experiments } = await api.get("/api/lab/experiments");
  const chosen = api.link.get("experiment", "closed-form");
  const choices = el("fieldset", { class: "choices", "data-field": "experiment" }, el("legend", { class: "visually-hidden" }, "Experiment"),
    experiments.map(({ name, title }) => el("label", { class: "choice" }, el("input", { type: "radio", name: "experiment", value: name, checked: name === chosen }), el("b", {}, name), el("span", {}, title))));
  const go = el("button", { type: "submit", class: "primary" }, "Run the quick version");
  const work = progress();
  const form = el("form", { "aria-label": "Run an experiment" },
    el("p", { class: "lead" }, "Each experiment measures what a memory holds, forgets or costs, and checks its claims against its own numbers. The quick version takes seconds."),
    choices, el("p", { class: "field-error", role: "alert", "data-error": "experiment" }), go,
    el("p", { class: "field-error", role: "alert", "data-error": "" }), work.element);
  const results = el("div", {});
  element.append(card("Experiments", form), results);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearProblems(form);
    const name = new FormData(form).get("experiment");
    const about = experiments.find((one) => one.name === name);
    const view = liveView(about);
    results.replaceChildren(view.element);
    api.link.set({ experiment: name });
    go.disabled = true;
    try {
      const onStage = (state) => {
        work.update(state);
        if (state.data) view.draw(state.data);
      };
      const result = await api.job("/api/lab/run", { experiment: name }, { onStage, signal: work.start() });
      view.draw({ panels: result.panels, done: result.points, total: result.points });
      results.append(...ending(result));
    } catch (problem) {
      view.stop();
      showProblem(form, problem.code === "cancelled" ? { sentence: "The run was canceled; nothing of it is kept.", field: "" } : problem);
    } finally {
      go.disabled = false;
      work.stop();
    }
  });
  return {};
}

// The curves so far. Charts are created once and updated, so that a run does not flicker.
function liveView({ name, title, answers }) {
  const count = el("span", { class: "muted", role: "status" });
  const place = el("div", { class: "charts" });
  const element = card("", el("div", { class: "head-row" }, el("h2", {}, title), count), el("p", { class: "muted" }, `Answers: ${answers}.`), place);
  element.setAttribute("data-experiment", name);
  let charts = [];
  return {
    element,
    draw({ panels, done, total }) {
      if (!charts.length) {
        charts = panels.map(() => chart());
        place.replaceChildren(...charts.map((one) => one.element));
      }
      panels.forEach((panel, index) => charts[index].update(panel));
      count.textContent = done < total ? `${done} of ${total} points` : `${total} points`;
    },
    stop() {
      count.textContent += ", canceled";
    },
  };
}

function ending({ claims, table, figure, seconds: spent, experiment }) {
  const holds = claims.filter((claim) => claim.holds).length;
  const list = el("ul", { class: "claims" }, claims.map(({ statement, holds: held, measured }) =>
    el("li", {}, el("span", { class: `pill ${held ? "good" : "bad"}` }, held ? "✓ holds" : "✗ does not hold"), el("span", {}, statement), el("small", {}, measured))));
  const parts = [card("", el("div", { class: "head-row" }, el("h2", {}, `${holds} of ${claims.length} claims hold`), el("span", { class: "muted" }, seconds(spent))), list, numbers(table))];
  if (figure) {
    const source = URL.createObjectURL(new Blob([figure], { type: "image/svg+xml" }));
    const data = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(figure)}`;
    parts[0].append(el("details", { class: "more" }, el("summary", {}, "The figure, as rebind lab draws it"), el("img", { class: "figure", src: data, alt: `Figure of the experiment ${experiment}` }), el("a", { href: source, download: `${experiment}.svg` }, "Save as SVG")));
  }
  return parts;
}

function numbers({ header, rows }) {
  return el("details", { class: "more" }, el("summary", {}, "The numbers"), el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, header.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))))));
}
