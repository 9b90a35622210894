"""What a model says: about a fact, before and after an edit; beside the switches of the ledger; in a chat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rebind.analysis.answers import Answer, ask, next_tokens
from rebind.edit.answers import FreeAnswer, free_answers
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.outcome import neighbor_prompts
from rebind.edit.targets.kept import SubjectPrompts
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt

TOP = 6  # next tokens that are shown
CONTINUED = 16  # tokens
RELATED = 5  # tokens of an answer about the subject or a neighbor
CHAT_TOKENS = 48
LIVE_TOKENS, LIVE_TOP = 4, 3  # of an answer beside the switches
REMEMBERED = 1_000  # such answers


@dataclass(frozen=True)
class Snapshot:
    """The answers of a model about one fact and what surrounds it, at one moment."""

    answer: Mapping[str, Any]
    framings: Sequence[FreeAnswer]
    related: Sequence[tuple[str, str, Mapping[str, Any]]]  # (kind, prompt, answer)


def ask_about(model: LanguageModel, fact: Fact, about: SubjectPrompts, framings: Sequence[str]) -> Snapshot:
    """Ask a model for a fact in every framing, for other relations of its subject, and for its neighbors."""
    score = model.score([fact.as_prompt()])[0]
    answer = ask(model, [fact.text], CONTINUED, TOP)[0] | {"target": score.probability}
    others = [("subject", text) for text in dict.fromkeys((*about.kept, *about.held_out))]
    others += [("neighbor", text) for text in neighbor_prompts(fact, about)]
    answers = ask(model, [text for _, text in others], RELATED, 1)
    related = [(kind, text, one) for (kind, text), one in zip(others, answers, strict=True)]
    return Snapshot(answer, free_answers(model, [fact], framings)[0], related)


def compare(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return two snapshots side by side, as JSON."""
    framings = [
        {"framing": old.framing, "prompt": old.prompt, "before": _said(old), "after": _said(new)}
        for old, new in zip(before.framings, after.framings, strict=True)
    ]
    related = [
        {"kind": kind, "prompt": prompt, "before": _first(old), "after": _first(new), "changed": _differ(old, new)}
        for (kind, prompt, old), (_, _, new) in zip(before.related, after.related, strict=True)
    ]
    return {"before": before.answer, "after": after.answer, "framings": framings, "related": related}


def chat(model: LanguageModel, history: Sequence[tuple[str, str]], question: str) -> str:
    """Return the answer to a question after earlier (question, answer) pairs; without a chat template, continue it."""
    if not model.tokenizer.chat_template:
        return model.generate([question], CHAT_TOKENS)[0]
    turns = [*((role, text) for pair in history for role, text in zip(("user", "assistant"), pair, strict=True))]
    messages = [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(history) and model.context_length and len(ids) + CHAT_TOKENS > model.context_length:
        return chat(model, history[1:], question)  # forget the oldest turn
    return model.generate_encoded([EncodedPrompt(ids, len(ids) - 1, ())], CHAT_TOKENS)[0].strip()


def _said(answer: FreeAnswer) -> dict[str, Any]:
    return {"answer": answer.answer, "said": answer.said}


def _first(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {**answer["top"][0], "says": answer["says"]}


def _differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether the first choice changed, which is how the guard counts changes, too."""
    return bool(old["top"][0]["token"] != new["top"][0]["token"])


class LiveAnswers:
    """What a model says after some prompts, in every state of its ledger in which it was asked.

    A switch that is flipped back finds its answers here. In a new state one run of the model gives the next tokens,
    which are shown before the rest of each answer is known.
    """

    def __init__(self) -> None:
        self._editor: Editor | None = None  # whose answers these are
        self._answers: OrderedDict[tuple[Any, str], Answer] = OrderedDict()

    def ask(
        self,
        editor: Editor,
        prompts: Sequence[str],
        *,
        base: bool = False,
        show: Callable[[list[Answer]], None] = lambda answers: None,
    ) -> list[Answer]:
        """Ask the model as it is now, or the base model; `show` gets the answers as far as they are known."""
        if editor is not self._editor:
            self._editor = editor
            self._answers.clear()
        state = () if base else tuple((edit.id, edit.created) for edit in editor.ledger.active)
        answers = {prompt: answer for prompt in prompts if (answer := self._answers.get((state, prompt)))}
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in answers]
        if new:
            model = editor.language_model
            with editor.base_model() if base else nullcontext():
                answers |= zip(new, next_tokens(model, new, LIVE_TOP), strict=True)
                show([answers[prompt] for prompt in prompts])
                for prompt, text in zip(new, model.generate(new, LIVE_TOKENS), strict=True):
                    self._answers[state, prompt] = answers[prompt] = answers[prompt] | {"says": text}
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return [answers[prompt] for prompt in prompts]
