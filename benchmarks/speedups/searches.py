"""The search for targets with all of its speed-ups, without each, and without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.speedups.plain_trunk import Plain
from benchmarks.speedups.timing import Row, Timer, difference
from rebind.edit.targets import FactPrompts, TargetSettings, find_targets
from rebind.edit.targets import optimize as engine
from rebind.edit.targets.objective import Objective
from rebind.edit.targets.search_copy import speed_up
from rebind.models.trunk import Trunk

FEW = 4  # facts that are searched for one by one


@dataclass(eq=False)
class Setup:
    """What is searched for."""

    trunk: Trunk
    layer: int
    facts: Sequence[FactPrompts]
    settings: TargetSettings

    def find(self, trunk: Trunk | None = None, search_trunk: Trunk | None = None) -> Tensor:
        found = find_targets(trunk or self.trunk, self.layer, self.facts, self.settings, search_trunk=search_trunk)
        return found.states - found.initial

    def one_at_a_time(self, trunk: Trunk | None = None) -> Tensor:
        alone = (Setup(self.trunk, self.layer, [fact], self.settings) for fact in self.facts)
        return torch.cat([one.find(trunk) for one in alone])

    def first(self, count: int) -> Setup:
        return Setup(self.trunk, self.layer, self.facts[:count], self.settings)

    def short(self) -> Setup:
        """Two steps of two facts: enough to load what a search runs."""
        return Setup(self.trunk, self.layer, self.facts[:2], replace(self.settings, steps=2))

    def within(self, context: Callable[[], Any]) -> Tensor:
        with context():
            return self.find()


@contextmanager
def finished_stay() -> Iterator[None]:
    """Facts that are done are run to the end with the others, unmoved."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(engine, "RECORDING_COST", float("inf")))
        if not torch.cuda.is_available():  # as if a graph were recorded: those are not made anew for fewer facts
            patches.enter_context(patch.object(engine, "can_record", lambda trunk: True))
            patches.enter_context(patch.object(engine, "record", lambda objective: objective))
            patches.enter_context(patch.object(engine, "RecordedObjective", Objective))
        yield


@contextmanager
def not_recorded() -> Iterator[None]:
    """No CUDA graphs: every step is launched kernel by kernel."""
    with patch.object(engine, "can_record", lambda trunk: False):
        yield


def searches(setup: Setup) -> dict[str, Callable[[], Tensor]]:
    """The search of all facts at once without each of its other speed-ups."""
    trunk = setup.trunk
    found: dict[str, Callable[[], Tensor]] = {
        "prompts from their first token": lambda: setup.find(Plain(trunk, whole=True)),
        "the blocks below as well": lambda: setup.find(Plain(trunk, below=True)),
        "logits at every token": lambda: setup.find(Plain(trunk, everywhere=True)),
        "finished facts stay in the batch": lambda: setup.within(finished_stay),
    }
    if trunk.device.type == "cuda":
        found["no CUDA graphs"] = lambda: setup.within(not_recorded)
    return found


def searches_one_by_one(setup: Setup) -> dict[str, Callable[[], Tensor]]:
    """One fact after another: with all else, and with nothing."""

    def nothing() -> Tensor:
        with not_recorded():
            return setup.one_at_a_time(Plain(setup.trunk, whole=True, below=True, everywhere=True))

    return {"one fact at a time": setup.one_at_a_time, "none of them": nothing}


def target_rows(setup: Setup, clock: Timer, *, slow: bool = True) -> Iterator[Row]:
    """Facts one by one are slow: where there are more than a few, the first few are timed and the rest reckoned."""
    setup.short().find()
    on, expected = clock(setup.find)
    warm = searches(setup.short())
    for name, call in searches(setup).items():
        warm[name]()
        on, _ = clock(setup.find)  # anew beside each: a machine is not equally busy all the time
        off, got = clock(call)
        yield Row("targets", name, on, off, difference(got, expected))
    few = min(FEW, len(setup.facts))
    share = len(setup.facts) / few
    for name, call in searches_one_by_one(setup.first(few)).items():
        if slow or name != "none of them":
            off, got = clock(call, once=True)
            told = name if share == 1 else f"{name} ({few}, times {share:g})"
            yield Row("targets", told, on, share * off, difference(got, expected[:few]))
    if setup.trunk.device.type == "cuda":
        narrow = setup.trunk.narrowed(torch.bfloat16)
        setup.short().find(search_trunk=narrow)
        usual, first = clock(lambda: setup.find(search_trunk=narrow))
        speed_up(narrow.model)
        setup.short().find(search_trunk=narrow)
        quick, second = clock(lambda: setup.find(search_trunk=narrow))
        yield Row("targets", "attention and norms as for long texts", quick, usual, difference(first, second))
        yield Row("targets", "float32: no copy in bfloat16", quick, on, difference(expected, second))
