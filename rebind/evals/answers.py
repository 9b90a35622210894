"""A record's answers: everything a model says about it, as one row that can be stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.evals.asking import Model, Told, ask, generate
from rebind.evals.records import Record

Row = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Asking:
    """How much is asked of each record."""

    free_tokens: int = 16  # of free decoding, after the prompt, the paraphrases and the consequences; 0: none
    texts: int = 1  # longer texts a record, for fluency and consistency; 0: none
    text_tokens: int = 100
    top_k: int = 5  # of which their tokens are drawn, as in ROME

    def __post_init__(self) -> None:
        for name in ("free_tokens", "texts"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, expected 0 or more: 0 leaves it out")
        for name in ("text_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected 1 or more: give a larger number")


def answer_all(model: Model, records: Sequence[Record], asking: Asking, *, seed: int = 0) -> list[Row]:
    """What the model as it stands says to every question of every record."""
    told = iter(ask(model, [pair for record in records for pair in _pairs(record)]))
    rows = [_taken(record, told) for record in records]
    if asking.free_tokens:
        prompts = [prompt for record in records for prompt in _free(record)]
        said = iter(generate(model, prompts, asking.free_tokens))
        for record, row in zip(records, rows, strict=True):
            for fact, part in zip(record.facts, by_fact(row), strict=True):
                part["free"] = {"prompt": next(said), "paraphrases": [next(said) for _ in fact.paraphrases]}
            row["free"]["consequences"] = [next(said) for _ in record.consequences]
    if asking.texts:
        begun = [record.beginnings[: asking.texts] for record in records]
        prompts = [prompt for some in begun for prompt in some]
        written = iter(generate(model, prompts, asking.text_tokens, top_k=asking.top_k, seed=seed))
        for row, some in zip(rows, begun, strict=True):
            row["texts"] = [prompt + next(written) for prompt in some]
    return rows


def by_fact(row: Row) -> list[Row]:
    """What was said to each fact of a record: the first fact's in the row itself, the others' under `also`."""
    return [row, *row.get("also", ())]


def questions(record: Record) -> list[tuple[str, str]]:
    """Every prompt of a record with a target: what must fit into the model's context."""
    return [*_pairs(record), *((prompt, ".") for prompt in record.beginnings)]


def _free(record: Record) -> Iterator[str]:
    for fact in record.facts:
        yield from (fact.text, *fact.paraphrases)
    yield from (question.prompt for question in record.consequences)


def _targets(fact: Fact) -> tuple[str, ...]:
    """The new target, and the true one where it is known."""
    return (fact.target,) if fact.old is None else (fact.target, fact.old)


def _pairs(record: Record) -> Iterator[tuple[str, str]]:
    """What is asked, in the order `_taken` takes it."""
    for fact in record.facts:
        for prompt in (fact.text, *fact.paraphrases):
            yield from ((prompt, target) for target in _targets(fact))
    for question in record.neighbours:
        yield from ((question.prompt, target) for target in (record.fact.target, *question.answers[:1]))
    for question in record.consequences:
        yield from ((question.prompt, answer) for answer in question.answers)


def _taken(record: Record, told: Iterator[Told]) -> Row:
    def take(names: Sequence[str]) -> Row:
        return {name: _rounded(next(told)) for name in names}

    def of_fact(fact: Fact) -> Row:
        targets = ("new", "true")[: len(_targets(fact))]
        return {"prompt": take(targets), "paraphrases": [take(targets) for _ in fact.paraphrases]}

    first, *also = [of_fact(fact) for fact in record.facts]
    row = {
        **first,
        "neighbours": [take(("new", "true")[: 1 + bool(one.answers)]) for one in record.neighbours],
        "consequences": [[_rounded(next(told)) for _ in one.answers] for one in record.consequences],
    }
    return row | ({"also": also} if also else {})


def _rounded(told: Told) -> Row:
    return asdict(told) | {"nll": round(told.nll, 6)}
