"""Cross-entropy from logits, one row per program, and its gradient written over them.

    loss = log Σ exp(x) − x[target]      slope = exp(x) / Σ exp(x) − [word = target]

A row is read twice: once for its largest logit and the sum of exponentials, and once for the slope.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.entropy import IGNORED
from rebind.ops.triton.calls import launch

BLOCK = 4096  # words at a time
WARPS = 8


@triton.jit
def _exp(x):
    """Return exp(x) by base 2, which takes half the instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _row_losses(
    logits,
    targets,
    losses,
    WORDS: tl.constexpr,
    IGNORED: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = logits.dtype.element_ty
    logits += row * WORDS
    target = tl.load(targets + row)
    if target == IGNORED:
        tl.store(losses + row, 0.0)
        if SLOPE:
            for first in range(0, WORDS, BLOCK):
                word = first + tl.arange(0, BLOCK)
                tl.store(logits + word, tl.zeros([BLOCK], kind), mask=word < WORDS)
    else:
        known = (target >= 0) & (target < WORDS)
        target_logit = tl.load(logits + target, mask=known, other=0.0).to(tl.float32)  # before slopes are written
        largest = float("-inf")
        total = 0.0
        for first in range(0, WORDS, BLOCK):
            word = first + tl.arange(0, BLOCK)
            x = tl.load(logits + word, mask=word < WORDS, other=float("-inf")).to(tl.float32)
            above = tl.maximum(largest, tl.max(x, 0))
            base = tl.where(above == float("-inf"), 0.0, above)  # words may be ruled out, a whole block of them
            total = total * _exp(largest - base) + tl.sum(_exp(x - base), 0)
            largest = above
        total = tl.where(known, total, float("nan"))
        tl.store(losses + row, largest - target_logit + tl.log(total))
        if SLOPE:
            share = 1 / total
            place = target.to(tl.int32)
            for first in range(0, WORDS, BLOCK):
                word = first + tl.arange(0, BLOCK)
                x = tl.load(logits + word, mask=word < WORDS, other=float("-inf")).to(tl.float32)
                slope = _exp(x - largest) * share
                slope = tl.where(word == place, slope - 1, slope)
                tl.store(logits + word, slope.to(kind), mask=word < WORDS)


def row_losses(logits: Tensor, targets: Tensor, slope: bool) -> Tensor:
    """Return the losses [n] in float32 of contiguous logits [n, words], which `slope` overwrites by their gradient."""
    rows, words = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tensors = logits, targets.contiguous(), losses
    launch(_row_losses, (rows,), tensors, warps=WARPS, WORDS=words, IGNORED=IGNORED, SLOPE=slope, BLOCK=BLOCK)
    return losses
