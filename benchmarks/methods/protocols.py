"""Facts written all at once, or batch after batch: the two protocols that methods are compared in.

In a sequence targets and keys are found on the base model, as rebind does it, or on the model that holds the batches
before, as in the papers. After the last row the unedited model is there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.editing import peak_gib
from benchmarks.methods.shared import impossible, mean, whole
from benchmarks.methods.states import Bench, Row
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import GainRule, Method, get_method
from rebind.edit.moments import OldKeys
from rebind.edit.solve import SubjectStates, choose_lambda, protected_states, solve_writes
from rebind.edit.targets import TargetSearch, TargetStore
from rebind.edit.targets.kept import subject_prompts
from rebind.evals.records import Record
from rebind.memory import Write
from rebind.models.sites import memory_of, module_at, write_memory
from rebind.storage import Row as Answer

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
            edit = editor.rewrite_many([record.written_facts[0] for record in records], method=method)
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
            layers, lam = write([record.written_facts[0] for record in records[begin:end]])
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
    earlier: dict[OldKeys, Tensor] = {}  # keys of the batches before, for each site's old keys
    if method.remembers:
        method = replace(method, gain=_after(method.gain, earlier))

    def write(facts: list[Fact]) -> tuple[tuple[int, ...], float]:
        settings = bench.settings(method.name, len(facts))
        sites = [editor.sites[layer] for layer in settings.layers]
        names = [site.name for site in sites]
        editor.progress.phase("contexts")
        requests = editor.fact_prompts(facts, subject_prompts(editor.language_model, facts))
        editor.weights.remember_base(names)
        editor.progress.phase("moments")
        editor.weights.load_old_keys(names)
        editor.progress.phase("targets")
        # The narrower copy of a search is of the weights as they stand; nothing is written yet: those of the base.
        trunk = editor.language_model.trunk
        search: Any = TargetSearch(trunk, "as it stands", bench.model.word_parts) if earlier else bench.memory.targets
        wanted = search.find(
            settings.layers[-1], requests, settings.targets, TargetStore(None), editor.progress.targets
        )
        editor.progress.phase("solve")
        old_keys = editor.weights.old_keys
        subjects = SubjectStates(trunk, requests, several_keys=method.several_keys)
        lam = settings.lam
        if lam is None:
            lam = choose_lambda(subjects.keys(sites[0]), old_keys[names[0]], len(facts))
        protected = protected_states(trunk, requests, method)
        writes = solve_writes(subjects, sites, wanted.states - wanted.initial, method, old_keys, lam, protected)
        for name in names:
            keys, values, gain = (part.double() for part in writes[name].tensors())
            module, old = module_at(editor.model, name), old_keys[name]
            write_memory(module, Write(keys, values, gain).apply(memory_of(module).double()))
            earlier[old] = torch.cat([earlier[old], keys]) if old in earlier else keys
        return settings.layers, lam

    return write


def _after(gain: GainRule, earlier: Mapping[OldKeys, Tensor]) -> GainRule:
    """Return the gain after the batches before: `solve_writes` knows of no edits but the one it solves."""
    return lambda keys, old, lam, none: gain(keys, old, lam, earlier.get(old, none))
