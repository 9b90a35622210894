"""The editing methods: each a choice of layers and a gain on top of one closed form.

All of them find targets the same way (`targets`) and write them the same way (`spread`). They differ in
how the gain weighs new keys against old ones:

| method | layers | gain |
| --- | --- | --- |
| `memit` | several | ridge |
| `rome` | one | equality, one fact at a time |
| `emmet` | one | equality, all facts at once |
| `alphaedit` | several | ridge in the null space of the old keys, earlier edits' keys held |
| `recursive` | several | ridge whose moment has absorbed the earlier edits' keys |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from rebind.edit.targets.optimize import TargetSettings
from rebind.errors import InputError
from rebind.memory import Write, chain
from rebind.memory.checks import unknown_name
from rebind.memory.closed_form import NullSpace, equality, null_space, ridge
from rebind.memory.solve import Cholesky, factor


@dataclass(eq=False)
class Old:
    """What is known of a site's old keys. Factors are made when first asked for, and kept."""

    moment: Tensor  # [d_k, d_k] E[kkᵀ], float64

    @cached_property
    def factored(self) -> Cholesky:
        return factor(self.moment, "moment")

    @cached_property
    def unused(self) -> NullSpace:
        """The least used nine tenths of the directions."""
        return NullSpace.smallest(self.moment, 0.9)


Gain = Callable[[Tensor, Old, float, Tensor], Tensor]  # (keys, old, λ, earlier edits' keys) → gain


@dataclass(frozen=True)
class Method:
    """One way to write facts."""

    name: str
    summary: str
    gain: Gain
    several_layers: bool = True
    remembers: bool = False  # whether the gain depends on the keys of earlier edits
    lam: float | None = None  # λ where the method has one of its own; None: from the keys
    exact: bool = False  # whether facts are met exactly, whatever λ is
    targets: TargetSettings = TargetSettings()  # noqa: RUF009 - frozen


def _ridge(keys: Tensor, old: Old, lam: float, earlier: Tensor) -> Tensor:
    return ridge(keys, old.factored, lam).value


def _equality(keys: Tensor, old: Old, lam: float, earlier: Tensor) -> Tensor:
    return equality(keys, old.factored).value


def _one_by_one(keys: Tensor, old: Old, lam: float, earlier: Tensor) -> Tensor:
    """The gain of the composition of one-row equality writes, in order: a chunk of ROME's edits is one write."""
    if len(keys) > keys.shape[-1]:
        raise InputError(
            f"got {len(keys)} facts for keys {keys.shape[-1]} wide, expected no more facts than that in one edit: each "
            f"takes a direction of its own; write them in several edits, or use memit"
        )
    rows = keys.unsqueeze(-2)  # a batch of single rows
    single = equality(rows, old.factored).value
    values = keys.new_zeros(len(keys), 1, 1)
    composed = chain(Write(rows, values, single), chunk=max(len(keys), 1))
    return composed.gain


def _null_space(keys: Tensor, old: Old, lam: float, earlier: Tensor) -> Tensor:
    return null_space(keys, old.unused, previous=earlier if len(earlier) else None, l2=lam).value


def _recursive(keys: Tensor, old: Old, lam: float, earlier: Tensor) -> Tensor:
    if not len(earlier):
        return _ridge(keys, old, lam, earlier)
    return ridge(keys, lam * old.moment + earlier.mT @ earlier).value


METHODS = {
    method.name: method
    for method in (
        Method("memit", "many facts over several layers, old answers weighed by λ", _ridge),
        Method(
            "rome",
            "one layer, each fact exactly, one after another",
            _one_by_one,
            several_layers=False,
            exact=True,
            targets=TargetSettings(clamp=4.0),
        ),
        Method("emmet", "one layer, all facts exactly at once", _equality, several_layers=False, exact=True),
        Method("alphaedit", "only in directions that old keys hardly use", _null_space, remembers=True, lam=10.0),
        Method("recursive", "memit that holds on to its own earlier edits", _recursive, remembers=True),
    )
}


def get_method(name: str | Method) -> Method:
    if isinstance(name, Method):
        return name
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]


@dataclass(frozen=True)
class Settings:
    """Everything a method needs for one model."""

    layers: tuple[int, ...]  # edited, in order; the last is where targets are set
    lam: float | None  # λ; None: from the keys (`spread.suitable_lambda`)
    targets: TargetSettings
    source: str = "chosen by hand"  # where the layers come from
    published_lam: float | None = None  # λ of the published runs on this model: told, not used


@dataclass(frozen=True)
class Entry:
    """What is known to suit a model."""

    methods: tuple[str, ...]
    model: str  # a part of its name, in small letters
    depth: int  # how many blocks it has: another model of the same name is another model
    layers: tuple[int, ...]
    targets: TargetSettings
    lam: float | None = None
    source: str = "published"
    facts: int = 1  # for edits of so many facts at least


def _search(steps: int, rate: float, decay: float, clamp: float) -> TargetSettings:
    return TargetSettings(steps=steps, rate=rate, decay=decay, clamp=clamp)


BY_DEPTH = "by its depth"
ROME, EMMET, SPREAD = ("rome",), ("emmet",), ("memit", "alphaedit", "recursive")
LLAMA_LAYERS = (4, 5, 6, 7, 8)

