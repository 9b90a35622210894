"""Generate free answers to facts in every framing, and judge whether they say the target.

The guard checks whether every token of the target is the first choice after a prompt that leads up to it. Here the
model generates freely: it continues the prompt, or answers the question in a chat, and the text is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact
from rebind.edit.outcome import TEXT
from rebind.edit.targets.framings import framed_prompts
from rebind.models.judging import says, says_of_subject, sentences
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt

CONTINUATION_TOKENS, CHAT_TOKENS = 12, 40


@dataclass(frozen=True)
class FreeAnswer:
    """The text that a model generates in a framing, and whether it says the target about the subject."""

    framing: str
    prompt: str  # the text before the answer, or the question
    answer: str
    said: bool


@dataclass(frozen=True)
class _Question:
    """A prompt of a fact in a framing."""

    fact: int  # its index
    framing: str
    text: str
    prompt: EncodedPrompt


def free_answers(model: LanguageModel, facts: Sequence[Fact], framings: Sequence[str]) -> list[list[FreeAnswer]]:
    """Let a model answer each fact freely, once for every prompt of every framing."""
    questions = [
        question
        for index, fact in enumerate(facts)
        for framing in framings
        for question in _questions(model, index, fact, framing)
    ]
    texts: dict[EncodedPrompt, str] = {}
    for tokens, is_chat in ((CONTINUATION_TOKENS, False), (CHAT_TOKENS, True)):
        prompts = [question.prompt for question in questions if (question.framing == "chat") is is_chat]
        texts |= dict(zip(prompts, model.generate_encoded(prompts, tokens), strict=True))
    answers: list[list[FreeAnswer]] = [[] for _ in facts]
    for question in questions:
        answer = texts[question.prompt]
        said = _is_said(facts[question.fact], question.framing, question.text, answer)
        answers[question.fact].append(FreeAnswer(question.framing, question.text, answer, said))
    return answers


def _questions(model: LanguageModel, index: int, fact: Fact, framing: str) -> list[_Question]:
    prompts = _free_prompts(fact, framing)
    context = TEXT if framing == "text" else ""
    encoded = model.encode(prompts, context=context, start=framing != "plain")
    texts = [context + (prompt.question or prompt.text) for prompt in prompts]
    return [_Question(index, framing, text, prompt) for text, prompt in zip(texts, encoded, strict=True)]


def _free_prompts(fact: Fact, framing: str) -> list[Prompt]:
    """Return the prompts of a framing without a target; in a chat, without the beginning of an answer."""
    prompts = framed_prompts(fact, framing)
    return [Prompt("" if prompt.question else prompt.text, question=prompt.question) for prompt in prompts]


def _is_said(fact: Fact, framing: str, prompt: str, answer: str) -> bool:
    """Return whether an answer says the target, as separate words, about the subject, and before the old target."""
    instead = [fact.old] if fact.old else []
    beginning = "" if framing == "chat" else sentences(prompt)[-1].strip()  # of the sentence that the model finishes
    if fact.subject in beginning:
        return says(answer, fact.target, instead=instead)
    beginning = "" if beginning.endswith(":") else beginning
    return says_of_subject(beginning + answer, fact.target, fact.subject, instead=instead)
