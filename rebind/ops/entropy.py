"""Cross-entropy of each row of logits, with its gradient written over the logits.

    loss = log Σ exp(x) − x[target]      gradient = softmax(x) − onehot(target)

Plain torch passes over the logits ten times, in float32. On a GPU a kernel reads them twice where they are and writes
them once. This operation is not differentiable itself; it returns the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.errors import ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.kernels import compare_results, draw, load_kernels, usable

IGNORED = -100  # a target without a loss


@torch.no_grad()
def row_losses(logits: Tensor, targets: Tensor, *, slope: bool) -> Tensor:
    """Return the losses [n], at least float32, of logits [n, words] and targets [n]; 0 where a target is −100.

    With `slope` the logits are overwritten by softmax − onehot, 0 where a target is −100. For a target that is not a
    word the loss and the slope of the kernel are NaN; plain torch raises an error.
    """
    if targets.shape != logits.shape[:1]:
        raise ShapeError(
            f"Targets have shape {list(targets.shape)} and logits {list(logits.shape)}",
            expected="[n] and [n, words]: one target per row",
            code="targets_do_not_match",
        )
    if logits.is_contiguous() and _has_kernels(logits):
        losses: Tensor = load_kernels().entropy.row_losses(logits, targets, slope)
        return losses
    return _row_losses_in_torch(logits, targets, slope)


def bytes_of_logit(like: Tensor) -> int:
    """Return the memory that `row_losses` needs per logit of this dtype and device: plain torch makes a wide copy."""
    return like.element_size() + (0 if _has_kernels(like) else working_dtype(like).itemsize)


@torch.no_grad()
def compare_kernels(logits: Tensor) -> str | None:
    """Compare the kernel for such logits with plain torch; return what is wrong with it, or None."""
    drawn = (3 * draw((4, 5000), logits, 0)).to(logits.dtype)  # more than one block of words, some far likelier
    targets = torch.tensor([4999, IGNORED, 0, 70], device=logits.device)

    def kernels() -> list[Tensor]:
        slopes = drawn.clone()
        return [
            load_kernels().entropy.row_losses(drawn, targets, False),
            load_kernels().entropy.row_losses(slopes, targets, True),
            slopes,
        ]

    def truth() -> list[Tensor]:
        slopes = drawn.double()
        losses = _row_losses_in_torch(slopes, targets, True)
        return [losses, losses, slopes]

    return compare_results(f"The kernels of cross-entropy in {logits.dtype}", kernels, truth, logits)


def _row_losses_in_torch(logits: Tensor, targets: Tensor, slope: bool) -> Tensor:
    counted = (targets != IGNORED).unsqueeze(1)
    place = targets.unsqueeze(1).where(counted, 0)
    x = logits.to(working_dtype(logits), copy=not slope)
    target_logits, largest = x.gather(1, place), x.amax(1, keepdim=True)
    shares = x.sub_(largest).exp_()  # no second copy, as logsumexp makes
    total = shares.sum(1, keepdim=True)
    if slope:
        shares.div_(total)
        logits.copy_(shares.scatter_(1, place, shares.gather(1, place) - 1).masked_fill_(~counted, 0))
    return (largest - target_logits + total.log()).masked_fill_(~counted, 0).squeeze(1)


def _has_kernels(logits: Tensor) -> bool:
    return not torch.compiler.is_compiling() and usable(logits, ("entropy",), lambda: compare_kernels(logits))
