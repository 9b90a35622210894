"""What a scan is given, and every question asked of it before anything is computed.

Shapes are always checked: they are known on the host. Values are looked at only where that is free
(`cu_seqlens` on a CPU) or asked for: with REBIND_DEBUG=1 in the environment every call also looks for NaN,
growing decay and bad boundaries, on a GPU too, where looking waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known, require_finite, require_tensors
from rebind.memory.precision import working_dtype

DEBUG = os.environ.get("REBIND_DEBUG", "0") not in ("", "0")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Everything a backend needs to run one scan; `checked` makes one that holds together.

    With `cu_seqlens` the batch is one row of N sequences laid end to end, sequence n being the tokens
    cu_seqlens[n] to cu_seqlens[n + 1]; without it every row is a sequence and N = B.
    """

    q: Tensor  # [B, T, Hk, Dk]
    k: Tensor  # [B, T, Hk, Dk]; value head h reads and writes with key head h // (H // Hk)
    v: Tensor  # [B, T, H, Dv]
    log_decay: Tensor | None = None  # [B, T, H] ln α ≤ 0, −inf included; None: α = 1
    erase: Tensor | None = None  # [B, T, H] ε; None: 0
    write: Tensor | None = None  # [B, T, H] η; None: 1
    state: Tensor | None = None  # [N, H, Dv, Dk] in the working dtype; None: zeros
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64
    chunk: int | None = None  # tokens a chunk; None: the backend's choice
    mini_batch: int | None = None  # tokens that read the memory as it was at the first of them; None: 1
    keep: bool = False  # whether a backward pass may follow: only then is anything saved for it

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What gradients are taken of, in the order of the fields."""
        return self.q, self.k, self.v, self.log_decay, self.erase, self.write, self.state

    def replaced(self, tensors: Sequence[Tensor | None]) -> Inputs:
        """The same scan of other tensors, in the order of `tensors`."""
        rest: list[Any] = [self.cu_seqlens, self.chunk, self.mini_batch, self.keep]
        return Inputs(*[*tensors, *rest])

    @property
    def length(self) -> int:
        """T: tokens a row."""
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        """H: value heads."""
        return self.v.shape[2]

    @property
    def sharing(self) -> int:
        """How many value heads share a key head."""
        return self.v.shape[2] // self.k.shape[2] if self.k.shape[2] else 1

    @property
    def sequences(self) -> int:
        """N: how many states there are."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.v.shape[2], self.v.shape[3], self.k.shape[3]

    @property
    def working(self) -> torch.dtype:
        """What is accumulated in, and what the state is kept in: at least float32."""
        return working_dtype(self.v)


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    mini_batch: int | None = None,
) -> Inputs:
    """The inputs, once everything fits; coefficients contiguous, the state in the working dtype."""
    _check_sequences(q, k, v)
    _check_size("chunk", chunk, "64 suits most sizes")
    _check_size("mini_batch", mini_batch, "1 is one step a token")
    if mini_batch is not None and log_decay is not None:
        raise InputError(
            "got both log_decay and mini_batch, expected one of them: the tokens of a mini-batch share one memory, "
            "which has no decay between them; leave log_decay out"
        )
    if mini_batch is not None and chunk is not None:
        raise InputError(
            f"got chunk={chunk} and mini_batch={mini_batch}, expected one of them: a mini-batch is the chunk"
        )
    for name, coefficient in (("log_decay", log_decay), ("erase", erase), ("write", write)):
        if coefficient is not None:
            _check_coefficient(name, coefficient, v)
    if cu_seqlens is not None:
        _check_boundaries(cu_seqlens, q)
    if state is not None:
        _check_state(state, q, k, v, cu_seqlens)
    if DEBUG:
        check_values(q=q, k=k, v=v, log_decay=log_decay, erase=erase, write=write, state=state)
    return Inputs(
        q,
        k,
        v,
        None if log_decay is None else log_decay.contiguous(),
        None if erase is None else erase.contiguous(),
        None if write is None else write.contiguous(),
        None if state is None else state.to(working_dtype(v)).contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chunk,
        mini_batch,
    )


