"""One write: retain the memory, then correct what it would have answered.

    W~ = retain · W diag(d)
    W' = W~ + (V − K W~ᵀ)ᵀ G

Rows of K probe the memory, rows of V are the answers it should have given, and rows of G (the *gain*) are the
directions along which each row's error is written; d is a factor per key channel, which most writes do without. Every
rule and every closed form in rebind is a choice of K, G, d and `retain`.

Multiplied out, a write is an affine map of the memory,

    W' = W A + B,   A = retain · diag(d) (I − KᵀG),   B = VᵀG,

which is why writes compose, and why a write can be undone exactly when A can be inverted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.errors import NumericalError, ShapeError
from rebind.memory.checks import known, require_broadcastable, require_finite, require_tensors, require_width
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import common_dtype, solving_dtype, working_dtype
from rebind.memory.solve import Solution


@dataclass(frozen=True, eq=False, init=False)
class Write:
    """`W ↦ W~ + (V − K W~ᵀ)ᵀ G` with `W~ = retain · W diag(channels)`, batched over leading dimensions."""

    keys: Tensor  # [..., n, d_k]
    values: Tensor  # [..., n, d_v]
    gain: Tensor  # [..., n, d_k]
    retain: float | Tensor  # a number, or one per batch entry: [...]
    channels: Tensor | None  # d [..., d_k]; None: ones

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        gain: Tensor | Solution,
        retain: float | Tensor = 1.0,
        channels: Tensor | None = None,
    ) -> None:
        """Check that the parts fit together. The gain may be the `Solution` of a closed form."""
        gain = gain.value if isinstance(gain, Solution) else gain
        parts = {"keys": keys, "values": values, "gain": gain, "retain": retain, "channels": channels}
        for name, part in parts.items():
            object.__setattr__(self, name, part)  # the dataclass is frozen
        require_tensors(2, keys=keys, values=values, gain=gain)
        require_width("gain", gain, self.d_k, "a write with these keys")
        if not keys.shape[-2] == values.shape[-2] == gain.shape[-2]:
            problem = f"There are {keys.shape[-2]} keys, {values.shape[-2]} values and {gain.shape[-2]} rows of gain"
            raise ShapeError(problem, expected="as many of each", code="row_counts_differ")
        if isinstance(retain, Tensor):
            require_tensors(0, retain=retain)
        if channels is not None:
            require_tensors(1, channels=channels)
            require_width("channels", channels, self.d_k, "a write with these keys")
            require_finite(channels=channels)
        require_broadcastable("keys, values, gain and retain", *self._leading_shapes())
        require_finite(keys=keys, values=values, gain=gain, retain=torch.as_tensor(retain))

    @classmethod
    def identity(
        cls, d_k: int, d_v: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Write:
        """Return the write of no rows, which changes nothing."""
        empty = torch.empty(0, d_k, dtype=dtype, device=device)
        return cls(empty, empty.new_empty(0, d_v), empty)

    @property
    def rows(self) -> int:
        return self.keys.shape[-2]

    @property
    def d_k(self) -> int:
        return self.keys.shape[-1]

    @property
    def d_v(self) -> int:
        return self.values.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*self._leading_shapes())

    def apply(self, memory: Tensor) -> Tensor:
        """Return the memory after the write, in the memory's dtype."""
        retained = self._retained(memory)
        return (retained + self._error(retained).mT @ self.gain.to(retained.dtype)).to(memory.dtype)

    def delta(self, memory: Tensor) -> LowRank:
        """Return what `apply` would add to the memory.

        With `retain` left at the number 1 the change has one row for each row of the write. Any other `retain` also
        shrinks the memory itself, which takes min(d_v, d_k) more rows.
        """
        retained = self._retained(memory)
        left, right = self._error(retained).mT, self.gain.to(retained.dtype)
        if isinstance(self.retain, Tensor) or self.retain != 1.0 or self.channels is not None:
            eye = torch.eye(min(self.d_v, self.d_k), dtype=retained.dtype, device=memory.device)
            shrinkage = retained - memory.to(retained.dtype)  # W~ − W
            wide = self.d_v <= self.d_k
            left = concatenate(left, eye if wide else shrinkage, dim=-1)
            right = concatenate(right, shrinkage if wide else eye, dim=-2)
        out = common_dtype(memory, *self.tensors())
        return LowRank(left.to(out), right.to(out))

    def __matmul__(self, earlier: Write) -> Write:
        """Return `later @ earlier`: one write that does the earlier one first, then the later one.

        (I − K₁ᵀG₁)(I − K₂ᵀG₂) = I − [K₁; K₂]ᵀ [G₁ − (G₁K₂ᵀ)G₂; G₂]: the rows stack, the earlier gain is corrected
        for what the later keys read of it, and the earlier values fade by the later `retain`. Nothing is divided by,
        so `retain = 0` composes too. With channels d₂ the earlier keys probe what these leave: they are divided by d₂,
        which must not be zero where they are not, and the earlier gain is multiplied by it.
        """
        if not isinstance(earlier, Write):
            return NotImplemented
        if (earlier.d_k, earlier.d_v) != (self.d_k, self.d_v):
            problem = f"One write has d_k = {self.d_k} and d_v = {self.d_v}, the other {earlier.d_k} and {earlier.d_v}"
            raise ShapeError(problem, expected="two writes to the same memory", code="writes_do_not_match")
        require_broadcastable("the two writes", self.batch_shape, earlier.batch_shape)
        dtype = self._working_dtype(*earlier.tensors())
        early_keys, early_gain, late_gain = earlier.keys, earlier.gain.to(dtype), self.gain.to(dtype)
        if self.channels is not None:
            early_keys = self._divide(early_keys.to(dtype))
            early_gain = early_gain * self.channels.to(dtype).unsqueeze(-2)
        corrected = early_gain - (early_gain @ self.keys.to(dtype).mT) @ late_gain
        # The product of retains stays in the working dtype: long products of half-precision numbers drift.
        late, early = (r.to(dtype) if isinstance(r, Tensor) else r for r in (self.retain, earlier.retain))
        out = common_dtype(*self.tensors(), *earlier.tensors())
        return Write(
            keys=concatenate(early_keys, self.keys, dim=-2).to(out),
            values=concatenate(self._scale(earlier.values.to(dtype), dtype), self.values, dim=-2).to(out),
            gain=concatenate(corrected, late_gain, dim=-2).to(out),
            retain=late * early,
            channels=_product(self.channels, earlier.channels),
        )

    def compact(self) -> Write:
        """Return the same map in at most d_k rows: gain I, keys GᵀK, values GᵀV."""
        if self.rows <= self.d_k:
            return self
        dtype = self._working_dtype()
        out = common_dtype(*self.tensors())
        transposed = self.gain.to(dtype).mT
        keys = (transposed @ self.keys.to(dtype)).to(out)
        values = (transposed @ self.values.to(dtype)).to(out)
        return Write(keys, values, torch.eye(self.d_k, dtype=out, device=keys.device), self.retain, self.channels)

    def inverse(self) -> Write:
        """Return the write that undoes this one, from its result alone.

        (I − KᵀG)⁻¹ = I + KᵀSG with S = (I − GKᵀ)⁻¹, an n×n system. It is singular exactly when the write erases
        something: a delta write with β‖k‖² = 1 leaves no trace of the old value.
        """
        dtype = solving_dtype(self.keys)
        retain = torch.as_tensor(self.retain, dtype=dtype, device=self.keys.device)
        if known((retain == 0).any()):
            problem = "The write retains nothing of the memory, so it cannot be undone from its result"
            raise NumericalError(problem, advice="Keep a copy of the memory", code="write_forgets_everything")
        gain, keys = self.gain.to(dtype), self.keys.to(dtype)
        read = gain @ keys.mT  # what each row's key reads of each row's gain
        system = torch.eye(self.rows, dtype=dtype, device=keys.device) - read
        factor, pivots, _ = torch.linalg.lu_factor_ex(system)
        pivot = factor.diagonal(dim1=-2, dim2=-1).abs()
        # I − GKᵀ is known to the precision of the write's own tensors; a pivot near that is noise, however
        # small the rest of the matrix is.
        noise = torch.finfo(common_dtype(*self.tensors())).eps ** (2 / 3)
        floor = noise * (1 + torch.linalg.matrix_norm(read, ord=float("inf"))) if self.rows else pivot.new_zeros(())
        if known((pivot <= floor.unsqueeze(-1)).any()):
            problem = "The write erases what it overwrites (I − GKᵀ is singular), so it cannot be undone"
            raise NumericalError(problem, advice="Keep a copy of the memory", code="write_erases")
        undo = -torch.linalg.lu_solve(factor, pivots, expand_batch(gain, system))
        if self.channels is not None:
            undo, keys = self._divide(undo), keys * self.channels.to(dtype).unsqueeze(-2)
        out = common_dtype(*self.tensors())
        return Write(
            keys=keys.to(out),
            values=(self.values.to(dtype) / retain[..., None, None]).to(out),
            gain=undo.to(out),
            retain=1.0 / self.retain,
            channels=None if self.channels is None else 1.0 / self.channels,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and gain."""
        return self.keys, self.values, self.gain

    def _leading_shapes(self) -> list[torch.Size]:
        shapes = [tensor.shape[:-2] for tensor in self.tensors()]
        if self.channels is not None:
            shapes.append(self.channels.shape[:-1])
        return [*shapes, self.retain.shape] if isinstance(self.retain, Tensor) else shapes

    def _working_dtype(self, *others: Tensor) -> torch.dtype:
        return working_dtype(*self.tensors(), *others)

    def _scale(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `retain · tensor` for a tensor of matrices."""
        if isinstance(self.retain, Tensor):
            return self.retain.to(dtype)[..., None, None] * tensor
        return tensor if self.retain == 1.0 else self.retain * tensor

    def _divide(self, rows: Tensor) -> Tensor:
        """Return rows [..., n, d_k] over the channels; a zero over a zero is zero."""
        assert self.channels is not None
        channels = self.channels.to(rows.dtype).unsqueeze(-2)
        gone = channels == 0
        if known((gone & (rows != 0)).any()):
            problem = "The write forgets channels of the memory that would have to be read after it"
            advice = "Apply the writes one after another, or keep a copy of the memory"
            raise NumericalError(problem, advice=advice, code="write_forgets_everything")
        return rows / channels.where(~gone, 1.0)

    def _error(self, retained: Tensor) -> Tensor:
        """Return what the retained memory should have answered, less what it answers: [..., n, d_v]."""
        return self.values.to(retained.dtype) - self.keys.to(retained.dtype) @ retained.mT

    def _retained(self, memory: Tensor) -> Tensor:
        """Check that a memory fits; return what is retained of it, in the working dtype."""
        require_tensors(2, memory=memory)
        if memory.shape[-2:] != (self.d_v, self.d_k):
            problem = f"The memory has shape {list(memory.shape)}"
            expected = f"[d_v, d_k] = [{self.d_v}, {self.d_k}], as this write has"
            advice = "Pass the matrix that these keys enter, transposed if its layer stores [in, out]"
            raise ShapeError(problem, expected=expected, advice=advice, code="memory_does_not_match")
        require_broadcastable("the memory and the write", memory.shape[:-2], self.batch_shape)
        require_finite(memory=memory)
        dtype = self._working_dtype(memory)
        retained = self._scale(memory.to(dtype), dtype)
        return retained if self.channels is None else retained * self.channels.to(dtype).unsqueeze(-2)


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the product of two factors, either of which may be None for 1."""
    return first if second is None else second if first is None else first * second


def expand_batch(tensor: Tensor, like: Tensor) -> Tensor:
    """Expand the leading dimensions of a matrix to those that it has in common with `like`."""
    shape = torch.broadcast_shapes(tensor.shape[:-2], like.shape[:-2])
    return tensor.expand(*shape, *tensor.shape[-2:])


def concatenate(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """Concatenate as `torch.cat`, with leading dimensions broadcast and dtypes promoted."""
    dtype = common_dtype(first, second)
    return torch.cat([expand_batch(first, second).to(dtype), expand_batch(second, first).to(dtype)], dim=dim)
