// A sentence in which a person marks the subject: by selecting it, with the mouse or with Shift and the arrow keys, or
// by typing braces around it. The mark is drawn behind the text.
import { el } from "./ui.js";

const MARKED = /(^|[^{])\{([^{}]+)\}(?!\})/;

export function sentence({ onchange = () => {} } = {}) {
  const shadow = el("div", { class: "sentence-shadow", "aria-hidden": "true" });
  const text = el("textarea", { name: "sentence", rows: 1, spellcheck: "false", autocomplete: "off", class: "sentence-text" });
  const element = el("div", { class: "sentence" }, shadow, text);
  let span = null; // where the subject begins and ends

  function draw() {
    const value = text.value;
    const parts = span ? [value.slice(0, span[0]), el("mark", {}, value.slice(...span)), value.slice(span[1])] : [value];
    shadow.replaceChildren(...parts, "\u200b"); // so that an empty last line has a height
    onchange();
  }

  function setSpan(begin, end) {
    while (begin < end && /\s/.test(text.value[begin])) begin += 1;
    while (end > begin && /\s/.test(text.value[end - 1])) end -= 1;
    span = end > begin ? [begin, end] : span;
    draw();
  }

  function readBraces() {
    const match = MARKED.exec(text.value);
    if (!match) return;
    const begin = match.index + match[1].length;
    const caret = Math.max(begin, (text.selectionStart ?? 0) - 2);
    text.value = text.value.slice(0, begin) + match[2] + text.value.slice(begin + match[2].length + 2);
    span = [begin, begin + match[2].length];
    text.setSelectionRange(caret, caret);
  }

  // Keep the mark on the same words while the text around them is edited.
  let previous = "";
  function followEdit() {
    const value = text.value;
    if (span) {
      const subject = previous.slice(...span);
      const at = value.indexOf(subject);
      span = at >= 0 ? [at, at + subject.length] : null;
    }
    readBraces();
    previous = text.value;
    draw();
  }

  const markSelection = () => {
    if (text.selectionEnd - text.selectionStart > 0 && text.selectionEnd - text.selectionStart < text.value.length) {
      setSpan(text.selectionStart, text.selectionEnd);
    }
  };
  text.addEventListener("input", followEdit);
  text.addEventListener("pointerup", () => setTimeout(markSelection));
  text.addEventListener("keyup", (event) => { if (event.key === "Shift") markSelection(); });
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    text.form?.requestSubmit();
  });

  return {
    element,
    text,
    get subject() {
      return span ? text.value.slice(...span) : "";
    },
    set subject(subject) {
      const at = subject ? text.value.indexOf(subject) : -1;
      span = at >= 0 ? [at, at + subject.length] : null;
      draw();
    },
    // The sentence with braces around the subject, and its own braces doubled, as the server reads it.
    get template() {
      const escape = (part) => part.replaceAll("{", "{{").replaceAll("}", "}}");
      if (!span) return escape(text.value);
      const value = text.value;
      return `${escape(value.slice(0, span[0]))}{${value.slice(...span)}}${escape(value.slice(span[1]))}`;
    },
    set template(value) {
      span = null;
      text.value = value;
      readBraces();
      text.value = text.value.replaceAll("{{", "{").replaceAll("}}", "}");
      previous = text.value;
      draw();
    },
  };
}
