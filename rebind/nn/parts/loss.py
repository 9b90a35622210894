"""The cross-entropy of a large vocabulary, a piece of the tokens at a time: its logits are never in memory together.

Of 16,384 tokens and 32,000 words the logits are a gigabyte in bfloat16, and several more in float32 with their softmax
and their gradient. Here the logits of a piece are made, its loss and gradients are taken, and they are forgotten;
backward scales what is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rebind.memory.precision import working_dtype
from rebind.ops.entropy import bytes_of_logit, row_losses
from rebind.precision import as_autocast

ROOM = 2**29  # bytes of a piece's logits, with what their loss needs


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Σ −log softmax(W h)[target] over hidden states [..., d] and targets [...], by a head W [words, d].

    At least float32; autocast is obeyed. Targets of −100 ask for nothing.
    """
    if not torch.is_grad_enabled():  # autograd would still say that gradients are wanted
        hidden, weight = hidden.detach(), weight.detach()
    total: Tensor = _HeadLoss.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows, table = (as_autocast(tensor) for tensor in (hidden.reshape(-1, hidden.shape[-1]), weight))
        asked = targets.reshape(-1)
        total = torch.zeros((), dtype=working_dtype(rows), device=rows.device)
        wanted = any(ctx.needs_input_grad)
        d_rows = torch.empty_like(rows) if wanted else rows
        d_table = torch.zeros_like(weight, dtype=working_dtype(weight)) if wanted else weight
        size = max(1, ROOM // (len(weight) * bytes_of_logit(rows)))
        for first in range(0, len(rows), size):
            piece = slice(first, first + size)
            logits = rows[piece] @ table.mT
            # A new tensor: compiled by torch 2.11, one that grows in place has no gradient
            total = total + row_losses(logits, asked[piece], slope=wanted).sum()
            if wanted:  # the logits are their slope now
                d_rows[piece] = logits @ table
                d_table += logits.mT @ rows[piece]
            del logits  # before the next piece has its own
        if wanted:
            ctx.save_for_backward(d_rows.view(hidden.shape), d_table)
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        found = (
            (tensor * slope).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True)
        )
        return *found, None
