"""The questions asked of an input before anything is computed from it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError, UnknownNameError


def known(flag: Tensor) -> bool | None:
    """A boolean tensor as a Python bool, or None where values may not be looked at.

    Inside `torch.vmap`, `torch.compile` and what a CUDA graph records control flow cannot depend on data;
    checks and rescues that would need it are skipped there.
    """
    if _hidden(flag):
        return None
    try:
        return bool(flag)
    except RuntimeError as problem:
        if "vmap" in str(problem):
            return None
        raise  # a device's own failure is not ours to hide


def _hidden(flag: Tensor) -> bool:
    if torch.compiler.is_compiling() or flag.is_meta:  # first: a compiler cannot ask what comes next
        return True
    return flag.is_cuda and torch.cuda.is_current_stream_capturing()


def require_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InputError(
                f"{name} has dtype {tensor.dtype}, expected a real floating-point dtype: "
                f"convert it, for example with {name}.float()"
            )


def require_finite(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        # One NaN or infinity makes the sum one: a pass ten times cheaper than asking every entry.
        if known(torch.isfinite(tensor.detach().sum())) is False and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{name} {list(tensor.shape)} holds {bad} NaN or infinite "
                f"{'entry' if bad == 1 else 'entries'}, expected finite numbers: "
                f"find where they arise before writing them into a memory"
            )


def require_rank(least: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name} is a {type(tensor).__name__}, expected a tensor: convert it with torch.as_tensor")
        if tensor.ndim < least:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}, expected at least {least} "
                f"{'dimension' if least == 1 else 'dimensions'}: add leading ones with unsqueeze"
            )


def require_width(name: str, tensor: Tensor, width: int, of: str) -> None:
    if tensor.shape[-1] != width:
        raise ShapeError(
            f"{name} {list(tensor.shape)} is {tensor.shape[-1]} wide, {of} takes {width}: "
            f"check which tensor was passed as {name}"
        )


def require_broadcastable(what: str, *shapes: Iterable[int]) -> torch.Size:
    """The common shape of leading dimensions, or an error that shows them all."""
    sizes = [tuple(shape) for shape in shapes]
    try:
        return torch.broadcast_shapes(*sizes)
    except RuntimeError:
        raise ShapeError(
            f"{what} have leading shapes {', '.join(str(list(size)) for size in sizes)}, "
            f"expected shapes that broadcast together: insert dimensions of size 1 where they differ"
        ) from None


def unknown_name(kind: str, got: object, names: Iterable[str]) -> UnknownNameError:
    """The error for a name nobody answers to, with the nearest one that exists."""
    known_names = sorted(names)
    near = get_close_matches(str(got), known_names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "choose one of these"
    return UnknownNameError(f"unknown {kind} {got!r}, expected one of {', '.join(known_names)}: {hint}")


def usable_device(name: str) -> torch.device:
    """The device of that name, on which something could be put just now."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0]
        raise InputError(
            f"device {name!r} cannot be used here ({reason}), expected cpu, cuda or mps: try cpu"
        ) from None
    return device
