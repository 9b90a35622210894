"""Feature maps inside layers: φ as a module, and how φ(k), φ(q) and reads are normalized.

A layer normalizes at every token, so the functions here use few operations, where `rebind.memory.features` divides by
the largest entry first. In float32 and bfloat16 entries may be as large as 1e18; beyond that, sums of squares overflow.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.features import Dpfp, Favor, Feature, get_feature, require_non_negative
from rebind.memory.precision import working_dtype
from rebind.ops import rms_norm
from rebind.precision import without_autocast


class FeatureMap(nn.Module):
    """φ with its normalizer, for keys `d_k` wide. Tensors of the feature (FAVOR+'s projection) become buffers."""

    def __init__(self, feature: str | Feature, normalizer: str | Normalizer, d_k: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # transformers loads checkpoints on "meta", where nothing can be drawn
            self._feature = copy.copy(get_feature(feature, d_k))
        self.normalizer = get_normalizer(normalizer)
        if self._feature.name == "identity" and not self.normalizer.allows_negative:
            raise InputError(
                f"Normalizer {self.normalizer.name!r} cannot be used with feature 'identity'",
                expected="a feature that is never negative: elu+1, relu, dpfp or favor",
                code="feature_may_be_negative",
            )
        self._buffer_names = tuple(self._feature.state)
        for name, tensor in self._feature.state.items():
            self.register_buffer(name, tensor.to(torch.get_default_dtype()))

    @property
    def feature(self) -> Feature:
        """φ with the buffers as they are now: on this device, from this checkpoint."""
        for name in self._buffer_names:
            setattr(self._feature, name, getattr(self, name))
        return self._feature

    @property
    def width(self) -> int:
        """Width of φ(k)."""
        return self._feature.width

    def key(self, k: Tensor) -> Tensor:
        with without_autocast(k):
            return self.normalizer.key(self.feature, k)

    def query(self, q: Tensor) -> Tensor:
        with without_autocast(q):
            return self.normalizer.query(self.feature, q)

    def extra_repr(self) -> str:
        return f"{self.feature!r}, {self.normalizer!r}"


def build_feature(name: str, d_k: int, *, dpfp_nu: int, favor_features: int) -> Feature:
    """Return the feature map that models call "identity", "linear" (elu+1), "performer" (FAVOR+) or "dpfp"."""
    if name == "performer":
        with torch.device("cpu"):  # as in FeatureMap
            return Favor(d_k, m=favor_features)
    return Dpfp(d_k, nu=dpfp_nu) if name == "dpfp" else get_feature({"linear": "elu+1"}.get(name, name), d_k)


class Normalizer:
    """Scales the key that is written, the query that reads, and the read itself."""

    name: ClassVar[str]
    extra_rows: ClassVar[int] = 0  # rows of the memory besides those of the values
    allows_negative: ClassVar[bool] = True  # whether features may have negative entries

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        """Return the key to write at: [..., d_k] → [..., width of φ]."""
        return feature(k)

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        """Return the query to read with: [..., d_k] → [..., width of φ]."""
        return self.key(feature, q)

    def value(self, v: Tensor) -> Tensor:
        """Return the value to write: [..., d_v] → [..., d_v + extra_rows]."""
        return v

    def read(self, out: Tensor) -> Tensor:
        """Return the result of a read [..., d_v + extra_rows]: [..., d_v]."""
        return out


@dataclass(frozen=True)
class NoNormalizer(Normalizer):
    """Uses φ(k) unscaled, and φ(q) times `query_scale`."""

    query_scale: float = 1.0

    name = "none"

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        return feature(q) if self.query_scale == 1 else feature(q) * self.query_scale


@dataclass(frozen=True)
class L2Normalizer(Normalizer):
    """Scales to φ(k)/‖φ(k)‖ and φ(q)/‖φ(q)‖, so that a delta write with β = 1 replaces exactly. Usual in DeltaNets.

    Args:
        eps: Added to ‖φ(k)‖² (published models have 1e-6). None: enough to bound the gradient, with which rows of
            entries below the machine epsilon (1e-7 in float32) come out shorter than 1. Rows of zeros stay zero.
        query_scale: The norm of queries. Published models have d_k^−½.
    """

    eps: float | None = None
    query_scale: float = 1.0

    name = "l2"

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        return self._unit(feature(k))

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        return self._unit(feature(q), self.query_scale)

    def _unit(self, phi: Tensor, norm: float = 1.0) -> Tensor:
        width = phi.shape[-1]
        eps = torch.finfo(working_dtype(phi)).eps ** 2 if self.eps is None else self.eps / width
        return rms_norm(phi, norm * width**-0.5, eps)  # the weight 1/√width makes the norm 1


@dataclass(frozen=True)
class SumNormalizer(Normalizer):
    """Scales to φ(k)/Σφ(k) and φ(q)/Σφ(q) (Schlag et al. section 4.2, A.2): a delta write removes what it adds."""

    name = "sum"
    allows_negative = False

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        phi = feature.up_to_scale(k.to(working_dtype(k)))
        if phi.device.type == "cpu":  # on a GPU the check would wait for the device
            require_non_negative(phi)
        total = phi.sum(-1, keepdim=True)
        return (phi / (total + (total == 0))).to(k.dtype)  # rows of zeros stay zero


@dataclass(frozen=True)
class AttentionNormalizer(Normalizer):
    """Divides reads by z·φ(q) with z = Σφ(k) (Schlag et al. eq. 18 and 19): weights that sum to 1, as in softmax.

    z is one more row of the memory, written with the value 1. `eps` is added to the denominator (as in the paper's
    code): sparse features may share no direction with any key that was written, and the read is then 0.
    """

    eps: float = 1e-6

    name = "attention"
    extra_rows = 1
    allows_negative = False

    def key(self, feature: Feature, k: Tensor) -> Tensor:
        return feature(k.to(working_dtype(k)))  # half precision would round the sum of T terms

    def query(self, feature: Feature, q: Tensor) -> Tensor:
        return feature.up_to_scale(q.to(working_dtype(q)))  # the scale of a query cancels

    def value(self, v: Tensor) -> Tensor:
        wide = v.to(working_dtype(v))
        return torch.cat([wide, wide.new_ones((*v.shape[:-1], 1))], dim=-1)

    def read(self, out: Tensor) -> Tensor:
        read, total = out.split([out.shape[-1] - 1, 1], dim=-1)
        return read / (total + self.eps)


NORMALIZERS: dict[str, type[Normalizer]] = {
    normalizer.name: normalizer for normalizer in (NoNormalizer, L2Normalizer, SumNormalizer, AttentionNormalizer)
}


def get_normalizer(name: str | Normalizer) -> Normalizer:
    """Return the normalizer of that name; an object passes through."""
    if isinstance(name, Normalizer):
        return name
    if name not in NORMALIZERS:
        raise unknown_name("normalizer", name, NORMALIZERS)
    return NORMALIZERS[name]()
