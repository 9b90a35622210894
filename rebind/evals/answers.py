"""The answers of a model to a record: everything it says about it, as one row that can be stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.evals.records import Record
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.models.scoring import FactScore
from rebind.storage import Row

WORST_NLL = 1e4  # stored where a broken model returns NaN


@dataclass(frozen=True)
class QuestionSettings:
    """How much is asked about each record."""

    free_tokens: int = 16  # greedy tokens after the prompt, the paraphrases and the consequences; 0: none
    texts: int = 1  # longer texts per record, for fluency and consistency; 0: none
    text_tokens: int = 100
    top_k: int = 5  # longer texts are sampled from this many best tokens, as in ROME

    def __post_init__(self) -> None:
        for name, least in (("free_tokens", 0), ("texts", 0), ("text_tokens", 1), ("top_k", 1)):
            if getattr(self, name) < least:
                raise InputError(
                    f"{name} is {getattr(self, name)}", expected=f"{least} or more", code="setting_too_small"
                )


def answer_records(
    model: LanguageModel, records: Sequence[Record], settings: QuestionSettings, *, seed: int = 0
) -> list[Row]:
    """Ask the model every question of every record, and return one row per record."""
    scores = iter(model.score([prompt for record in records for prompt in _scored_prompts(record)]))
    rows = [_row(record, scores) for record in records]
    if settings.free_tokens:
        prompts = [prompt for record in records for prompt in _free_prompts(record)]
        texts = iter(model.generate(prompts, settings.free_tokens))
        for record, row in zip(records, rows, strict=True):
            for fact, part in zip(record.facts, rows_by_fact(row), strict=True):
                part["free"] = {"prompt": next(texts), "paraphrases": [next(texts) for _ in fact.paraphrases]}
            row["free"]["consequences"] = [next(texts) for _ in record.consequences]
    if settings.texts:
        beginnings = [record.text_prompts[: settings.texts] for record in records]
        prompts = [prompt for some in beginnings for prompt in some]
        texts = iter(model.generate(prompts, settings.text_tokens, top_k=settings.top_k, seed=seed))
        for row, some in zip(rows, beginnings, strict=True):
            row["texts"] = [prompt + next(texts) for prompt in some]
    return rows


def rows_by_fact(row: Row) -> list[Row]:
    """Return the answers to each fact of a record: the first fact's are in the row itself, others under `also`."""
    return [row, *row.get("also", ())]


def all_prompts(record: Record) -> list[Prompt]:
    """Return every prompt of a record, all of which must fit into the model's context."""
    return [*_scored_prompts(record), *(Prompt(prompt) for prompt in record.text_prompts)]


def _free_prompts(record: Record) -> Iterator[str]:
    for fact in record.facts:
        yield from (fact.text, *fact.paraphrases)
    yield from (question.prompt for question in record.consequences)


def _targets(fact: Fact) -> tuple[str, ...]:
    """Return the new target, and the true one if it is known."""
    return (fact.target,) if fact.old is None else (fact.target, fact.old)


def _scored_prompts(record: Record) -> Iterator[Prompt]:
    """Yield prompts with targets, in the order in which `_row` reads their scores."""
    for fact in record.facts:
        for text in (fact.text, *fact.paraphrases):
            yield from (Prompt(text, target) for target in _targets(fact))
    for question in record.neighbors:
        yield from (Prompt(question.prompt, target) for target in (record.fact.target, *question.answers[:1]))
    for question in record.consequences:
        yield from (Prompt(question.prompt, answer) for answer in question.answers)


def _row(record: Record, scores: Iterator[FactScore]) -> Row:
    def read(names: Sequence[str]) -> Row:
        return {name: _score_json(next(scores)) for name in names}

    def read_fact(fact: Fact) -> Row:
        targets = ("new", "true")[: len(_targets(fact))]
        return {"prompt": read(targets), "paraphrases": [read(targets) for _ in fact.paraphrases]}

    first, *also = [read_fact(fact) for fact in record.facts]
    row = {
        **first,
        "neighbors": [read(("new", "true")[: 1 + bool(question.answers)]) for question in record.neighbors],
        "consequences": [[_score_json(next(scores)) for _ in question.answers] for question in record.consequences],
    }
    return row | ({"also": also} if also else {})


def _score_json(score: FactScore) -> Row:
    nll = score.nll if math.isfinite(score.nll) else WORST_NLL
    return {
        "nll": round(nll, 6),
        "tokens": score.tokens,
        "right": score.right_tokens,
        "first": score.first_token,
    }
