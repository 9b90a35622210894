"""The cross-entropy of a large vocabulary without all of its logits in memory at once.

For 16,384 tokens and 32,000 words the logits take a gigabyte in bfloat16, and several more in float32 with their
softmax and their gradient. Here the logits of a few tokens are computed, reduced to a loss and gradients, and released;
the backward pass only scales these gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rebind.memory.precision import working_dtype
from rebind.ops.entropy import bytes_of_logit, row_losses
from rebind.precision import as_autocast

MAX_BYTES = 2**29  # of the logits in memory at once, with the copies that their loss needs


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """Return Σ −log softmax(W h)[target] over hidden states [..., d] and targets [...], for a head W [words, d].

    The result has float32 or better; products follow autocast. Targets of −100 are ignored.
    """
    if not torch.is_grad_enabled():  # otherwise needs_input_grad is true even here
        hidden, weight = hidden.detach(), weight.detach()
    total: Tensor = _HeadLoss.apply(hidden, weight, targets, max_bytes)  # type: ignore[no-untyped-call]
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, max_bytes: int) -> Tensor:
        rows, table = (as_autocast(tensor) for tensor in (hidden.reshape(-1, hidden.shape[-1]), weight))
        targets = targets.reshape(-1)
        total = torch.zeros((), dtype=working_dtype(rows), device=rows.device)
        with_gradients = any(ctx.needs_input_grad)
        d_rows = torch.empty_like(rows) if with_gradients else rows
        d_table = torch.zeros_like(weight, dtype=working_dtype(weight)) if with_gradients else weight
        size = max(1, max_bytes // (len(weight) * bytes_of_logit(rows)))
        for first in range(0, len(rows), size):
            piece = slice(first, first + size)
            logits = rows[piece] @ table.mT
            # Not in place: compiled by torch 2.11, a sum that grows in place has no gradient.
            total = total + row_losses(logits, targets[piece], slope=with_gradients).sum()
            if with_gradients:  # row_losses has replaced the logits by their gradient
                d_rows[piece] = logits @ table
                d_table += logits.mT @ rows[piece]
            del logits  # before the next piece is computed
        if with_gradients:
            ctx.save_for_backward(d_rows.view(hidden.shape), d_table)
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            (tensor * slope).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        )
        return *gradients, None, None
