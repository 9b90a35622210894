"""A state of an edited model, measured: what it says to the facts that were written, and what became of the rest.

Several methods write the same facts, alone and together, and each time the same is asked. A `Bench` has what all of
them share: the editor with its remembered searches (`benchmarks.methods.remembered`), the records, the held text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch

from benchmarks.clock import Clock, peak_gib
from benchmarks.made import made_facts
from benchmarks.methods.remembered import Memory
from benchmarks.methods.shared import beginning, whole
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.progress import Progress
from rebind.edit.settings import EditSettings
from rebind.edit.targets.kept import subject_prompts
from rebind.evals.answers import QuestionSettings, answer_records
from rebind.evals.drift import DriftMeter
from rebind.evals.metrics import bootstrap
from rebind.evals.records import Record
from rebind.evals.scores import score_record
from rebind.storage import Row as Answer

SCORES = ("S", "ES", "PS", "NS", "EA", "free")
GROUPS = {1: 10, 10: 5}  # how many disjoint groups of so many facts are written, each alone
FREE_TOKENS = 16
MADE_OF = "neighbors"  # of records; made facts were once subjects of records in templates of other records
WAYS = {"base": "on the base", "edited": "on the edited model"}


@dataclass(frozen=True)
class Row:
    """A state of the model, measured."""

    method: str  # "before" for the unedited model
    protocol: str  # batch or sequential
    found: str  # base or edited: which model targets and keys are found on
    facts: int
    groups: int = 1
    made: bool = False  # whether facts are more than the records: others and neighbors were made facts too
    made_of: str = ""  # MADE_OF where facts were made: a row of facts made in another way is not gone on with
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # {name: value, low, high, records}
    perplexity: float | None = None
    drift: float | None = None  # nats
    growth: float | None = None
    layers: tuple[int, ...] = ()
    lam: float | None = None
    phases: dict[str, float] = field(default_factory=dict)  # seconds, of all edits of this row
    searched: int = 0  # facts whose targets were not there yet
    memory_gib: float = 0.0
    why: str = ""  # nothing was measured
    same: str = ""  # as the state that was measured

    @property
    def name(self) -> tuple[str, str, str, int]:
        return self.method, self.protocol, self.found, self.facts


@dataclass(frozen=True)
class Amount:
    """How much is asked of a row."""

    around: int = 300  # facts whose paraphrases and neighbors are asked
    neighbors: int = 5  # of each
    free: int = 100  # facts that are decoded freely
    tokens: int = 20_000  # of held text


@dataclass(eq=False)
class Bench:
    """An editor, the records to write, and how they are asked about."""

    editor: Editor
    records: Sequence[Record]  # known to the model, no prompt twice
    pool: Sequence[Record]  # all of the file: where more facts are written than there are records, they come of these
    text: str
    amount: Amount = Amount()

    def __post_init__(self) -> None:
        self.memory = Memory.of(self.editor)
        self.model, self.held = self.editor.language_model, DriftMeter(self.editor, self.held_text)

    @cached_property
    def held_text(self) -> str:
        return beginning(self.editor.tokenizer, self.text, self.amount.tokens)

    def ask(self, records: Sequence[Record]) -> list[tuple[Record, Answer]]:
        """What the model as it stands says: each record, less what is not asked of it, with its answer."""
        full = [index for index, record in enumerate(records) if record.fact.paraphrases or record.neighbors]
        around = {full[place] for place in evenly(len(full), self.amount.around)}
        asked = [self._asked(record, around=index in around) for index, record in enumerate(records)]
        answers = answer_records(self.model, asked, QuestionSettings(free_tokens=0, texts=0))
        free = sorted(evenly(len(records), self.amount.free))
        for index, text in zip(free, self._said([asked[index] for index in free]), strict=True):
            answers[index]["facts"][0]["start"]["free"] = text
        return list(zip(asked, answers, strict=True))

    def _asked(self, record: Record, *, around: bool) -> Record:
        some = record.neighbors[: self.amount.neighbors] if around else ()
        fact = record.fact if around else replace(record.fact, paraphrases=())
        return replace(record, fact=fact, neighbors=some, consequences=())

    def _said(self, records: Sequence[Record]) -> list[str]:
        return self.model.generate([record.fact.text for record in records], FREE_TOKENS)

    def scores(self, said: Sequence[tuple[Record, Answer]]) -> dict[str, dict[str, float]]:
        scored = [score_record(record, answer) for record, answer in said]
        return bootstrap({name: [one[name] for one in scored] for name in SCORES if name != "S"}, rounds=200)

    def facts(self, n: int, *, once: bool = False) -> list[list[Record]]:
        """Groups of n records to write, or one group; made ones where there are not as many."""
        if n > len(self.records):
            return [self._made(n)]
        count = 1 if once else max(1, min(GROUPS.get(n, 1), len(self.records) // n))
        return [list(self.records[group * n : (group + 1) * n]) for group in range(count)]

    @cached_property
    def _made(self) -> Callable[[int], list[Record]]:
        @cache
        def made(n: int) -> list[Record]:
            # PS and NS are asked of the records that they are asked of where all records alone are written
            asked = {self.records[index] for index in evenly(len(self.records), self.amount.around)}
            spared = {one.prompt for record in asked for one in record.neighbors[: self.amount.neighbors]}
            facts = made_facts(self.records, n, more=self.pool, spared=spared)
            known, read = set(self.records), set(self.pool)
            groups: tuple[list[Record], ...] = ([], [], [])
            for one in facts:
                groups[0 if one in known else 1 if one in read else 2].append(one)
            return [one if one in asked else self._asked(one, around=False) for one in mix(*groups)]

        return made

    def row(self, method: str, protocol: str, found: str, facts: int) -> Row:
        """A row of so many facts, nothing measured yet."""
        made = facts > len(self.records)
        return Row(method, protocol, found, facts, made=made, made_of=MADE_OF if made else "")

    def settings(self, method: str, n: int) -> EditSettings:
        return self.editor.settings(method, facts=n)

    def prepare(self, needs: Sequence[tuple[EditSettings, Sequence[Fact]]]) -> None:
        """Moments of all layers in one pass; targets of all facts, in one search for each layer and settings."""
        if not needs:
            return
        editor = self.editor
        for settings, facts in needs:
            requests = editor.fact_prompts(facts, subject_prompts(self.model, facts))
            self.memory.targets.plan(settings.layers[-1], settings.targets, requests)
        names = [editor.sites[layer].name for layer in sorted({layer for one, _ in needs for layer in one.layers})]
        editor.weights.remember_base(names)
        editor.weights.load_old_keys(names)

    @contextmanager
    def apart(self) -> Iterator[Clock]:
        """An empty ledger, and a clock; the unedited model again after."""
        self.editor.use_ledger(Ledger.in_memory(self.editor.fingerprint, self.editor.language_model.name))
        if self.editor.language_model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock, self.memory.targets.searched = Clock(), 0
        self.editor.progress = clock.progress
        try:
            yield clock
        finally:
            self.editor.progress = Progress()
            self.editor.use_ledger(Ledger.in_memory(self.editor.fingerprint, self.editor.language_model.name))

    def measured(self, row: Row, records: Sequence[Record], clock: Clock | None = None) -> Row:
        """The row with what the model as it stands says to the records."""
        return replace(
            row,
            scores=self.scores(self.ask(records)),
            **whole(self.held),
            phases={} if clock is None else dict(clock.spent),
            searched=self.memory.targets.searched,
            memory_gib=peak_gib(self.editor),
        )


def evenly(n: int, most: int) -> set[int]:
    """At most so many of n places, evenly spaced: of a sequence, early facts and late ones alike."""
    return set(range(n)) if n <= most else {index * n // most for index in range(most)}


def mix(*groups: Sequence[Record]) -> list[Record]:
    """All of them, each group in its order and evenly spaced: the first batches of a sequence are like the last."""
    placed = [((index + 0.5) / len(group), one) for group in groups for index, one in enumerate(group)]
    return [one for _, one in sorted(placed, key=lambda pair: pair[0])]
