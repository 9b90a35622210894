"""Any backend as a differentiable, compilable torch operation.

Two ways in, one set of rules. Eagerly, an `autograd.Function` calls the backend itself: a dispatch through
registered operators costs tens of microseconds, as much as a small scan on a GPU. Under `torch.compile` the
registered operators `rebind::scan` and `rebind::scan_backward` stand in the graph, opaque, with fake kernels that
know every shape.

Gradients of gradients are those of the token-by-token recurrence, by plain autograd: slow, and right to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from rebind.ops import reference
from rebind.ops.backend import Backend, Gradients
from rebind.ops.dispatch import choose
from rebind.ops.inputs import Inputs
from rebind.precision import without_autocast


def run(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """The output and the final state, differentiable in every tensor of the inputs."""
    if backend == reference.REFERENCE.name:  # plain operations: autograd and the compiler see through them
        with without_autocast(inputs.v):
            return reference.recurrence(inputs)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.tensors)
    if torch.compiler.is_compiling():
        options = (inputs.chunk, inputs.mini_batch, keep, backend)
        out, final = torch.ops.rebind.scan(*inputs.tensors, inputs.cu_seqlens, *options)[:2]
        return out, final
    chosen = choose(inputs, backend)
    if keep:
        return _Scan.apply(chosen, inputs.chunk, inputs.mini_batch, *inputs.tensors, inputs.cu_seqlens)  # type: ignore[no-untyped-call]
    out, final, _ = _forward(chosen, inputs)
    return out, final


class _Scan(torch.autograd.Function):
    """A scan, eagerly."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, chunk: int | None, mini_batch: int | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, final, saved = _forward(backend, _rebuilt([*tensors, chunk, mini_batch, True]))
        ctx.save_for_backward(*tensors, *saved)
        ctx.backend, ctx.options = backend, (chunk, mini_batch, True)
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        inputs = _rebuilt([*kept[:8], *ctx.options])
        if torch.is_grad_enabled():  # the caller asked for a graph: gradients of these gradients
            d_out = torch.zeros_like(inputs.v) if d_out is None else d_out
            with without_autocast(inputs.v):
                grads = reference.gradients(inputs, d_out, d_final, create_graph=True)
        else:
            grads = _backward(ctx.backend, inputs, list(kept[8:]), d_out, d_final)
        return None, None, None, *grads, None


def _rebuilt(fields: Sequence[Any]) -> Inputs:
    """Inputs from their fields in order, which were checked before they were taken apart."""
    return Inputs(*fields)


def _forward(backend: Backend, inputs: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    with _at_home(inputs):
        return backend.forward(inputs)


def _backward(
    backend: Backend, inputs: Inputs, saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None
) -> Gradients:
    d_out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format) if d_out is None else d_out.contiguous()
    with _at_home(inputs):
        return backend.backward(inputs, saved, d_out, None if d_final is None else d_final.contiguous())


def _at_home(inputs: Inputs) -> AbstractContextManager[Any]:
    """Full precision, and the tensors' own GPU the current one: a kernel is launched there."""
    device = inputs.v.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return without_autocast(inputs.v)
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(without_autocast(inputs.v))
    return stack


# The registered operators. A schema cannot say which results are None, so gradients come without them.

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? erase, Tensor? write, Tensor? state, "
    "Tensor? cu_seqlens, int? chunk, int? mini_batch, bool keep, str backend"
)


@torch.library.custom_op("rebind::scan", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]")
def _scan(*arguments: Any) -> list[Tensor]:
    inputs, backend = _rebuilt(arguments[:-1]), arguments[-1]
    out, final, saved = _forward(choose(inputs, backend), inputs)
    return [out, final, *saved]


@_scan.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, backend = _rebuilt(arguments[:-1]), arguments[-1]
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    final = torch.empty(inputs.state_shape, dtype=inputs.working, device=inputs.v.device)
    return [out, final, *choose(inputs, backend).saved_like(inputs)]


@torch.library.custom_op(
    "rebind::scan_backward",
    mutates_args=(),
    schema=f"(Tensor[] saved, Tensor? d_out, Tensor? d_final, {_ARGUMENTS}) -> Tensor[]",
)
def _scan_backward(saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None, *arguments: Any) -> list[Tensor]:
    inputs, backend = _rebuilt(arguments[:-1]), arguments[-1]
    grads = _backward(choose(inputs, backend), inputs, saved, d_out, d_final)
    return [grad for grad in grads if grad is not None]


@_scan_backward.register_fake
def _(saved: list[Tensor], d_out: Tensor | None, d_final: Tensor | None, *arguments: Any) -> list[Tensor]:
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _rebuilt(arguments[:-1]).tensors if x is not None
    ]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output[2:])
    ctx.rest = inputs[8:]


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    kept = ctx.saved_tensors
    found = iter(torch.ops.rebind.scan_backward(list(kept[8:]), grads[0], grads[1], *kept[:8], *ctx.rest))
    return *(None if x is None else next(found) for x in kept[:7]), None, None, None, None, None


_scan.register_autograd(_differentiate, setup_context=_set_up)
