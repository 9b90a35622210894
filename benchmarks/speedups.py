"""What each speed-up of the engine buys, and that none changes the result: ours with one of them off at a time.

    python -m benchmarks.speedups                                                four facts of our own
    python -m benchmarks.speedups --facts counterfact.json --n 100 --device cuda

A speed-up is turned off here, not by a switch of the engine: the search is handed a trunk that does the work which it
would have been spared (`Plain`), or facts one at a time. Everything runs in float32, with CUDA graphs on a GPU; the
copy in bfloat16 that a GPU searches on has rows of its own, for rounding is what may change the result. The difference
is ‖δ − δ'‖ / ‖δ‖ of the targets, and of keys, gains and moments likewise.

Searches are timed once, on beside off, after two steps of two facts that load the kernels; of what takes milliseconds a
GPU's row has the quickest of three.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.report import RESULTS
from benchmarks.targets import FACTS
from rebind.bench.machine import machine
from rebind.edit import targets as engine
from rebind.edit.editor import Editor
from rebind.edit.methods import Old
from rebind.edit.objective import Objective, Request
from rebind.edit.reading import read_facts
from rebind.edit.short import hurry
from rebind.edit.sites import module_at
from rebind.edit.spread import suitable_lambda
from rebind.edit.subjects import Subjects
from rebind.edit.targets import TargetSettings, find_targets
from rebind.edit.trunk import Tokens, Trunk
from rebind.files import write_atomically
from rebind.memory.closed_form import ridge
from rebind.memory.solve import factor

FEW = 4  # facts that are searched for one by one
BRIEF = 3  # times that what takes milliseconds is timed, on a GPU


@dataclass(frozen=True)
class Row:
    """A speed-up, off and on."""

    phase: str
    name: str  # what is done without it
    on: float  # seconds
    off: float
    difference: float  # relative, of the result

    @property
    def factor(self) -> float:
        return self.off / self.on


# The search for targets


@dataclass(eq=False)
class _Prefixes:
    """Stands for a cache: remembers the tokens instead of their keys and values, and is handed on like one."""

    tokens: Tokens
    states: Tensor | None = None  # [rows, prefix + suffix, width]: of the block below δ, found at the first run
    layers: tuple[()] = ()

    def batch_select_indices(self, rows: Tensor) -> None:
        self.tokens = self.tokens.select(rows)
        self.states = None if self.states is None else self.states[rows]


class Plain(Trunk):
    """A trunk that does what need not be done: any of three things, each with the same answers."""

    def __init__(self, trunk: Trunk, *, whole: bool = False, below: bool = False, everywhere: bool = False) -> None:
        super().__init__(trunk.model, trunk.blocks)
        self.whole = whole  # run prompts from their first token, not from the subject's last
        self.below = below  # run the blocks below δ as well
        self.everywhere = everywhere  # logits at every token

    def cache(self, tokens: Tokens, *, until: int | None = None) -> Any:
        if not self.whole or tokens.ids.shape[-1] == 0:
            return super().cache(tokens, until=until)
        return _Prefixes(tokens)

    @torch.no_grad()
    def after(self, layer: int, tokens: Tokens, *, cache: Any = None, start: Any = None) -> Tensor:
        if not isinstance(cache, _Prefixes):
            return super().after(layer, tokens, cache=cache, start=start)
        joined, order = _joined(cache.tokens, tokens)
        cache.states = _reordered(super().after(layer, joined), order.argsort(-1))
        return cache.states[:, -tokens.ids.shape[-1] :]

    def logits(self, tokens: Tokens, where: Tensor, *, cache: Any = None, start: Any = None) -> Tensor:
        if isinstance(cache, _Prefixes):
            tokens, where, start = self._from_the_first_token(tokens, where, cache, start)
            cache = None
        late = nullcontext() if self.below and start is not None else self._starting(start)
        with late, self._answering(start) if self.below else nullcontext():
            if not self.everywhere:
                return super().logits(tokens, where, cache=cache)
            held = super()._arguments(tokens, None if cache is None else _own(cache), self._head_accepts)
            logits = self.model(**held, use_cache=cache is not None).logits
            return logits[where[:, 0], where[:, 1]].to(torch.promote_types(logits.dtype, torch.float32))

    def _from_the_first_token(
        self, tokens: Tokens, where: Tensor, cache: _Prefixes, start: tuple[int, Tensor]
    ) -> tuple[Tokens, Tensor, tuple[int, Tensor]]:
        layer, hidden = start
        if cache.states is None:
            self.after(layer, tokens, cache=cache)
        assert cache.states is not None
        joined, order = _joined(cache.tokens, tokens)
        before = cache.states[:, : -hidden.shape[1]].to(hidden.dtype)
        states = _reordered(torch.cat([before, hidden], dim=1), order)
        lengths = cache.tokens.mask.sum(-1)
        there = torch.stack([where[:, 0], where[:, 1] + lengths[where[:, 0]]], dim=-1)
        return joined, there, (layer, states)

    @contextmanager
    def _answering(self, start: tuple[int, Tensor] | None) -> Iterator[None]:
        """Let every block run, and replace what the one at δ says."""
        if start is None:
            yield
            return
        layer, hidden = start

        def answer(_: nn.Module, __: Any, out: Any) -> Any:
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        handle = self.blocks[layer].register_forward_hook(answer)
        try:
            yield
        finally:
            handle.remove()


def _own(cache: Any) -> Any:
    """A cache to append to; the original is left as it is."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own


