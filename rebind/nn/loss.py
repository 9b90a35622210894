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
from rebind.precision import as_autocast

IGNORED = -100  # a target that asks for nothing
ROOM = 2**26  # logits of a piece


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
        asked = targets.reshape(-1, 1)
        wide = working_dtype(rows)
        total = torch.zeros((), dtype=wide, device=rows.device)
        wanted = any(ctx.needs_input_grad)
        d_rows = torch.empty_like(rows) if wanted else rows
        d_table = torch.zeros_like(weight, dtype=working_dtype(weight)) if wanted else weight
        size = max(1, ROOM // len(weight))
        for first in range(0, len(rows), size):
            piece = slice(first, first + size)
            real = asked[piece] != IGNORED
            target = asked[piece].where(real, 0)
            logits = (rows[piece] @ table.mT).to(wide)
            log_sum = logits.logsumexp(1, keepdim=True)
            total += ((log_sum - logits.gather(1, target)) * real).sum()
            if wanted:
                shares = logits.sub_(log_sum).exp_()
                slope = shares.scatter_(1, target, shares.gather(1, target) - 1).mul_(real).to(rows.dtype)
                d_rows[piece] = slope @ table
                d_table += slope.mT @ rows[piece]
        if wanted:
            ctx.save_for_backward(d_rows.view(hidden.shape), d_table)
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        found = (
            (tensor * slope).to(dtype) if needed else None
            for tensor, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        return *found, None
