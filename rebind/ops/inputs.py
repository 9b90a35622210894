"""The arguments of a scan in one object, and the checks made before anything is computed.

Shapes are always checked: they are known on the host. Values (NaN, infinities, a decay that grows, boundaries that go
back) are read where that costs little, which is on a CPU, and not while compiling. On a GPU reading waits for the
device, and is done only with REBIND_DEBUG=1 in the environment.
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
Gradients = tuple[Tensor | None, ...]  # of `ScanInputs.tensors`; None where the input was None
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ScanInputs:
    """Everything a backend needs to run one scan; `checked` makes one whose parts fit together.

    With `cu_seqlens` the batch is one row of N sequences laid end to end, sequence n being the tokens cu_seqlens[n] to
    cu_seqlens[n + 1]; without it every row is a sequence and N = B.
    """

    q: Tensor  # [B, T, H_k, d_k]
    k: Tensor  # [B, T, H_k, d_k]; value head h reads and writes with key head h // (H // H_k)
    v: Tensor  # [B, T, H, d_v]
    log_decay: Tensor | None = None  # [B, T, H] ln α or [B, T, H, d_k] ln d, ≤ 0, −inf included; None: α = 1
    erase: Tensor | None = None  # [B, T, H] ε; None: 0
    write: Tensor | None = None  # [B, T, H] η; None: 1
    probe: Tensor | None = None  # [B, T, H_k, d_k] p, where something is erased; None: k
    state: Tensor | None = None  # [N, H, d_v, d_k] in the working dtype; None: zeros
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64
    chunk: int | None = None  # tokens per chunk; None: the backend's choice
    mini_batch: int | None = None  # tokens that read the memory as it was before the first of them; None: 1
    probe_before_decay: bool = False  # whether probes read W_{t−1}, not W_{t−1} diag(d_t); then there are probes
    keep: bool = False  # whether a backward pass may follow: only then is anything saved for it

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that have gradients, in the order of the fields."""
        return self.q, self.k, self.v, self.log_decay, self.erase, self.write, self.probe, self.state

    @property
    def options(self) -> tuple[Any, ...]:
        """The fields after `tensors`, in their order: `ScanInputs(*tensors, *options)` is the same scan."""
        return self.cu_seqlens, self.chunk, self.mini_batch, self.probe_before_decay, self.keep

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> ScanInputs:
        """Return the same scan of other tensors, in the order of `tensors`."""
        fields: list[Any] = [*tensors, *self.options]
        return ScanInputs(*fields)

    @property
    def d_k(self) -> int:
        return self.k.shape[3]

    @property
    def d_v(self) -> int:
        return self.v.shape[3]

    @property
    def length(self) -> int:
        """T: tokens per row."""
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        """H: value heads."""
        return self.v.shape[2]

    @property
    def sharing(self) -> int:
        """Number of value heads that share a key head."""
        return self.v.shape[2] // self.k.shape[2] if self.k.shape[2] else 1

    @property
    def sequences(self) -> int:
        """N: number of states."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.sequences, self.v.shape[2], self.v.shape[3], self.k.shape[3]

    @property
    def by_channel(self) -> bool:
        """Whether every key channel has a decay of its own."""
        return self.log_decay is not None and self.log_decay.ndim == 4

    @property
    def solves(self) -> bool:
        """Whether a token reads what earlier tokens of its chunk have written: a triangular system to solve."""
        return self.erase is not None and self.mini_batch is None

    @property
    def working_dtype(self) -> torch.dtype:
        """The dtype of sums and of the state: at least float32."""
        return working_dtype(self.v)

    def checked(self) -> ScanInputs:
        """Return these inputs after all checks, with contiguous coefficients and the state in the working dtype."""
        _check_sequences(self.q, self.k, self.v)
        _check_sizes(self)
        probe, erase = self.probe, self.erase
        before = self.probe_before_decay and self.log_decay is not None and (probe is not None or erase is not None)
        probe = self.k if before and probe is None else probe
        if probe is not None:
            require_tensors(0, probe=probe)
            require_like_keys(self.k, probe=probe)
            probe = probe.to(self.k.dtype)
            erase = self.v.new_ones(self.v.shape[:3], dtype=self.working_dtype) if erase is None else erase
        coefficients = {"log_decay": self.log_decay, "erase": erase, "write": self.write}
        optional = coefficients | {"state": self.state}
        require_tensors(0, **{name: tensor for name, tensor in optional.items() if tensor is not None})
        require_coefficients(self.v, self.d_k, **coefficients)
        if self.cu_seqlens is not None:
            _check_boundaries(self.cu_seqlens, self.q)
        if self.state is not None:
            require_state(self.state, self.state_shape, self.q)
        if DEBUG or (self.v.device.type == "cpu" and not torch.compiler.is_compiling()):
            check_values(self)
        others = (*coefficients.values(), self.cu_seqlens)
        log_decay, erase, write, cu_seqlens = (None if x is None else x.contiguous() for x in others)
        state = None if self.state is None else self.state.to(self.working_dtype).contiguous()
        tensors = (self.q, self.k, self.v, log_decay, erase, write, probe, state)
        return ScanInputs(*tensors, cu_seqlens, self.chunk, self.mini_batch, before)


def check_values(inputs: ScanInputs) -> None:
    """Refuse NaN, infinities and a decay that grows."""
    names = ("q", "k", "v", "log_decay", "erase", "write", "probe", "state")
    for name, tensor in zip(names, inputs.tensors, strict=True):
        if tensor is None:
            continue
        values = tensor.detach()
        if name == "log_decay":
            if known((values > 0).any()):
                raise InputError(
                    f"The logarithm of the decay reaches {values.max():.3g}",
                    expected="ln α ≤ 0",
                    advice="Pass the logarithm of a decay between 0 and 1, for example -softplus(x)",
                    code="growing_decay",
                )
            values = values.masked_fill(values == float("-inf"), 0.0)  # forgetting everything is allowed
        require_finite(**{name: values})


def _check_sequences(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor, shape in (("q", q, "[B, T, H_k, d_k]"), ("k", k, "[B, T, H_k, d_k]"), ("v", v, "[B, T, H, d_v]")):
        require_tensors(0, **{name: tensor})
        if tensor.ndim != 4 or 0 in tensor.shape[2:]:
            raise ShapeError(f"Tensor {name!r} has shape {list(tensor.shape)}", expected=shape, code="wrong_shape")
        if tensor.dtype != q.dtype or tensor.dtype not in DTYPES:
            raise InputError(
                f"Tensor {name!r} has dtype {tensor.dtype}, and q has {q.dtype}",
                expected="float64, float32, bfloat16 or float16, the same for all",
                code="wrong_dtype",
            )
        require_device(name, tensor, q)
    if q.shape != k.shape or v.shape[:2] != k.shape[:2]:
        raise ShapeError(
            f"The shape of q is {list(q.shape)}, of k {list(k.shape)} and of v {list(v.shape)}",
            expected="one shape for q and k, and the same batch and length for v",
            code="sequences_do_not_match",
        )
    require_shared_heads(k, v)


def require_shared_heads(k: Tensor, v: Tensor) -> None:
    """Require that every key head serves equally many value heads, [..., heads, width]."""
    if k.shape[-2] == 0 or v.shape[-2] % k.shape[-2]:
        raise ShapeError(
            f"There are {v.shape[-2]} value heads and {k.shape[-2]} key heads",
            expected="a multiple of the key heads: each serves equally many value heads",
            code="heads_do_not_match",
        )


def require_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """Require a tensor on the device of `like`."""
    if tensor.device != like.device:
        raise InputError(
            f"Tensor {name!r} is on {tensor.device}, and the other tensors are on {like.device}",
            expected="one device",
            advice=f"Move it with {name}.to({str(like.device)!r})",
            code="devices_differ",
        )


def _check_sizes(inputs: ScanInputs) -> None:
    for name, size in (("chunk", inputs.chunk), ("mini-batch", inputs.mini_batch)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            code = f"invalid_{name.replace('-', '_')}"
            raise InputError(f"The {name} size is {size!r}", expected="a whole number of 1 or more", code=code)
    others = (inputs.log_decay, inputs.chunk, inputs.probe)
    if inputs.mini_batch is not None and any(x is not None for x in others):
        raise InputError(
            "A mini-batch was requested together with a decay, a chunk size or a probe",
            expected="a mini-batch alone: its tokens share one memory without decay, and it is the chunk",
            code="mini_batch_conflict",
        )


def require_like_keys(k: Tensor, **tensors: Tensor | None) -> None:
    """Require vectors of the shape of the keys."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != k.shape:
            problem = f"Tensor {name!r} has shape {list(tensor.shape)}"
            raise ShapeError(problem, expected=f"that of k, {list(k.shape)}", code="keys_do_not_match")
        require_device(name, tensor, k)


