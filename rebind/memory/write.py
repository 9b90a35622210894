"""One write: retain the memory, then correct what it would have answered.

    W~ = retain · W
    W' = W~ + (V − K W~ᵀ)ᵀ G

Rows of K are the questions put to the memory, rows of V the answers it should have given, rows
of G (the *gain*) the directions along which each row's error is written. Every rule and every
closed form in rebind differs from the others in K, G and `retain` alone.

Multiplied out, a write is an affine map of the memory,

    W' = W A + B,   A = retain · (I − KᵀG),   B = VᵀG,

which is why writes compose, and why a write can be undone exactly when A can be inverted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.checks import (
    known,
    require_broadcastable,
    require_finite,
    require_floating,
    require_rank,
    require_width,
)
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import common_dtype, solving_dtype, working_dtype


@dataclass(frozen=True, eq=False)
class Write:
    """`W ↦ retain·W + (V − K·retain·Wᵀ)ᵀ G`, batched over leading dimensions."""

    keys: Tensor  # [..., n, d_k]
    values: Tensor  # [..., n, d_v]
    gain: Tensor  # [..., n, d_k]
    retain: float | Tensor = 1.0  # a number, or one a batch entry: [...]

    def __post_init__(self) -> None:
        tensors = {"keys": self.keys, "values": self.values, "gain": self.gain}
        require_rank(2, **tensors)
        require_floating(**tensors)
        require_width("gain", self.gain, self.d_k, "a write with these keys")
        rows = {name: tensor.shape[-2] for name, tensor in tensors.items()}
        if len(set(rows.values())) > 1:
            raise ShapeError(
                f"got {', '.join(f'{n} rows of {name}' for name, n in rows.items())}, expected as many of "
                f"each: one key, one value and one gain make a row"
            )
        retain = _as_retain(self.retain)
        require_broadcastable("keys, values, gain and retain", *self._leading_shapes())
        require_finite(**tensors, retain=retain)

    @classmethod
    def identity(
        cls, d_k: int, d_v: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Write:
        """The write of no rows: it changes nothing, and composing with it changes nothing."""
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
        """The memory after the write, in the memory's dtype."""
        self._check_memory(memory)
        dtype = self._working_dtype(memory)
        kept = self._scale(memory.to(dtype), dtype)
        return (kept + self._error(kept).mT @ self.gain.to(dtype)).to(memory.dtype)

    def delta(self, memory: Tensor) -> LowRank:
        """What `apply` would add to the memory.

        With `retain` left at the number 1 the change has one row for each row of the write. Any
        other `retain` also shrinks the memory itself, which takes min(d_v, d_k) more rows.
        """
        self._check_memory(memory)
        dtype = self._working_dtype(memory)
        full = memory.to(dtype)
        kept = self._scale(full, dtype)
        left, right = self._error(kept).mT, self.gain.to(dtype)
        if not self._retains_all():
            eye = torch.eye(min(self.d_v, self.d_k), dtype=dtype, device=memory.device)
            shrunk = kept - full  # (retain − 1) W
            wide = self.d_v <= self.d_k
            left = concatenate(left, eye if wide else shrunk, dim=-1)
            right = concatenate(right, shrunk if wide else eye, dim=-2)
        out = common_dtype(memory, self.keys, self.values, self.gain)
        return LowRank(left.to(out), right.to(out))

    def __matmul__(self, earlier: Write) -> Write:
        """`later @ earlier`: one write that does first the earlier, then the later.

        (I − K₁ᵀG₁)(I − K₂ᵀG₂) = I − [K₁; K₂]ᵀ [G₁ − (G₁K₂ᵀ)G₂; G₂]: the rows stack, the earlier
        gain is corrected for what the later keys read of it, the earlier values fade by the later
        `retain`. Nothing is divided by, so `retain = 0` composes too.
        """
        if not isinstance(earlier, Write):
            return NotImplemented
        if (earlier.d_k, earlier.d_v) != (self.d_k, self.d_v):
            raise ShapeError(
                f"cannot compose a write of keys {self.d_k} and values {self.d_v} wide with one of "
                f"{earlier.d_k} and {earlier.d_v}, expected equal widths: both must address the same memory"
            )
        require_broadcastable("the two writes", self.batch_shape, earlier.batch_shape)
        dtype = self._working_dtype(*earlier.tensors())
        early_gain, late_gain = earlier.gain.to(dtype), self.gain.to(dtype)
        corrected = early_gain - (early_gain @ self.keys.to(dtype).mT) @ late_gain
        out = common_dtype(*self.tensors(), *earlier.tensors())
        return Write(
            keys=concatenate(earlier.keys, self.keys, dim=-2).to(out),
            values=concatenate(self._scale(earlier.values.to(dtype), dtype), self.values, dim=-2).to(out),
            gain=concatenate(corrected, late_gain, dim=-2).to(out),
            retain=_product(self.retain, earlier.retain, dtype),
        )

    def compact(self) -> Write:
        """The same map in at most d_k rows: gain I, keys GᵀK, values GᵀV."""
        if self.rows <= self.d_k:
            return self
        dtype = self._working_dtype()
        out = common_dtype(*self.tensors())
        transposed = self.gain.to(dtype).mT
        keys = (transposed @ self.keys.to(dtype)).to(out)
        values = (transposed @ self.values.to(dtype)).to(out)
        return Write(keys, values, torch.eye(self.d_k, dtype=out, device=keys.device), self.retain)

    def inverse(self) -> Write:
        """The write that undoes this one, from its result alone.

        (I − KᵀG)⁻¹ = I + KᵀSG with S = (I − GKᵀ)⁻¹, an n×n system. It is singular exactly when the
        write erases something: a delta write with β‖k‖² = 1 keeps no trace of the old value.
        """
        dtype = solving_dtype(self.keys)
        retain = torch.as_tensor(self.retain, dtype=dtype, device=self.keys.device)
        if known((retain == 0).any()):
            raise NumericalError("a write with retain = 0 forgets everything: keep the memory it was applied to")
        gain, keys = self.gain.to(dtype), self.keys.to(dtype)
        read = gain @ keys.mT  # what each row's gain shows to each row's key
        system = torch.eye(self.rows, dtype=dtype, device=keys.device) - read
        factor, pivots, _ = torch.linalg.lu_factor_ex(system)
        pivot = factor.diagonal(dim1=-2, dim2=-1).abs()
        # I − GKᵀ is known to the precision of the write's own tensors; a pivot near that is noise, however
        # small the rest of the matrix is.
        noise = torch.finfo(common_dtype(*self.tensors())).eps ** (2 / 3)
        floor = noise * (1 + torch.linalg.matrix_norm(read, ord=float("inf"))) if self.rows else pivot.new_zeros(())
        if known((pivot <= floor.unsqueeze(-1)).any()):
            raise NumericalError(
                "this write erases what it overwrites (I − GKᵀ is singular), so its result alone cannot be "
                "taken back: keep the memory it was applied to"
            )
        undo = -torch.linalg.lu_solve(factor, pivots, expand_rows(gain, system))
        out = common_dtype(*self.tensors())
        return Write(
            keys=self.keys,
            values=(self.values.to(dtype) / retain[..., None, None]).to(out),
            gain=undo.to(out),
            retain=1.0 / self.retain,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.gain

    def _leading_shapes(self) -> list[torch.Size]:
        shapes = [tensor.shape[:-2] for tensor in self.tensors()]
        return shapes if isinstance(self.retain, (int, float)) else [*shapes, self.retain.shape]

    def _working_dtype(self, *others: Tensor) -> torch.dtype:
        return working_dtype(*self.tensors(), *others)

    def _retains_all(self) -> bool:
        return not isinstance(self.retain, Tensor) and self.retain == 1.0

    def _scale(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """`retain · tensor` for a tensor of matrices."""
        if isinstance(self.retain, Tensor):
            return self.retain.to(dtype)[..., None, None] * tensor
        return tensor if self.retain == 1.0 else self.retain * tensor

    def _error(self, kept: Tensor) -> Tensor:
        """What the retained memory should have answered, less what it answers: [..., n, d_v]."""
        return self.values.to(kept.dtype) - self.keys.to(kept.dtype) @ kept.mT

    def _check_memory(self, memory: Tensor) -> None:
        require_rank(2, memory=memory)
        require_floating(memory=memory)
        if memory.shape[-2:] != (self.d_v, self.d_k):
            raise ShapeError(
                f"memory {list(memory.shape)} maps keys {memory.shape[-1]} wide to values {memory.shape[-2]} "
                f"wide, this write has keys {self.d_k} and values {self.d_v} wide: a memory is [d_v, d_k], so "
                f"pass the matrix these keys enter (transposed, if its layer stores [in, out])"
            )
        require_broadcastable("the memory and the write", memory.shape[:-2], self.batch_shape)
        require_finite(memory=memory)


def expand_rows(tensor: Tensor, like: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(tensor.shape[:-2], like.shape[:-2])
    return tensor.expand(*shape, *tensor.shape[-2:])


def concatenate(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """`torch.cat` with the leading dimensions broadcast and the dtypes promoted."""
    dtype = common_dtype(first, second)
    return torch.cat([expand_rows(first, second).to(dtype), expand_rows(second, first).to(dtype)], dim=dim)


def _as_retain(retain: float | Tensor) -> Tensor:
    if isinstance(retain, Tensor):
        require_floating(retain=retain)
        return retain
    if not isinstance(retain, (int, float)):
        raise InputError(f"retain is {retain!r}, expected a number or a tensor: leave it out to keep everything")
    return torch.tensor(float(retain))


def _product(first: float | Tensor, second: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """Of two retains, in the working dtype: long products of half-precision numbers drift."""
    wide = [retain.to(dtype) if isinstance(retain, Tensor) else retain for retain in (first, second)]
    return wide[0] * wide[1]
