"""Evaluation records: facts to write, and the questions about them. `reading` reads them from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from rebind.edit.facts.fact import Fact
from rebind.models.prompts import require_text

MAX_RIVALS = 3


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that should follow it, in one or several wordings.

    Answers are stripped like the targets of facts, so that they can be compared. The prompt stays as it is.
    """

    prompt: str
    answer: str | None  # None: only a change of the answer can be measured
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_text("a question's prompt", self.prompt)
        for answer in (*self.answers[:1], *self.aliases):
            require_text(f"the answer to {self.prompt!r}", answer)
        if self.answer is not None:
            object.__setattr__(self, "answer", self.answer.strip())
        object.__setattr__(self, "aliases", tuple(alias.strip() for alias in self.aliases))

    @property
    def answers(self) -> tuple[str, ...]:
        return () if self.answer is None else (self.answer, *self.aliases)

    def to_json(self) -> dict[str, Any]:
        # The answer is written even if it is None: without it, reading would use the old target of the fact.
        fields = {"prompt": self.prompt, "answer": self.answer}
        return fields | ({"aliases": list(self.aliases)} if self.aliases else {})


@dataclass(frozen=True)
class Record:
    """A fact with its new target and its true one (`fact.target`, `fact.old`), and the questions about it.

    If a record has several facts, each is asked by its own prompt and paraphrases; neighbors belong to the first.
    """

    fact: Fact
    id: str
    also: tuple[Fact, ...] = ()  # facts written together with it: a MQuAKE case may change several
    neighbors: tuple[Question, ...] = ()  # questions about other subjects whose answers should stay
    consequences: tuple[Question, ...] = ()  # questions whose answers follow from the new fact
    reversed: tuple[Question, ...] = ()  # questions from the new target back to the subject
    generation_prompts: tuple[str, ...] = ()  # beginnings of texts about the subject
    references: tuple[str, ...] = ()  # texts about things for which the new target is true
    rivals: tuple[str, ...] = ()  # answers of other records of the same relation, for the forced choice

    @property
    def facts(self) -> tuple[Fact, ...]:
        return (self.fact, *self.also)

    @property
    def written_facts(self) -> tuple[Fact, ...]:
        """The facts as they are written: without the questions about them, which target search would train on."""
        return tuple(replace(fact, paraphrases=(), neighbors=(), questions=(), keep=()) for fact in self.facts)

    @property
    def text_prompts(self) -> tuple[str, ...]:
        """Prompts for longer texts: the generation prompts, or else the paraphrases, or else the prompt."""
        return self.generation_prompts or self.fact.paraphrases or (self.fact.text,)

    def to_json(self) -> dict[str, Any]:
        """Return the record in rebind's JSONL format."""
        optional = {
            "also": [fact.to_json() for fact in self.also],
            "neighbors": [question.to_json() for question in self.neighbors],
            "consequences": [question.to_json() for question in self.consequences],
            "reversed": [question.to_json() for question in self.reversed],
            "generation_prompts": list(self.generation_prompts),
            "references": list(self.references),
        }
        present = {name: value for name, value in optional.items() if value}
        return {"id": self.id, **replace(self.fact, neighbors=()).to_json(), **present}


def with_rivals(records: Sequence[Record]) -> list[Record]:
    """Add to each record the answers of up to three others of the same relation: the same template, or the same tag.

    The tag of a relation has no slash, such as P36 in CounterFact; other tags name datasets and cases.
    """
    answers: dict[str, dict[str, None]] = {}

    def relations(record: Record) -> list[str]:
        return [record.fact.prompt, *(tag for tag in record.fact.tags if "/" not in tag)]

    for record in records:
        for relation in relations(record):
            answers.setdefault(relation, {}).setdefault(record.fact.old or record.fact.target)
    extended = []
    for record in records:
        excluded = {record.fact.target, record.fact.old}
        rivals = dict.fromkeys(
            answer for name in relations(record) for answer in answers[name] if answer not in excluded
        )
        extended.append(replace(record, rivals=tuple(rivals)[:MAX_RIVALS]))
    return extended


@dataclass(frozen=True)
class Records(Sequence[Record]):
    """The records of a source, and the reason for each record that was skipped."""

    records: tuple[Record, ...]
    name: str = "records"
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...
    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        return self.records[index]

    @property
    def digest(self) -> str:
        """A sha256 (hex) of all facts and questions."""
        lines = [json.dumps(record.to_json(), sort_keys=True) + "\n" for record in self.records]
        return hashlib.sha256("".join(lines).encode()).hexdigest()