def _joined(past: Tokens, tokens: Tokens) -> tuple[Tokens, Tensor]:
    """Prefixes and suffixes in one, padding behind; and where each token of [padding, prefix, suffix] went."""
    ids = torch.cat([past.ids, tokens.ids], dim=-1)
    padding = past.ids.shape[-1] - past.mask.sum(-1, keepdim=True)
    places = torch.arange(ids.shape[-1], device=ids.device)
    order = (places + padding) % ids.shape[-1]
    mask = tokens.mask.gather(-1, order)
    return Tokens(ids.gather(-1, order), mask, places.expand_as(ids)), order


def _reordered(states: Tensor, order: Tensor) -> Tensor:
    return states.gather(1, order.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


@contextmanager
def finished_stay() -> Iterator[None]:
    """Facts that are done are run to the end with the others, unmoved."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(engine, "RECORDING", float("inf")))
        if not torch.cuda.is_available():  # as if a graph were recorded: those are not made anew for fewer facts
            patches.enter_context(patch.object(engine, "can_be_recorded", lambda trunk: True))
            patches.enter_context(patch.object(engine, "recorded", lambda objective: objective))
            patches.enter_context(patch.object(engine, "Recorded", Objective))
        yield


@contextmanager
def not_recorded() -> Iterator[None]:
    """No CUDA graphs: every step is launched kernel by kernel."""
    with patch.object(engine, "can_be_recorded", lambda trunk: False):
        yield


@dataclass(eq=False)
class Setup:
    """What is searched for."""

    trunk: Trunk
    layer: int
    requests: Sequence[Request]
    settings: TargetSettings

    def find(self, trunk: Trunk | None = None, quick: Trunk | None = None) -> Tensor:
        found = find_targets(trunk or self.trunk, self.layer, self.requests, self.settings, quick=quick)
        return found.hidden - found.before

    def one_at_a_time(self, trunk: Trunk | None = None) -> Tensor:
        alone = (Setup(self.trunk, self.layer, [request], self.settings) for request in self.requests)
        return torch.cat([one.find(trunk) for one in alone])

    def first(self, count: int) -> Setup:
        return Setup(self.trunk, self.layer, self.requests[:count], self.settings)

    def short(self) -> Setup:
        """Two steps of two facts: enough to load what a search runs."""
        return Setup(self.trunk, self.layer, self.requests[:2], replace(self.settings, steps=2))

    def within(self, context: Callable[[], Any]) -> Tensor:
        with context():
            return self.find()


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
    few = min(FEW, len(setup.requests))
    share = len(setup.requests) / few
    for name, call in searches_one_by_one(setup.first(few)).items():
        if slow or name != "none of them":
            off, got = clock(call, once=True)
            told = name if share == 1 else f"{name} ({few}, times {share:g})"
            yield Row("targets", told, on, share * off, difference(got, expected[:few]))
    if setup.trunk.device.type == "cuda":
        narrow = setup.trunk.narrowed(torch.bfloat16)
        setup.short().find(quick=narrow)
        usual, first = clock(lambda: setup.find(quick=narrow))
        hurry(narrow.model)
        setup.short().find(quick=narrow)
        quick, second = clock(lambda: setup.find(quick=narrow))
        yield Row("targets", "attention and norms as for long texts", quick, usual, difference(first, second))
        yield Row("targets", "float32: no copy in bfloat16", quick, on, difference(expected, second))


# Keys, gains, moments


def key_rows(setup: Setup, modules: Sequence[tuple[int, nn.Module]], clock: Timer) -> Iterator[Row]:
    """The keys of every layer and the states at the last: going up once, or two whole passes a layer."""

    def climbing() -> Tensor:
        subjects = Subjects(setup.trunk, setup.requests)
        keys = []
        for layer, module in modules:
            keys.append(subjects.keys(layer, module))
            subjects.states(setup.layer)
        return torch.cat(keys)

    def passes() -> Tensor:
        return torch.cat([_keys_by_a_pass(setup, module) for _, module in modules])

    on, expected = clock(climbing)
    off, got = clock(passes)
    yield Row("keys", "two whole passes a layer", on, off, difference(got, expected))


@torch.no_grad()
def _keys_by_a_pass(setup: Setup, module: nn.Module) -> Tensor:
    """The input of a module at the subjects, weighed as `Subjects` does, after two passes of whole prompts."""
    prompts = [prompt for request in setup.requests for prompt in request.prompts]
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[*prompt.ids] + [0] * (width - len(prompt.ids)) for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt.ids) + [0] * (width - len(prompt.ids)) for prompt in prompts])
    at = torch.tensor([prompt.subject_last for prompt in prompts], device=setup.trunk.device)
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    try:
        for _ in ("keys", "states"):
            setup.trunk.model(ids.to(at.device), attention_mask=mask.to(at.device))
    finally:
        handle.remove()
    last = seen[0][torch.arange(len(at), device=at.device), at].double()
    parts = last.split([len(request.prompts) for request in setup.requests])
    return torch.stack([(one[0] + one[1:].mean(0)) / 2 if len(one) > 1 else one[0] for one in parts])


def solve_rows(keys: Sequence[Tensor], old: Sequence[Old], clock: Timer) -> Iterator[Row]:
    """The gains of every layer: the moment's factor kept and a small system, or the whole system each time."""
    lam = suitable_lambda(keys[0], old[0].factored)
    for one in old:
        _ = one.factored

    def small() -> Tensor:
        return torch.cat([ridge(k, one.factored, lam).value for k, one in zip(keys, old, strict=True)])

    def whole() -> Tensor:
        systems = [(lam * one.moment + k.mT @ k, k) for k, one in zip(keys, old, strict=True)]
        return torch.cat([factor(matrix, "system").solve(k.mT).value.mT for matrix, k in systems])

    on, expected = clock(small)
    off, got = clock(whole)
    yield Row("solve", "the d × d system of each layer", on, off, difference(got, expected))


def moment_rows(trunk: Trunk, modules: Sequence[nn.Module], clock: Timer, tokens: int) -> Iterator[Row]:
    """E[kkᵀ] of every layer: one pass that stops at the last, a pass for each, or a pass to the top."""
    vocabulary = trunk.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (max(1, tokens // 64), 64), generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones_like(ids)
    read = Tokens(*(part.to(trunk.device) for part in (ids, everywhere, everywhere.cumsum(-1) - 1)))

    def summed(keys: Sequence[Tensor]) -> Tensor:
        return torch.stack([(rows.flatten(0, 1).mT @ rows.flatten(0, 1)).double() for rows in keys])

    def together() -> Tensor:
        return summed(trunk.inputs(modules, read))

    def apart() -> Tensor:
        return summed([trunk.inputs([module], read)[0] for module in modules])

    @torch.no_grad()
    def to_the_top() -> Tensor:
        seen: list[Tensor] = []
        handles = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in modules]
        try:
            trunk.model.base_model(input_ids=read.ids, attention_mask=read.mask, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return summed(seen)

    on, expected = clock(together)
    for name, call in (("a pass for each layer", apart), ("passes that go on to the top", to_the_top)):
        off, got = clock(call)
        yield Row("moments", name, on, off, difference(got, expected))


# Measuring and telling


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Timer:
    """The quickest of some calls: the first loads kernels."""

    device: torch.device
    repeats: int = 1

    def __call__(self, call: Callable[[], Tensor], *, once: bool = False) -> tuple[float, Tensor]:
        seconds = []
        for _ in range(1 if once else self.repeats):
            self._wait()
            begin = time.perf_counter()
            result = call()
            self._wait()
            seconds.append(time.perf_counter() - begin)
        return min(seconds), result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def show(rows: Sequence[Row], title: str) -> None:
    note = "difference: relative, between the results with and without; float32 rounding is some 1e-6"
    table = Table(title=title, title_justify="left", title_style="bold", caption=note, caption_justify="left")
    table.add_column("phase", no_wrap=True)
    table.add_column("without it", no_wrap=True)
    for column in ("on, s", "off, s", "buys", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = (f"{row.on:.3f}", f"{row.off:.3f}", f"{row.factor:.1f}×", f"{row.difference:.0e}")
        table.add_row(row.phase, row.name, *cells)
    Console(width=110).print(table)


def run(
    editor: Editor,
    facts: Sequence[Any],
    *,
    steps: int | None,
    repeats: int,
    tokens: int,
    slow: bool,
    told: Callable[[Row], None],
) -> None:
    """Every row, told as it is measured."""
    settings = editor.settings("memit")[1]
    search = settings.targets if steps is None else replace(settings.targets, steps=steps)
    setup = Setup(editor.trunk, settings.layers[-1], editor._requests(facts), search)
    modules = [(layer, module_at(editor.model, editor.sites[layer].name)) for layer in settings.layers]
    clock = Timer(editor.trunk.device, repeats)
    brief = replace(clock, repeats=max(repeats, BRIEF)) if editor.trunk.device.type == "cuda" else clock
    keys = Subjects(editor.trunk, setup.requests)
    found = [keys.keys(layer, module) for layer, module in modules]
    old = [Old(moment.to(editor.trunk.device)) for moment in _moments(editor, [module for _, module in modules])]
    for row in moment_rows(editor.trunk, [module for _, module in modules], brief, tokens):
        told(row)
    for row in key_rows(setup, modules, brief):
        told(row)
    for row in solve_rows(found, old, brief):
        told(row)
    for row in target_rows(setup, clock, slow=slow):
        told(row)


def _moments(editor: Editor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """Of random tokens, twice as many as a key is wide: all a solver's time depends on is the size."""
    width = max(site.d_k for site in editor.sites)
    table = editor.model.get_input_embeddings().weight
    ids = torch.randint(len(table), (-(-2 * width // 64), 64), generator=torch.Generator().manual_seed(1))
    ids = ids.to(table.device)
    everywhere = torch.ones_like(ids)
    seen = editor.trunk.inputs(modules, Tokens(ids, everywhere, everywhere.cumsum(-1) - 1))
    rows = [keys.flatten(0, 1).double() for keys in seen]
    return [one.mT @ one / len(one) for one in rows]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", help="records; default: four facts of our own")
    parser.add_argument("--n", type=int, default=4, help="how many of them")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="most steps of the search; default: the method's for the model")
    parser.add_argument("--tokens", type=int, help="for the moments; default: 2,048, on a GPU 65,536")
    parser.add_argument("--repeats", type=int, default=1, help="of which the quickest is told; default: 1")
    parser.add_argument("--quick", action="store_true", help="leave out the search without any speed-up")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/speedups-DEVICE.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    editor = Editor(options.model, device=options.device, guard=None)
    device = editor.trunk.device.type
    facts = FACTS if options.facts is None else list(read_facts(options.facts, skip_bad=True))[: options.n]
    out = options.out or RESULTS / f"speedups-{device}.json"
    rows: list[Row] = []
    title = f"speed-ups: {len(facts)} facts, {editor.loaded.name}, {device}"

    def told(row: Row) -> None:
        rows.append(row)
        print(f"{row.phase}: {row.name}: {row.on:.3f} s on, {row.off:.3f} s off", flush=True)
        content = {
            "title": title,
            "machine": machine("transformers"),
            "steps": options.steps,
            "rows": [asdict(one) | {"buys": round(one.factor, 2)} for one in rows],
        }
        write_atomically(out, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    tokens = options.tokens or (65_536 if device == "cuda" else 2_048)
    run(editor, facts, steps=options.steps, repeats=options.repeats, tokens=tokens, slow=not options.quick, told=told)
    show(rows, title)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