# The λ of an entry is in our unit, λ·E[kkᵀ], and still it is only told. It was tuned for one number of facts (2,000 or
# 10,000 at once) and for moments over some 40 million tokens of Wikipedia; λ from the keys follows the number of facts,
# and the moments there are. MEMIT's own code on SmolLM2 scores S .89 at λ = 1,500 and .64 at the published 15,000.
ENTRIES = (
    Entry(ROME, "gpt2-medium", 24, (8,), _search(20, 0.5, 0.5, 3.0)),
    Entry(ROME, "gpt2-large", 36, (12,), _search(20, 0.5, 0.5, 4.0)),
    Entry(ROME, "gpt2-xl", 48, (17,), _search(20, 0.5, 0.5, 4.0)),
    Entry(ROME, "gpt-j", 28, (5,), _search(20, 0.5, 0.5, 4.0)),
    Entry(ROME, "gpt-neox-20b", 44, (15,), _search(20, 0.5, 0.5, 4.0)),
    Entry(ROME, "llama-3-8b", 32, (5,), _search(25, 0.5, 1e-3, 4.0)),
    Entry(ROME, "qwen2.5-7b", 28, (5,), _search(25, 0.5, 1e-3, 4.0)),
    Entry(EMMET, "gpt2-xl", 48, (17,), _search(20, 0.5, 0.5, 0.75)),
    Entry(EMMET, "gpt-j", 28, (5,), _search(25, 0.5, 0.5, 0.75)),
    Entry(EMMET, "llama-2-7b", 32, (5,), _search(25, 0.5, 1e-3, 4.0)),
    Entry(SPREAD, "gpt2-xl", 48, (13, 14, 15, 16, 17), _search(20, 0.5, 0.5, 0.75), 20_000.0),
    Entry(SPREAD, "gpt-j", 28, (3, 4, 5, 6, 7, 8), _search(25, 0.5, 0.5, 0.75), 15_000.0),
    Entry(SPREAD, "llama-2-7b", 32, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    Entry(SPREAD, "mistral-7b", 32, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    Entry(SPREAD, "qwen2.5-7b", 28, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    Entry(SPREAD, "llama-3-8b", 32, LLAMA_LAYERS, _search(25, 0.1, 0.5, 0.75), 15_000.0),
    # Few facts are said best from layers 1 to 5. Many crowd one another, so no target is realised in full: one that is
    # nearly reached does as well, and a layer lower they disturb the model less.
    Entry(SPREAD, "smollm2", 30, (0, 1, 2, 3, 4), TargetSettings(enough=0.2), source="measured", facts=400),
    Entry(SPREAD, "smollm2", 30, (1, 2, 3, 4, 5), TargetSettings(), source="measured"),
    Entry(ROME, "smollm2", 30, (2,), TargetSettings(clamp=4.0), source="measured"),
)


def default_settings(method: Method, name: str, depth: int, facts: int = 1) -> Settings:
    """From the model's entry, where it has one; else layers by its depth, and the rest from the method.

    A method without an entry of its own takes the layers of one that writes as many, and keeps its own search.
    """
    known = [entry for entry in ENTRIES if entry.model in name.lower() and entry.depth == depth]
    here = [entry for entry in known if entry.facts <= facts]
    for entry in here:
        if method.name in entry.methods:
            # AlphaEdit's L2 is the method's own, and no λ.
            told = None if method.lam is not None else entry.lam
            return Settings(entry.layers, method.lam, entry.targets, f"{entry.source} for {entry.model}", told)
    for entry in here:
        if (len(entry.layers) > 1) is method.several_layers:
            source = f"{entry.source} for {entry.model} with {entry.methods[0]}"
            return Settings(entry.layers, method.lam, method.targets, source)
    return Settings(_layers_by_depth(method, depth), method.lam, method.targets, f"{BY_DEPTH} of {depth}")


def _layers_by_depth(method: Method, depth: int) -> tuple[int, ...]:
    """Up to a sixth of the way: on SmolLM2, of 30 blocks, layers 1 to 5 said more and disturbed less than 2 to 6."""
    last = max(0, min(depth - 2, max(1, round(depth / 6))))
    return tuple(range(max(0, last - 4), last + 1)) if method.several_layers else (last,)


def choose_settings(
    method: Method,
    name: str,
    depth: int,
    *,
    facts: int = 1,
    layers: Sequence[int] | None = None,
    lam: float | None = None,
    targets: TargetSettings | None = None,
    measured: tuple[int, ...] | None = None,
) -> Settings:
    """What is given, the rest by default. `measured` are the layers that trial edits chose (`rebind layers`)."""
    settings = default_settings(method, name, depth, facts)
    if measured is not None and settings.source.startswith(BY_DEPTH):
        middle = measured[len(measured) // 2]  # where one must do for all: what they are tried round
        here = measured if method.several_layers else (middle,)
        settings = replace(settings, layers=here, source="measured on this machine")
    if layers is not None:
        settings = replace(settings, layers=tuple(sorted(set(layers))), source="chosen by hand")
        if len(settings.layers) > 1 and not method.several_layers:
            raise InputError(
                f"layers are {list(settings.layers)}, expected one for {method.name}, which writes its facts exactly "
                f"into one matrix: name one, or use memit for several"
            )
    if lam is not None and method.exact:
        raise InputError(
            f"lam is {lam:g}, expected none for {method.name}, which meets its facts exactly whatever λ is: leave it "
            f"out, or use memit"
        )
    outside = [layer for layer in settings.layers if not 0 <= layer < depth - 1]
    if outside or not settings.layers:
        raise InputError(
            f"layers are {list(settings.layers)}, expected some of 0 to {depth - 2}: at least one block must lie above "
            f"the last edited one"
        )
    return replace(
        settings,
        lam=settings.lam if lam is None else lam,
        targets=settings.targets if targets is None else targets,
    )
