"""The answers of a model to a record: everything it says about it, as one row that can be stored.

Facts, paraphrases and neighbors are asked in every framing that applies to the model: behind the start tokens, without
them, behind a sentence of text, and in the chat template. None of these questions is one that target search trains on:
the sentence is not one of its contexts, and a question that is made from the prompt gets other words in front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.questions import question_from_grammar
from rebind.edit.outcome import TEXT
from rebind.edit.targets.framings import applicable_framings
from rebind.evals.records import Record
from rebind.memory.checks import require_number
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt
from rebind.models.scoring import FactScore
from rebind.storage import Row

FRAMINGS = ("start", "plain", "text", "chat")
WORST_NLL = 1e4  # stored where a broken model returns NaN
AT_ONCE = 64  # prompts whose next tokens are compared together

BaseModel = Callable[[], AbstractContextManager[None]]  # inside, the model is the unedited one


@dataclass(frozen=True)
class QuestionSettings:
    """How much is asked about each record."""

    free_tokens: int = 24  # greedy tokens after the prompt, the paraphrases and the consequences; 0: none
    texts: int = 1  # longer texts per record, for fluency and consistency; 0: none
    text_tokens: int = 100
    top_k: int = 5  # longer texts are sampled from this many best tokens, as in ROME

    def __post_init__(self) -> None:
        for name in ("free_tokens", "texts"):
            require_number(name, getattr(self, name), whole=True)
        for name in ("text_tokens", "top_k"):
            require_number(name, getattr(self, name), least=1, whole=True)


@dataclass(frozen=True)
class _Ask:
    """A prompt in a framing: its target is scored or, if it has none, it is continued."""

    prompt: Prompt
    framing: str = "start"


def answer_records(
    model: LanguageModel,
    records: Sequence[Record],
    settings: QuestionSettings,
    *,
    base: BaseModel | None = None,
    probes: Sequence[Sequence[str]] = (),
    in_prompt: bool = False,
    seed: int = 0,
) -> list[Row]:
    """Ask the model every question of every record, and return one row per record.

    Args:
        model: the model as it stands.
        records: what to ask.
        settings: how much to ask.
        base: gives access to the unedited model, with which answers about neighbors are compared; None: they are not.
        probes: prompts about other relations of each record's subject, compared in the same way.
        in_prompt: puts the facts of a record before everything that is asked about it.
        seed: of longer texts.
    """
    framings = asked_framings(model)
    questions = [_questions(record, framings, free=settings.free_tokens > 0) for record in records]
    fronts = [_sentence(record) if in_prompt else "" for record in records]
    if in_prompt:
        questions = [
            _replace_asks(row, partial(_put_before, front)) for row, front in zip(questions, fronts, strict=True)
        ]
    asks: list[_Ask] = []
    _replace_asks(questions, asks.append)
    answers = iter(_answer(model, asks, settings.free_tokens))
    rows: list[Row] = _replace_asks(questions, lambda _: next(answers))
    if base is not None:
        for name, prompts in (
            ("neighbors", [[one.prompt for one in record.neighbors] for record in records]),
            ("same_subject", probes or [()] * len(records)),
        ):
            pairs = [(front + text, text) for front, some in zip(fronts, prompts, strict=True) for text in some]
            changes = iter(_compare(model, base, pairs))
            for row, some in zip(rows, prompts, strict=True):
                row.setdefault("kept", {})[name] = [next(changes) for _ in some]
    if settings.texts:
        beginnings = [record.text_prompts[: settings.texts] for record in records]
        starts = [start for some in beginnings for start in some]
        texts = iter(model.generate(starts, settings.text_tokens, top_k=settings.top_k, seed=seed))
        for row, some in zip(rows, beginnings, strict=True):
            row["texts"] = [start + next(texts) for start in some]
    return rows


def asked_framings(model: LanguageModel) -> tuple[str, ...]:
    """Return the framings that a model is asked in."""
    applicable = applicable_framings(model)
    return tuple(name for name in FRAMINGS if name in applicable)


def encode_all(model: LanguageModel, record: Record) -> None:
    """Raise unless every prompt of a record fits into the model's context, also behind its facts."""
    asks = [_Ask(Prompt(text)) for text in record.text_prompts]
    _replace_asks(_questions(record, asked_framings(model), free=True), asks.append)
    _encode(model, [_put_before(_sentence(record), ask) for ask in asks])


def chat_question(fact: Fact) -> str:
    """Return the question that a fact is asked by in a chat: the record's, or one that is made from the prompt."""
    if fact.questions:
        return fact.questions[0]
    question = question_from_grammar(fact)
    return f"Quick question: {question[0].lower()}{question[1:]}" if question else f"Complete the sentence: {fact.text}"


