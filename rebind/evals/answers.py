"""The answers of a model to a record: everything it says about it, as one row that can be stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


def answer_records(
    model: LanguageModel, records: Sequence[Record], settings: QuestionSettings, *, seed: int = 0
) -> list[Row]:
    """Ask the model every question of every record, and return one row per record."""
    questions = [_questions(record) for record in records]
    prompts: list[Prompt] = []
    _replace_prompts(questions, prompts.append)
    scores = iter(model.score(prompts))
    rows: list[Row] = _replace_prompts(questions, lambda _: _score_json(next(scores)))
    if settings.free_tokens:
        _add_free_answers(model, records, rows, settings.free_tokens)
    if settings.texts:
        beginnings = [record.text_prompts[: settings.texts] for record in records]
        starts = [start for some in beginnings for start in some]
        texts = iter(model.generate(starts, settings.text_tokens, top_k=settings.top_k, seed=seed))
        for row, some in zip(rows, beginnings, strict=True):
            row["texts"] = [start + next(texts) for start in some]
    return rows


def rows_by_fact(row: Row) -> list[Row]:
    """Return the answers to each fact of a record: the first fact's are in the row itself, others under `also`."""
    return [row, *row.get("also", ())]


def all_prompts(record: Record) -> list[Prompt]:
    """Return every prompt of a record, all of which must fit into the model's context."""
    prompts = [Prompt(text) for text in record.text_prompts]
    _replace_prompts(_questions(record), prompts.append)
    return prompts


def _questions(record: Record) -> Row:
    """Return the row of a record with prompts in place of their scores."""

    def ask(text: str, targets: Sequence[str | None]) -> Row:
        return {name: Prompt(text, target) for name, target in zip(("new", "true"), targets, strict=False) if target}

    first, *also = [
        {"prompt": ask(fact.text, targets), "paraphrases": [ask(text, targets) for text in fact.paraphrases]}
        for fact in record.facts
        for targets in [(fact.target, fact.old)]
    ]
    row = {
        **first,
        "neighbors": [ask(one.prompt, (record.fact.target, one.answer)) for one in record.neighbors],
        "consequences": [[Prompt(one.prompt, answer) for answer in one.answers] for one in record.consequences],
    }
    return row | ({"also": also} if also else {})


def _replace_prompts(value: Any, function: Callable[[Prompt], Any]) -> Any:
    """Return nested dicts and lists with the function applied to every prompt in them, in order."""
    if isinstance(value, Prompt):
        return function(value)
    if isinstance(value, dict):
        return {key: _replace_prompts(part, function) for key, part in value.items()}
    return [_replace_prompts(part, function) for part in value]


def _score_json(score: FactScore) -> Row:
    nll = score.nll if math.isfinite(score.nll) else WORST_NLL
    return {"nll": round(nll, 6), "tokens": score.tokens, "right": score.right_tokens, "first": score.first_token}


def _add_free_answers(model: LanguageModel, records: Sequence[Record], rows: Sequence[Row], tokens: int) -> None:
    prompts: list[str] = []
    for record in records:
        prompts += [text for fact in record.facts for text in (fact.text, *fact.paraphrases)]
        prompts += [question.prompt for question in record.consequences]
    texts = iter(model.generate(prompts, tokens))
    for record, row in zip(records, rows, strict=True):
        for fact, part in zip(record.facts, rows_by_fact(row), strict=True):
            part["free"] = {"prompt": next(texts), "paraphrases": [next(texts) for _ in fact.paraphrases]}
        row["free"]["consequences"] = [next(texts) for _ in record.consequences]
