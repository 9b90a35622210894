"""The three evaluation protocols of the papers.

- *single*: each record alone; the model is restored, byte for byte, before the next record.
- *batch*: all records in one edit.
- *sequential*: batch after batch into the same model; everything written so far is evaluated at checkpoints (after
  1, 2, 4, 8, … batches and at the end, or after every `every` batches).

A protocol is a list of stages: the batches that are written into the model, and the records to ask about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rebind.memory.checks import require_number, unknown_name


@dataclass(frozen=True)
class Stage:
    """A state of the model that is evaluated."""

    edits: int  # number of records written; 0 is the base model
    batches: tuple[range, ...]  # ranges of records, each written as one edit, in order
    records: range  # the records to ask about
    alone: bool = False  # whether only these batches are in the model
    drift: bool = True  # whether to measure drift as well


@dataclass(frozen=True)
class Protocol:
    """How records are written and when they are evaluated."""

    name: str
    batch: int | None = None  # records per edit; None: all of them
    alone: bool = False
    every: int | None = None  # batches between checkpoints; None: after 1, 2, 4, 8, …

    def __post_init__(self) -> None:
        for name in ("batch", "every"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), least=1, whole=True, code="setting_too_small")

    def stages(self, n: int) -> Iterator[Stage]:
        """Yield the stages of an evaluation of `n` records, the base model first."""
        yield Stage(0, (), range(n), self.alone)
        size = self.batch or n
        batches = [range(begin, min(begin + size, n)) for begin in range(0, n, size)]
        if self.alone:
            yield from (Stage(len(batch), (batch,), batch, alone=True) for batch in batches)
            return
        doubling = [2**power for power in range(len(batches).bit_length())]
        checkpoints = range(self.every, len(batches), self.every) if self.every else doubling
        for count in sorted({*checkpoints, len(batches)}):
            edits = batches[count - 1].stop
            yield Stage(edits, tuple(batches[:count]), range(edits))

    def units(self, n: int, unit_size: int, drift_edits: int) -> list[Stage]:
        """Split the stages into units of `unit_size` records, which are evaluated and stored together.

        An interrupted run resumes at the first unit that is not stored. With single edits, drift is measured for the
        first `drift_edits` of them.
        """
        units = []
        for number, stage in enumerate(self.stages(n)):
            with_drift = not self.alone or number <= drift_edits
            for begin in range(0, len(stage.records), unit_size):
                part = stage.records[begin : begin + unit_size]
                units.append(replace(stage, records=part, drift=with_drift and begin == 0))
        return units


PROTOCOLS = ("single", "batch", "sequential")


def get_protocol(name: str, *, batch: int = 100, every: int | None = None) -> Protocol:
    """Return a protocol by name; `batch` and `every` apply to the sequential one."""
    for setting, value in (("batch", batch), ("every", every)):
        if value is not None:
            require_number(setting, value, least=1, whole=True, code="setting_too_small")
    if name not in PROTOCOLS:
        raise unknown_name("protocol", name, PROTOCOLS)
    if name == "single":
        return Protocol(name, batch=1, alone=True)
    return Protocol(name) if name == "batch" else Protocol(name, batch, every=every)