def _questions(record: Record, framings: Sequence[str], *, free: bool) -> Row:
    """Return the row of a record with asks in place of their answers."""
    new, old = record.fact.target, record.fact.old

    def pair(prompt: Prompt, framing: str, targets: tuple[str, str | None]) -> Row:
        named = zip(("new", "true"), targets, strict=True)
        return {name: _Ask(replace(prompt, target=target), framing) for name, target in named if target}

    def ask_fact(fact: Fact, framing: str) -> Row:
        targets = fact.target, fact.old
        question = chat_question(fact)
        bare = Prompt(fact.text, question=question) if framing == "chat" else Prompt(fact.text)
        if framing == "chat" and fact.text.rstrip().endswith("?"):
            bare = Prompt("", question=question)
        row: Row = {
            "prompt": pair(bare, framing, targets),
            "paraphrases": [pair(_framed(text, framing), framing, targets) for text in fact.paraphrases],
        }
        if free:
            row["free"] = _Ask(Prompt("", question=question) if framing == "chat" else bare, framing)
            if framing == "start":
                row["free_paraphrases"] = [_Ask(Prompt(text)) for text in fact.paraphrases]
        return row

    choice = Prompt("", question=chat_question(record.fact)) if "chat" in framings else Prompt(record.fact.text)
    row: Row = {
        "facts": [{framing: ask_fact(fact, framing) for framing in framings} for fact in record.facts],
        "neighbors": {
            framing: [pair(_framed(one.prompt, framing), framing, (new, one.answer)) for one in record.neighbors]
            for framing in framings
        },
        "choice": [_Ask(replace(choice, target=target)) for target in (new, old, *record.rivals) if target],
        "consequences": [[_Ask(Prompt(one.prompt, answer)) for answer in one.answers] for one in record.consequences],
    }
    if free:
        row["free_consequences"] = [_Ask(Prompt(one.prompt)) for one in record.consequences]
        row["free_reversed"] = [_Ask(Prompt(one.prompt)) for one in record.reversed]
    return row


def _framed(text: str, framing: str) -> Prompt:
    if framing != "chat":
        return Prompt(text)
    chat = Prompt(text).in_chat()
    return Prompt(chat.text, question=chat.question)


def _sentence(record: Record) -> str:
    """Return the facts of a record as text."""
    return "".join(f"{fact.text} {fact.target}. " for fact in record.facts)


def _put_before(front: str, ask: _Ask) -> _Ask:
    prompt = ask.prompt
    if prompt.question:
        return replace(ask, prompt=replace(prompt, question=front + prompt.question))
    return replace(ask, prompt=replace(prompt, text=front + prompt.text))


def _replace_asks(value: Any, function: Callable[[_Ask], Any]) -> Any:
    """Return nested dicts and lists with the function applied to every ask in them, in order."""
    if isinstance(value, _Ask):
        return function(value)
    if isinstance(value, dict):
        return {key: _replace_asks(part, function) for key, part in value.items()}
    return [_replace_asks(part, function) for part in value]


def _encode(model: LanguageModel, asks: Sequence[_Ask]) -> list[EncodedPrompt]:
    encoded: dict[int, EncodedPrompt] = {}
    for framing in FRAMINGS:
        places = [place for place, ask in enumerate(asks) if ask.framing == framing]
        context = TEXT if framing == "text" else ""
        prompts = model.encode([asks[place].prompt for place in places], context=context, start=framing != "plain")
        encoded |= dict(zip(places, prompts, strict=True))
    return [encoded[place] for place in range(len(asks))]


def _answer(model: LanguageModel, asks: Sequence[_Ask], free_tokens: int) -> list[Row | str]:
    """Return the score of every target, and the continuation of every prompt without one."""
    encoded = _encode(model, asks)
    scores = iter(model.score_encoded([prompt for prompt in encoded if prompt.target]))
    texts = iter(model.generate_encoded([prompt for prompt in encoded if not prompt.target], free_tokens))
    return [_score_json(next(scores)) if prompt.target else next(texts) for prompt in encoded]


def _score_json(score: FactScore) -> Row:
    nll = score.nll if math.isfinite(score.nll) else WORST_NLL
    return {"nll": round(nll, 6), "tokens": score.tokens, "right": score.right_tokens}


def _compare(model: LanguageModel, base: BaseModel, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Compare the next token after the first prompt of each pair with that of the unedited model after the second."""
    rows: list[Row] = []
    for begin in range(0, len(pairs), AT_ONCE):
        prompts, base_prompts = zip(*pairs[begin : begin + AT_ONCE], strict=True)
        after = model.next_token_log_probs(prompts, truncate=True)
        with base():
            before = model.next_token_log_probs(base_prompts, truncate=True)
        kl = (before.exp() * (before - after)).sum(-1).nan_to_num(WORST_NLL, WORST_NLL)
        same = before.argmax(-1) == after.argmax(-1)
        for unchanged, divergence in zip(same.tolist(), kl.clamp(0, WORST_NLL).tolist(), strict=True):
            rows.append({"same": unchanged, "kl": round(divergence, 6)})
    return rows
