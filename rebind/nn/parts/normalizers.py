"""How φ(k) and φ(q) are brought to scale, and whether a read is divided by anything.

Each is an object with three jobs: the key that is written, the query that reads, and the read itself.

A layer normalises at every token, so `unit` and `share` take few operations, where `rebind.memory.features` divides by
the largest entry first. In float32 and bfloat16 that leaves entries up to about 1e18: beyond, sums of squares overflow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.features import Feature, require_non_negative
from rebind.memory.precision import working_dtype
from rebind.ops.normed import rms_norm

NON_NEGATIVE = ("elu+1", "relu", "dpfp", "favor")  # features that a sum can normalise


class Normaliser(ABC):
    """φ and scale in one. Subclasses with a `name` are found by `get_normaliser`."""

    name: ClassVar[str]
    rows: ClassVar[int] = 0  # rows that the memory holds besides the values'
    signed: ClassVar[bool] = True  # whether features may be negative
    paired: ClassVar[bool] = False  # whether keys and queries are brought to scale as one: alike, and worth a copy
    _known: ClassVar[dict[str, type[Normaliser]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Normaliser._known[cls.name] = cls

    @abstractmethod
    def key(self, feature: Feature, k: Tensor) -> Tensor:
        """What is written at: [..., dim] → [..., width]."""

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        """What reads: [..., dim] → [..., width]."""
        return self.key(feature, q)

    def value(self, v: Tensor) -> Tensor:
        """What is written: [..., d_v] → [..., d_v + rows]."""
        return v

    def read(self, out: Tensor) -> Tensor:
        """What the memory's answer [..., d_v + rows] means: [..., d_v]."""
        return out

    def check(self, feature: Feature) -> None:
        """Refuse a feature that this cannot normalise. A user's own is looked at when it runs."""
        if not self.signed and feature.name == "identity":
            raise InputError(
                f"normaliser {self.name!r} got feature 'identity', expected one that is never negative "
                f"({', '.join(NON_NEGATIVE)}): choose one of these, or normalise by 'l2'"
            )


@dataclass(frozen=True)
class Plain(Normaliser):
    """φ(k) and φ(q) as they are."""

    name = "plain"

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        return feature(k)


@dataclass(frozen=True)
class L2(Normaliser):
    """φ(k)/‖φ(k)‖ and φ(q)/‖φ(q)‖: a delta write at β = 1 then replaces exactly. What DeltaNets use today."""

    name = "l2"

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        return unit(feature(k))


@dataclass(frozen=True)
class Sum(Normaliser):
    """φ(k)/Σφ(k) and φ(q)/Σφ(q) (Schlag et al. section 4.2, A.2): what a delta write adds, it also removes."""

    name = "sum"
    signed = False
    paired = True

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        phi = feature.up_to_scale(k.to(working_dtype(k)))
        if phi.device.type == "cpu":  # a GPU is not waited for
            require_non_negative(phi)
        return share(phi).to(k.dtype)


@dataclass(frozen=True)
class Attention(Normaliser):
    """Reads divided by z·φ(q), z = Σφ(k) (Schlag et al. eq. 18 and 19): weights that sum to 1, as softmax's do.

    z is one more row of the memory, written with the value 1. `eps` is added to the denominator (as in the paper's
    code): sparse features may share no direction at all with what was written, and the answer is then 0.
    """

    eps: float = 1e-6

    name = "attention"
    rows = 1
    signed = False

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        return feature(k.to(working_dtype(k)))  # half precision would round the sum of T terms

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        return feature.up_to_scale(q.to(working_dtype(q)))  # a query's scale cancels

    def value(self, v: Tensor) -> Tensor:
        wide = v.to(working_dtype(v))
        return torch.cat([wide, wide.new_ones((*v.shape[:-1], 1))], dim=-1)

    def read(self, out: Tensor) -> Tensor:
        read, total = out.split([out.shape[-1] - 1, 1], dim=-1)
        return read / (total + self.eps)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖, computed in float32 or better: RMSNorm with the weight 1/√width.

    A row of zeros stays zero. So that its gradient stays bounded, so does in part a row with entries below the machine
    epsilon, 1e-7 in float32.
    """
    least: float = torch.finfo(working_dtype(x)).eps
    return rms_norm(x, x.shape[-1] ** -0.5, least**2)


def share(x: Tensor) -> Tensor:
    """x / Σx for x of 0 and more; a row of zeros stays zero."""
    total = x.sum(-1, keepdim=True)
    return x / (total + (total == 0))


def get_normaliser(name: str | Normaliser) -> Normaliser:
    """The normaliser of that name; an object passes through."""
    if isinstance(name, Normaliser):
        return name
    if not isinstance(name, str) or name not in Normaliser._known:
        raise unknown_name("normaliser", name, Normaliser._known)
    return Normaliser._known[name]()
