"""Any backend as a differentiable, compilable torch operation.

There are two ways in with one set of rules. Eagerly, an `autograd.Function` calls the backend itself: a dispatch
through registered operators costs tens of microseconds, as much as a small scan on a GPU. Under `torch.compile` the
registered operators `rebind::scan` and `rebind::scan_backward` stand in the graph, opaque, with fake kernels that know
every shape.

Inside of transforms of `torch.func`, under forward-mode differentiation, for batched gradients and for gradients of
gradients the chunk form of `plain` runs instead, whose single operations torch follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rebind.ops import reference
from rebind.ops.chunked import plain
from rebind.ops.dispatch import Backend, choose
from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.kernels import is_transformed
from rebind.precision import without_autocast

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? erase, Tensor? write, Tensor? probe, "
    "Tensor? state, Tensor? cu_seqlens, int? chunk, int? mini_batch, bool probe_before_decay, bool keep, str backend"
)  # the fields of ScanInputs and the name of the backend
DIFFERENTIABLE = 8  # how many of them have gradients: ScanInputs.tensors
TENSORS = DIFFERENTIABLE + 1  # and cu_seqlens


def run(inputs: ScanInputs, backend: str) -> tuple[Tensor, Tensor]:
    """Return the output and the final state, differentiable by every tensor of the inputs."""
    if backend == "reference":  # plain operations: autograd and the compiler see through them
        with without_autocast(inputs.v):
            return reference.recurrence(inputs)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.tensors)
    tensors, options = inputs.tensors, (*inputs.options[:-1], keep)
    if torch.compiler.is_compiling():
        out, final = torch.ops.rebind.scan(*tensors, *options, backend)[:2]
        return out, final
    chosen = choose(inputs, backend)
    if is_transformed(*tensors):
        with without_autocast(inputs.v):
            return plain.chunk_form(inputs)
    if keep:
        return _Scan.apply(chosen, options, *tensors)  # type: ignore[no-untyped-call]
    out, final, _ = _forward(chosen, inputs)
    return out, final


class _Scan(torch.autograd.Function):
    """A scan, called eagerly."""

    @staticmethod
    def forward(ctx: Any, backend: Backend, options: tuple[Any, ...], *tensors: Any) -> tuple[Tensor, Tensor]:
        out, final, saved = _forward(backend, ScanInputs(*tensors, *options))
        ctx.save_for_backward(*tensors, *saved)
        ctx.backend, ctx.options = backend, options
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        inputs = ScanInputs(*tensors[:DIFFERENTIABLE], *ctx.options)
        if torch.is_grad_enabled() or is_transformed(d_out, d_final):  # the caller wants a graph, or a batch
            d_out = torch.zeros_like(inputs.v) if d_out is None else d_out
            with without_autocast(inputs.v):
                grads = plain.gradients(inputs, d_out, d_final)
        else:
            grads = _backward(ctx.backend, inputs, list(tensors[DIFFERENTIABLE:]), d_out, d_final)
        return None, None, *grads


def _forward(backend: Backend, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    with without_autocast(inputs.v):
        return backend.forward(inputs)


def _backward(
    backend: Backend, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None
) -> Gradients:
    d_out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format) if d_out is None else d_out.contiguous()
    with without_autocast(inputs.v):
        return backend.backward(inputs, saved, d_out, None if d_final is None else d_final.contiguous())


# The registered operators. A schema cannot say which results are None, so gradients come without them.


@torch.library.custom_op("rebind::scan", mutates_args=(), schema=f"({SCHEMA}) -> Tensor[]")
def _scan(*arguments: Any) -> list[Tensor]:
    inputs, backend = ScanInputs(*arguments[:-1]), arguments[-1]
    out, final, saved = _forward(choose(inputs, backend), inputs)
    return [out, final, *saved]


@_scan.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, backend = ScanInputs(*arguments[:-1]), arguments[-1]
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    final = torch.empty(inputs.state_shape, dtype=inputs.working_dtype, device=inputs.v.device)
    return [out, final, *choose(inputs, backend).saved_like(inputs)]


@torch.library.custom_op(
    "rebind::scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] saved, Tensor? d_out, Tensor? d_final, {SCHEMA}) -> Tensor[]",
)
def _scan_backward(saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None, *arguments: Any) -> list[Tensor]:
    inputs, backend = ScanInputs(*arguments[:-1]), arguments[-1]
    grads = _backward(choose(inputs, backend), inputs, saved, d_out, d_final)
    return [grad for grad in grads if grad is not None]


@_scan_backward.register_fake
def _(saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None, *arguments: Any) -> list[Tensor]:
    tensors = arguments[:DIFFERENTIABLE]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors if x is not None]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output[2:])
    ctx.rest = inputs[TENSORS:]


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    tensors, saved = ctx.saved_tensors[:TENSORS], ctx.saved_tensors[TENSORS:]
    computed = iter(torch.ops.rebind.scan_backward(list(saved), grads[0], grads[1], *tensors, *ctx.rest))
    gradients = [None if x is None else next(computed) for x in tensors[:DIFFERENTIABLE]]
    return *gradients, *(None for _ in (tensors[DIFFERENTIABLE:] + ctx.rest))


_scan.register_autograd(_differentiate, setup_context=_set_up)