def check_values(**tensors: Tensor | None) -> None:
    """Look for NaN and infinities, and for a decay that grows: what `REBIND_DEBUG=1` asks of every call."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        values = tensor.detach()
        if name == "log_decay":
            if known((values > 0).any()):
                raise InputError(
                    f"log_decay reaches {values.max():.3g}, expected ln α ≤ 0: pass the logarithm of a decay "
                    f"between 0 and 1, for example -softplus(x)"
                )
            values = values.masked_fill(values == float("-inf"), 0.0)  # forgetting everything is allowed
        require_finite(**{name: values})


def _check_sequences(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, shape in (("q", q, "[B, T, Hk, Dk]"), ("k", k, "[B, T, Hk, Dk]"), ("v", v, "[B, T, H, Dv]")):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}, expected a tensor {shape}: use torch.as_tensor")
        if tensor.ndim != 4:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, expected {shape}: put the heads in their own dimension"
            )
        if tensor.dtype not in DTYPES:
            raise InputError(
                f"{name} has dtype {tensor.dtype}, expected float64, float32, bfloat16 or float16: convert it, "
                f"for example with {name}.float()"
            )
    if q.shape != k.shape:
        raise ShapeError(
            f"q is {list(q.shape)} and k {list(k.shape)}, expected the same shape [B, T, Hk, Dk]: queries address "
            f"what keys have written"
        )
    if v.shape[:2] != k.shape[:2]:
        raise ShapeError(
            f"v is {list(v.shape)} and k {list(k.shape)}, expected the same batch and length: one key and one value "
            f"make a write"
        )
    if k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        raise ShapeError(
            f"v has {v.shape[2]} heads and k {k.shape[2]}, expected a multiple of k's: each key head serves equally "
            f"many value heads"
        )
    if k.shape[3] == 0 or v.shape[3] == 0:
        raise ShapeError(f"keys are {k.shape[3]} and values {v.shape[3]} wide, expected 1 or more: check the split")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InputError(
                f"{name} has dtype {tensor.dtype} and q {q.dtype}, expected one dtype: convert {name} with "
                f"{name}.to(q.dtype)"
            )
        _check_device(name, tensor, q)


def _check_coefficient(name: str, coefficient: Tensor, v: Tensor) -> None:
    if not isinstance(coefficient, Tensor):
        raise InputError(
            f"{name} is a {type(coefficient).__name__}, expected a tensor [B, T, H]: for a constant use "
            f"torch.full(v.shape[:3], x), or leave {name} out"
        )
    require_tensors(0, **{name: coefficient})
    if coefficient.shape != v.shape[:3]:
        raise ShapeError(
            f"{name} is {list(coefficient.shape)}, expected one number a token and value head, {list(v.shape[:3])}: "
            f"expand it, for example with {name}.expand(v.shape[:3])"
        )
    _check_device(name, coefficient, v)


def _check_state(state: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    if not isinstance(state, Tensor):
        raise InputError(f"state is a {type(state).__name__}, expected a tensor [N, H, Dv, Dk]: pass the one returned")
    require_tensors(0, state=state)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = (sequences, v.shape[2], v.shape[3], k.shape[3])
    if tuple(state.shape) != expected:
        raise ShapeError(
            f"state is {list(state.shape)}, expected one [Dv, Dk] matrix a sequence and value head, "
            f"{list(expected)}: pass the state that a scan of these widths returned"
        )
    _check_device("state", state, q)


def _check_boundaries(cu_seqlens: Tensor, q: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor):
        raise InputError(
            f"cu_seqlens is a {type(cu_seqlens).__name__}, expected an integer tensor [N + 1]: use torch.tensor"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"cu_seqlens has dtype {cu_seqlens.dtype}, expected int32 or int64: use cu_seqlens.long()")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [N + 1]: the boundaries 0, …, T of N sequences"
        )
    if q.shape[0] != 1:
        raise ShapeError(
            f"got cu_seqlens and a batch of {q.shape[0]}, expected a batch of 1: packed sequences lie end to end in "
            f"one row; flatten them with x.flatten(0, 1).unsqueeze(0)"
        )
    _check_device("cu_seqlens", cu_seqlens, q)
    if not torch.compiler.is_compiling() and (DEBUG or cu_seqlens.device.type == "cpu"):
        check_boundary_values(cu_seqlens.tolist(), q.shape[1])


def check_boundary_values(boundaries: list[int], length: int) -> None:
    """Boundaries begin at 0, never go back, and end at the last token."""
    if boundaries[0] != 0 or boundaries[-1] != length:
        raise InputError(
            f"cu_seqlens runs from {boundaries[0]} to {boundaries[-1]}, expected 0 to {length}, the tokens there are: "
            f"cumulate the lengths from 0"
        )
    for index, (begin, end) in enumerate(pairwise(boundaries)):
        if end < begin:
            raise InputError(
                f"cu_seqlens falls from {begin} to {end} at entry {index + 1}, expected boundaries that never go "
                f"back: cumulate the lengths, all 0 or more"
            )


def _check_size(name: str, size: int | None, hint: str) -> None:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise InputError(f"{name} is {size!r}, expected a whole number of 1 or more: {hint}")


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise InputError(
            f"{name} is on {tensor.device} and the other tensors on {like.device}, expected one device: move it with "
            f"{name}.to({str(like.device)!r})"
        )
