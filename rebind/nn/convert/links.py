"""Which weights of another library are which of ours, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

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


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _copy(weights: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for weight, target in zip(weights, targets, strict=True):
        target.copy_(weight.reshape(target.shape))
