"""The three ways in which papers put a method to the test.

- *single*: each record alone; the model is put back, byte for byte, before the next.
- *batch*: all records in one edit.
- *sequential*: batch after batch into the same model, nothing taken back; everything written so far is asked again
  at checkpoints (after 1, 2, 4, 8, … batches and at the end, or every so many).

A protocol is a list of stages: which batches are in the model, and which records are asked then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rebind.errors import InputError
from rebind.memory.checks import unknown_name


@dataclass(frozen=True)
class Stage:
    """A state of the model in which questions are asked."""

    edits: int  # records written; 0 is the base model
    batches: tuple[range, ...]  # of records, each written as one edit, in order
    asked: range  # records
    alone: bool = False  # whether the model holds nothing but these batches


@dataclass(frozen=True)
class Unit:
    """What is asked and stored at once: a run that was killed goes on with the first unit that is not on disk."""

    stage: Stage
    asked: range
    drift: bool  # whether to look at the model as a whole too


@dataclass(frozen=True)
class Protocol:
    """How records are written. `stages(n)` begins with the base model."""

    name: str
    batch: int | None = None  # records an edit; None: all of them
    alone: bool = False
    every: int | None = None  # batches from one checkpoint to the next; None: they double

    def stages(self, n: int) -> Iterator[Stage]:
        yield Stage(0, (), range(n), self.alone)
        size = self.batch or n
        batches = [range(begin, min(begin + size, n)) for begin in range(0, n, size)]
        if self.alone:
            yield from (Stage(len(batch), (batch,), batch, alone=True) for batch in batches)
            return
        for count in self._checkpoints(len(batches)):
            written = batches[count - 1].stop
            yield Stage(written, tuple(batches[:count]), range(written))

    def units(self, n: int, at_once: int, drifts: int) -> list[Unit]:
        """The stages cut into portions of records; of single edits only the first `drifts` are looked at as a whole."""
        units = []
        for number, stage in enumerate(self.stages(n)):
            for begin in range(stage.asked.start, stage.asked.stop, at_once):
                part = range(begin, min(begin + at_once, stage.asked.stop))
                first = begin == stage.asked.start
                units.append(Unit(stage, part, first and (not self.alone or number <= drifts)))
        return units

    def _checkpoints(self, batches: int) -> list[int]:
        if self.every is None:
            doubling = [2**power for power in range(batches.bit_length())]
            return sorted({count for count in doubling if count <= batches} | {batches})
        return sorted({*range(self.every, batches + 1, self.every), batches})


PROTOCOLS = ("single", "batch", "sequential")


def get_protocol(name: str, *, batch: int = 100, every: int | None = None) -> Protocol:
    """A protocol by its name; `batch` and `every` are for the sequential one."""
    if batch < 1 or (every is not None and every < 1):
        raise InputError(f"batch is {batch} and every is {every}, expected 1 or more: give larger numbers")
    if name == "single":
        return Protocol(name, batch=1, alone=True)
    if name == "batch":
        return Protocol(name)
    if name == "sequential":
        return Protocol(name, batch, every=every)
    raise unknown_name("protocol", name, PROTOCOLS)
