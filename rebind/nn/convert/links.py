"""Which weights of another library are which of ours, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rebind.errors import InputError

OF_A_RUN = {"training", "gradient_checkpointing"}  # attributes of modules that are no part of a model

Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Link:
    """Weights of theirs that are weights of ours, and how the ones become the others."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Change
    to_theirs: Change

    def inside(self, theirs: str, ours: str) -> Link:
        """Return the same link for parts of these names inside larger modules."""
        return replace(
            self, theirs=tuple(theirs + name for name in self.theirs), ours=tuple(ours + name for name in self.ours)
        )


def same(theirs: str, ours: str) -> Link:
    """The same numbers, in shapes that may differ by dimensions of size 1 or by flattening."""
    return Link((theirs,), (ours,), tuple, tuple)


def shifted(theirs: str, ours: str) -> Link:
    """A norm whose weight is stored as its distance from 1."""
    return Link((theirs,), (ours,), lambda weights: [weights[0] + 1], lambda weights: [weights[0] - 1])


def joined(theirs: Sequence[str], ours: str, sizes: Sequence[int]) -> Link:
    """Several of theirs below each other in one of ours, with so many rows each."""
    return Link(
        tuple(theirs), (ours,), lambda parts: [torch.cat(list(parts))], lambda whole: whole[0].split(list(sizes))
    )


def interleaved(theirs: str, ours: str, groups: int, plain: int, turned: int) -> Link:
    """Rows in groups whose last `turned` belong to rotary positions: in pairs there, in two halves here.

    Channels 0, 1 of theirs are a pair, then 2, 3; of ours the first half is paired with the second.
    """
    order = torch.arange(turned).unflatten(0, (-1, 2)).T.flatten() + plain
    order = torch.cat([torch.arange(plain), order])
    back = order.argsort()

    def arrange(order: Tensor) -> Change:
        return lambda weights: [weights[0].unflatten(0, (groups, -1))[:, order.to(weights[0].device)].flatten(0, 1)]

    return Link((theirs,), (ours,), arrange(order), arrange(back))


def grouped(theirs: str, ours: Sequence[str], groups: int, sizes: Sequence[int]) -> Link:
    """One of theirs whose rows are, group by group, so many of each of ours."""

    def split(weights: Sequence[Tensor]) -> list[Tensor]:
        parts = weights[0].unflatten(0, (groups, sum(sizes))).split(list(sizes), dim=1)
        return [part.flatten(0, 1) for part in parts]

    def join(weights: Sequence[Tensor]) -> list[Tensor]:
        parts = [part.unflatten(0, (groups, size)) for part, size in zip(weights, sizes, strict=True)]
        return [torch.cat(parts, dim=1).flatten(0, 1)]

    return Link((theirs,), tuple(ours), split, join)


@torch.no_grad()
def copy_to_ours(links: Iterable[Link], theirs: nn.Module, ours: nn.Module) -> None:
    """Copy their weights into ours."""
    source, target = _weights(theirs), _weights(ours)
    for link in links:
        _copy(link.to_ours([source[name] for name in link.theirs]), [target[name] for name in link.ours])


@torch.no_grad()
def copy_to_theirs(links: Iterable[Link], ours: nn.Module, theirs: nn.Module) -> None:
    """Copy our weights into theirs."""
    source, target = _weights(ours), _weights(theirs)
    for link in links:
        _copy(link.to_theirs([source[name] for name in link.ours]), [target[name] for name in link.theirs])


def require_same_layers(ours: nn.Module, expected: nn.Module) -> None:
    """Require that our layers have the parts, shapes and options of those that theirs would become."""
    own, other = _options(ours), _options(expected)
    different = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    if different:
        first = different[0]
        raise InputError(
            f"The layers differ in {first}: {own.get(first, 'absent')} in ours, {other.get(first, 'absent')} in theirs",
            expected="layers of one shape with the same options",
            advice="Copy into a layer or model like the one that ours came from",
            code="layers_differ",
        )


def _options(module: nn.Module) -> dict[str, Any]:
    """Return the shapes of all weights, and what else decides what the layers compute."""
    options: dict[str, Any] = {name: list(weight.shape) for name, weight in module.named_parameters()}
    for path, part in module.named_modules():
        if type(part).__module__.startswith("rebind.nn.") and not hasattr(part, "config"):
            for name, value in vars(part).items():
                if (
                    name not in OF_A_RUN
                    and name[0] != "_"
                    and (isinstance(value, int | float | str) or is_dataclass(value))
                ):
                    options[f"{path}.{name}".lstrip(".")] = value
    return options


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _copy(weights: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for weight, target in zip(weights, targets, strict=True):
        target.copy_(weight.reshape(target.shape))
