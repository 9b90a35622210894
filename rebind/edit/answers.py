"""What a model says freely about facts, in every framing, and whether that is the target.

The guard asks whether every token of the target is the first choice after a prompt that leads up to it. Here the model
speaks for itself: it continues the prompt, or answers the question in a chat, and the text is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact
from rebind.edit.outcome import TEXT
from rebind.edit.targets.framings import framed_prompts
from rebind.models.generation import continue_prompts
from rebind.models.judging import says, says_of_subject, sentences
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt, decode_continuation

CONTINUED, IN_CHAT = 12, 40  # tokens


@dataclass(frozen=True)
class FreeAnswer:
    """What a model says in a framing, and whether it says the target of the subject."""

    framing: str
    prompt: str  # the text before the answer, or the question
    answer: str
    said: bool


def free_answers(model: LanguageModel, facts: Sequence[Fact], framings: Sequence[str]) -> list[list[FreeAnswer]]:
    """Let a model answer each fact freely, once for every prompt of every framing."""
    asked: list[tuple[int, str, str, EncodedPrompt]] = []
    for index, fact in enumerate(facts):
        for framing in framings:
            prompts = _free_prompts(fact, framing)
            context = TEXT if framing == "text" else ""
            encoded = model.encode(prompts, context=context, start=framing != "plain")
            asked += [
                (index, framing, context + (prompt.question or prompt.text), one)
                for prompt, one in zip(prompts, encoded, strict=True)
            ]
    texts: dict[EncodedPrompt, str] = {}
    for tokens, is_chat in ((CONTINUED, False), (IN_CHAT, True)):
        rows = [one for _, framing, _, one in asked if (framing == "chat") is is_chat]
        new = continue_prompts(model.trunk, rows, tokens, end_tokens=model.end_tokens)
        texts |= {one: decode_continuation(model.tokenizer, one.ids, ids) for one, ids in zip(rows, new, strict=True)}
    answers: list[list[FreeAnswer]] = [[] for _ in facts]
    for index, framing, prompt, one in asked:
        said = _is_said(facts[index], framing, prompt, texts[one])
        answers[index].append(FreeAnswer(framing, prompt, texts[one], said))
    return answers


def _free_prompts(fact: Fact, framing: str) -> list[Prompt]:
    """Return the prompts of a framing without a target; in a chat, without words put into the assistant's mouth."""
    prompts = framed_prompts(fact, framing)
    return [Prompt("" if prompt.question else prompt.text, question=prompt.question) for prompt in prompts]


def _is_said(fact: Fact, framing: str, prompt: str, answer: str) -> bool:
    """Judge an answer: the target, in words of their own, in a sentence about the subject, before the old target."""
    instead = [fact.old] if fact.old else []
    beginning = "" if framing == "chat" else sentences(prompt)[-1].strip()  # of the sentence that the model finishes
    if fact.subject in beginning:
        return says(answer, fact.target, instead=instead)
    beginning = "" if beginning.endswith(":") else beginning
    return says_of_subject(beginning + answer, fact.target, fact.subject, instead=instead)
