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

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from rebind.edit.targets import TargetSettings
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
            targets=TargetSettings(clamp=4.0),
        ),
        Method("emmet", "one layer, all facts exactly at once", _equality, several_layers=False),
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


# By a part of the model's name: the one layer that ROME, and the several that MEMIT, edited in published work.
ONE_LAYER = {
    "gpt2-medium": 8,
    "gpt2-large": 12,
    "gpt2-xl": 17,
    "gpt-j": 5,
    "gpt-neox-20b": 15,
    "llama-3-8b": 5,
    "qwen2.5-7b": 5,
}
SEVERAL_LAYERS = {
    "gpt2-xl": (13, 14, 15, 16, 17),
    "gpt-j": (3, 4, 5, 6, 7, 8),
    "llama-2-7b": (4, 5, 6, 7, 8),
    "llama-3-8b": (4, 5, 6, 7, 8),
    "mistral-7b": (4, 5, 6, 7, 8),
    "qwen2.5-7b": (4, 5, 6, 7, 8),
}


def default_settings(method: Method, name: str, depth: int) -> Settings:
    """Layers from the model's name or its depth; the rest from the method."""
    return Settings(_default_layers(method, name.lower(), depth), method.lam, method.targets)


def _default_layers(method: Method, name: str, depth: int) -> tuple[int, ...]:
    """Published ones, or a fifth of the way up: early layers disturb a model less at the same efficacy."""
    known = SEVERAL_LAYERS if method.several_layers else {part: (layer,) for part, layer in ONE_LAYER.items()}
    for part, layers in known.items():
        if part in name and max(layers) < depth - 1:
            return layers
    last = min(depth - 1, max(1, round(depth / 5)))
    if method.several_layers:
        return tuple(range(max(0, last - 4), last + 1))
    return (min(last, round(depth / 6)),)


def with_changes(
    settings: Settings, *, layers: tuple[int, ...] | None, lam: float | None, targets: TargetSettings | None
) -> Settings:
    changes: dict[str, object] = {"layers": layers, "lam": lam, "targets": targets}
    return replace(settings, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
