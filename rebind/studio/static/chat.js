// A conversation with the base model and the edited model, next to each other.
import { card, clearProblems, el, field, input, progress, showProblem } from "./ui.js";

export function mountChat(place, api) {
  const question = input("question", { placeholder: "What is the capital of France?" });
  const send = el("button", { type: "submit" }, "Ask both");
  const turns = el("div", { class: "turns", role: "log", "aria-label": "Conversation" });
  const work = progress();
  const form = el("form", { class: "chat-form", "aria-label": "Chat" }, field("Question", question, { hidden: true }), send);
  const clear = el("button", { type: "button", class: "quiet", hidden: true }, "Start over");
  let history = [];

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearProblems(form);
    send.disabled = true;
    const asked = question.value;
    const base = el("p", { class: "bubble before" }, "…");
    const edited = el("p", { class: "bubble after" }, "…");
    const turn = el("div", { class: "turn" }, el("p", { class: "bubble asked" }, asked), base, edited);
    try {
      const onStage = (state) => {
        work.update(state);
        if (!turn.isConnected) turns.append(turn);
        if (state.data?.base) base.textContent = state.data.base;
      };
      const answer = await api.job("/api/edit/chat", { question: asked, history }, { onStage, signal: work.start() });
      base.textContent = answer.base || "(nothing)";
      edited.textContent = answer.edited || "(nothing)";
      edited.classList.toggle("same", answer.base === answer.edited);
      history = [...history, { question: asked, ...answer }];
      question.value = "";
      clear.hidden = false;
    } catch (problem) {
      turn.remove();
      showProblem(form, problem);
    } finally {
      work.stop();
      send.disabled = false;
      question.focus({ preventScroll: true });
    }
  });
  const reset = () => { history = []; turns.replaceChildren(); clear.hidden = true; };
  clear.addEventListener("click", reset);
  api.on("model", reset);

  place.append(card("Talk to both models",
    el("div", { class: "turn-heads" }, el("h3", { class: "before-text" }, "Base model"), el("h3", { class: "after-text" }, "Edited model")),
    turns, form, work.element, clear));
}
