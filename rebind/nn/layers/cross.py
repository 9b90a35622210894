"""Fast weights between two sequences: the encoder's keys and values are written once, the decoder reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rebind.errors import ShapeError
from rebind.memory.features import Feature
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import head_width, require_mask, require_positive
from rebind.nn.layers.fast_weight import FastWeightState
from rebind.nn.parts.feature_map import FeatureMap
from rebind.nn.parts.norm import RMSNorm
from rebind.nn.parts.normalizers import Normaliser
from rebind.nn.parts.padding import cleared
from rebind.precision import without_autocast


class CrossFastWeight(nn.Module):
    """W = Σ v φ(k)ᵀ over the source, W φ(q) for every target: non-causal linear attention.

    However long the source, the decoder reads a matrix [value_dim, width of φ(k)] a head.

    Args:
        dim: Width of the targets, and of what comes out.
        heads: Memories.
        source_dim: Width of the source. None: dim.
        feature: φ, for keys `key_dim` wide.
        normalise: As in `FastWeight`; by default reads are divided by z·φ(q), as softmax's would be.
        key_dim: A head's keys and queries, before φ. None: dim / heads.
        value_dim: A head's values. None: dim / heads.
        norm: Whether each head's read goes through RMSNorm.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        source_dim: int | None = None,
        feature: str | Feature = "elu+1",
        normalise: str | Normaliser = "attention",
        key_dim: int | None = None,
        value_dim: int | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__()
        require_positive(dim=dim)
        self.dim, self.source_dim, self.heads = dim, dim if source_dim is None else source_dim, heads
        self.key_dim = head_width("key_dim", dim, heads, key_dim)
        self.value_dim = head_width("value_dim", dim, heads, value_dim)
        self.phi = FeatureMap(feature, normalise, self.key_dim)
        self.q_proj = nn.Linear(dim, heads * self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.source_dim, heads * self.key_dim, bias=False)
        self.v_proj = nn.Linear(self.source_dim, heads * self.value_dim, bias=False)
        self.norm = RMSNorm(self.value_dim) if norm else None
        self.o_proj = nn.Linear(heads * self.value_dim, dim, bias=False)

    @property
    def state_size(self) -> int:
        """Heads × width of φ(k) × value_dim."""
        return self.heads * self.phi.width * self.value_dim

    def write(self, source: Tensor, mask: Tensor | None = None) -> FastWeightState:
        """The memory of a source [B, S, source_dim]; `mask` [B, S] is true for real tokens."""
        _require_sequence("source", source, self.source_dim)
        require_mask(mask, source)
        k = self.k_proj(source).unflatten(-1, (self.heads, self.key_dim))
        v = self.v_proj(source).unflatten(-1, (self.heads, self.value_dim))
        with without_autocast(v):
            k, v = cleared(self.phi.key(k), mask), self.phi.normalise.value(v)
            wide = working_dtype(v)
            return FastWeightState(torch.einsum("bshv,bshk->bhvk", v.to(wide), k.to(wide)))

    def forward(self, x: Tensor, state: FastWeightState) -> Tensor:
        """What targets x [B, T, dim] read, [B, T, dim]; the memory stays as it is."""
        _require_sequence("x", x, self.dim)
        if len(state.memory) != len(x):
            raise ShapeError(
                f"x holds {len(x)} sequences and the state {len(state.memory)}, expected as many: write the sources "
                f"that belong to these targets, or choose rows with state.select"
            )
        q = self.q_proj(x).unflatten(-1, (self.heads, self.key_dim))
        with without_autocast(q):
            out = torch.einsum("bhvk,bthk->bthv", state.memory, self.phi.query(q).to(state.memory.dtype))
            read = self.phi.normalise.read(out)
        if self.norm is not None:
            read = self.norm(read)
        return self.o_proj(read.flatten(-2).to(x.dtype))


def _require_sequence(name: str, x: Tensor, width: int) -> None:
    if x.ndim != 3 or x.shape[-1] != width:
        raise ShapeError(f"{name} is {list(x.shape)}, expected [B, T, {width}]: this layer was made for that width")
