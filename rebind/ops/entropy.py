"""Cross-entropy from logits a row, whose slope takes the logits' place.

    loss = log Σ exp(x) − x[target]      slope = softmax(x) − onehot(target)

Plain torch goes over the logits ten times, in float32. On a GPU a kernel reads them where they are, twice, and writes
once. No gradient is taken through this; whoever wants one has the slope.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rebind.errors import ShapeError
from rebind.memory.precision import working_dtype
from rebind.ops.dispatch import triton_backend
from rebind.ops.trust import difference, distrusted, noise

IGNORED = -100  # a target that asks for nothing
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernel takes


@torch.no_grad()
def row_losses(logits: Tensor, targets: Tensor, *, slope: bool) -> Tensor:
    """Losses [n], at least float32, of logits [n, words] and targets [n]; 0 where a target is −100.

    With `slope` the logits are overwritten by softmax − onehot, 0 where a target is −100. Of a target that is no word
    the kernel's loss and slope are NaN; plain torch has an error.
    """
    if targets.shape != logits.shape[:1]:
        raise ShapeError(
            f"targets are {list(targets.shape)} and logits {list(logits.shape)}, expected [n] and [n, words]: give "
            f"each row one target"
        )
    if logits.is_contiguous() and _has_kernels(logits):
        losses: Tensor = _kernels().row_losses(logits, targets, slope)
        return losses
    return _plain(logits, targets, slope)


def bytes_of_logit(like: Tensor) -> int:
    """What `row_losses` needs for a logit of this dtype and device: itself, and in plain torch a wide copy."""
    return like.element_size() + (0 if _has_kernels(like) else working_dtype(like).itemsize)


def _plain(logits: Tensor, targets: Tensor, slope: bool) -> Tensor:
    real = (targets != IGNORED).unsqueeze(1)
    place = targets.unsqueeze(1).where(real, 0)
    x = logits.to(working_dtype(logits), copy=not slope)
    asked, largest = x.gather(1, place), x.amax(1, keepdim=True)
    shares = x.sub_(largest).exp_()  # no second copy, as logsumexp makes
    total = shares.sum(1, keepdim=True)
    if slope:
        shares.div_(total)
        logits.copy_(shares.scatter_(1, place, shares.gather(1, place) - 1).masked_fill_(~real, 0))
    return (largest - asked + total.log()).masked_fill_(~real, 0).squeeze(1)


def _kernels() -> Any:
    from rebind.ops.triton import entropy

    return entropy


def _has_kernels(logits: Tensor) -> bool:
    if not (logits.is_cuda and logits.dtype in DTYPES and logits.numel()) or torch.compiler.is_compiling():
        return False
    if isinstance(triton_backend(), str):
        return False
    return distrusted(("entropy", logits.device, logits.dtype), lambda: _compare(logits), "plain torch") is None


@torch.no_grad()
def _compare(logits: Tensor) -> str | None:
    """Why the kernel is not to be trusted with such logits, or None."""
    drawn = (3 * noise((4, 5000), logits, 0)).to(logits.dtype)  # more than a block of words, some far likelier
    targets = torch.tensor([4999, IGNORED, 0, 70], device=logits.device)

    def kernels() -> list[Tensor]:
        slopes = drawn.clone()
        return [_kernels().row_losses(drawn, targets, False), _kernels().row_losses(slopes, targets, True), slopes]

    def truth() -> list[Tensor]:
        slopes = drawn.double()
        losses = _plain(slopes, targets, True)
        return [losses, losses, slopes]

    return difference(f"the kernels of cross-entropy in {logits.dtype}", kernels, truth, logits, "plain torch")