def require_coefficients(v: Tensor, d_k: int, **coefficients: Tensor | None) -> None:
    """Require one number for each value of v [..., d_v]; of the decay it may also be one per key channel."""
    shape = v.shape[:-1]
    for name, coefficient in coefficients.items():
        if coefficient is None:
            continue
        by_channel = name == "log_decay" and coefficient.shape == (*shape, d_k)
        if coefficient.shape != shape and not by_channel:
            raise ShapeError(
                f"Tensor {name!r} has shape {list(coefficient.shape)}",
                expected=f"one number per token and value head, {list(shape)}",
                advice=f"Expand it, for example with {name}.expand(v.shape[:-1])",
                code="coefficient_does_not_match",
            )
        require_device(name, coefficient, v)


def require_state(state: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Require a state of this shape, on the device of `like`."""
    if state.shape != shape:
        raise ShapeError(
            f"The state has shape {list(state.shape)}",
            expected=f"one [d_v, d_k] matrix per sequence and value head, {list(shape)}",
            advice="Pass the state that a scan of these widths returned",
            code="state_does_not_match",
        )
    require_device("state", state, like)


def _check_boundaries(cu_seqlens: Tensor, q: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            "The boundaries of packed sequences are not an int32 or int64 tensor",
            expected="cu_seqlens as an integer tensor [N + 1]",
            code="invalid_boundaries",
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
        raise ShapeError(
            f"The boundaries of packed sequences have shape {list(cu_seqlens.shape)}",
            expected="[N + 1]: 0, …, T for N sequences",
            code="invalid_boundaries",
        )
    if q.shape[0] != 1:
        raise ShapeError(
            f"Sequences are packed in a batch of {q.shape[0]}",
            expected="a batch of 1, in which they lie end to end",
            advice="Flatten the batch with x.flatten(0, 1).unsqueeze(0)",
            code="packed_batch",
        )
    require_device("cu_seqlens", cu_seqlens, q)
    if not torch.compiler.is_compiling() and (DEBUG or cu_seqlens.device.type == "cpu"):
        check_boundary_values(cu_seqlens.tolist(), q.shape[1])


def check_boundary_values(boundaries: list[int], length: int) -> None:
    """Require boundaries that begin at 0, never go back, and end at the last token."""
    if boundaries[0] != 0 or boundaries[-1] != length or any(end < begin for begin, end in pairwise(boundaries)):
        raise InputError(
            f"The boundaries of packed sequences run from {boundaries[0]} to {boundaries[-1]}",
            expected=f"0 to {length}, the number of tokens, without going back",
            advice="Accumulate the lengths of the sequences, starting from 0",
            code="invalid_boundaries",
        )
