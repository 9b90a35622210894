"""Facts written all at once, or batch after batch: the two protocols that methods are compared in.

In a sequence targets and keys are found on the base model, as rebind does it, or on the model that holds the batches
before, as in the papers. After the last row the unedited model is there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.editing import peak_gib
from benchmarks.methods.shared import impossible, mean, whole
from benchmarks.methods.states import Bench, Row, places
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import Method, get_method
from rebind.edit.solve.solve import solve
from rebind.edit.targets.search import Search
from rebind.edit.targets.store import KeptTargets
from rebind.evals.answers import Row as Answer
from rebind.evals.records import Record
from rebind.memory import Write
from rebind.models.sites import memory_of, write_memory

LOOKED_AT = 3  # groups whose perplexity is measured


def batch(bench: Bench, name: str, n: int) -> Row:
    """n facts in one edit, or the mean of several such edits."""
    editor, method = bench.editor, get_method(name)
    empty = bench.row(name, "batch", "base", n)
    if why := impossible(editor, method, n):
        return replace(empty, why=why)
    groups = bench.facts(n)
    said: list[tuple[Record, Answer]] = []
    wholes: list[dict[str, Any]] = []
    with bench.apart() as clock:
        for number, records in enumerate(groups):
            edit = editor.rewrite_many([record.fact for record in records], method=method)
            clock.enter(None)
            said += bench.ask(records)
            if number < LOOKED_AT:
                wholes.append(whole(bench.held))
            editor.undo(edit.id)
        settings: Any = edit.settings
        return replace(
            empty,
            groups=len(groups),
            scores=bench.scores(said),
            perplexity=mean(one["perplexity"] for one in wholes),
            drift=mean(one["drift"] for one in wholes),
            growth=mean(one["growth"] for one in wholes),
            layers=tuple(settings["layers"]),
            lam=float(settings["lam"]),
            phases=dict(clock.spent),
            searched=bench.memory.targets.searched,
            memory_gib=peak_gib(editor),
        )


def sequential(bench: Bench, name: str, found: str, size: int, at: Sequence[int]) -> Iterator[Row]:
    """Batches of facts, one after another; a row for each number in `at`. Where there are not as many, made ones."""
    method, stops = get_method(name), sorted({*at})
    (records,) = bench.facts(stops[-1], once=True)
    empty = bench.row(name, "sequential", found, stops[-1])
    if why := impossible(bench.editor, method, min(size, stops[-1])):
        yield from (replace(empty, facts=stop, why=why) for stop in stops)
        return
    with bench.apart() as clock:
        write = _on_base(bench.editor, method) if found == "base" else _on_edited(bench, method)
        for begin in range(0, stops[-1], size):
            end = min(begin + size, stops[-1])
            layers, lam = write([record.fact for record in records[begin:end]])
            clock.enter(None)
            if end in stops:
                yield bench.measured(replace(empty, facts=end, layers=layers, lam=lam), records[:end], clock)


Writer = Callable[[list[Fact]], tuple[tuple[int, ...], float]]  # facts → layers, λ


def _on_base(editor: Editor, method: Method) -> Writer:
    def write(facts: list[Fact]) -> tuple[tuple[int, ...], float]:
        settings: Any = editor.rewrite_many(facts, method=method).settings
        return tuple(settings["layers"]), float(settings["lam"])

    return write


def _on_edited(bench: Bench, method: Method) -> Writer:
    """Writes go straight into the weights, past the ledger, which stays empty: what it says puts the base back."""
    editor = bench.editor
    _ = editor.contexts, editor.drift()  # both are asked of the base: once there, they are kept
    earlier: dict[str, Tensor] = {}  # keys of the batches before, by site

    def write(facts: list[Fact]) -> tuple[tuple[int, ...], float]:
        settings = bench.settings(method.name, len(facts))
        sites = places(editor, settings.layers)
        editor.progress.phase("contexts")
        requests = editor.requests(facts)
        editor.weights.remember([place.name for place in sites])
        editor.progress.phase("moments")
        editor.weights.learn_old_keys(sites)
        editor.progress.phase("targets")
        # The narrower copy of a search is of the weights as they stand; nothing is written yet: those of the base.
        search: Any = Search(editor.trunk, "the model as it stands") if earlier else bench.memory.targets
        wanted = search.find(
            settings.layers[-1], requests, settings.targets, KeptTargets(None), editor.progress.targets
        )
        editor.progress.phase("solve")
        writes, lam = solve(
            editor.trunk, sites, requests, wanted.hidden, method, settings.lam, editor.weights.old, earlier
        )
        for place in sites:
            keys, values, found = (part.double() for part in writes[place.name].tensors())
            write_memory(place.module, Write(keys, values, found).apply(memory_of(place.module).double()))
            earlier[place.name] = torch.cat([earlier[place.name], keys]) if place.name in earlier else keys
        return settings.layers, float(lam or 0.0)

    return write
