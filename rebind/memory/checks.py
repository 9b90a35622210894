"""Checks of arguments, made before anything is computed from them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError, UnknownNameError


def known(flag: Tensor) -> bool | None:
    """Return a boolean tensor as a Python bool, or None where its value may not be read.

    Inside `torch.vmap`, `torch.compile` and a CUDA graph that is being recorded, control flow cannot depend on
    data; checks and rescues that would need it are skipped there.
    """
    if torch.compiler.is_compiling() or flag.is_meta:  # first: a compiler cannot trace the next question
        return None
    if flag.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    try:
        return bool(flag)
    except RuntimeError as problem:
        if "vmap" in str(problem):
            return None
        raise


def require_number(
    name: str,
    value: object,
    *,
    least: float = 0.0,
    above: float = -math.inf,
    most: float = sys.float_info.max,
    whole: bool = False,
    code: str = "invalid_setting",
) -> None:
    """Require a number from `least` to `most` that is greater than `above`: an integer if `whole`, and never NaN."""
    numbers = Integral if whole else Real
    is_number = type(value) is not bool and isinstance(value, numbers)
    number: Any = value
    if is_number and least <= number <= most and number > above:
        return
    kind = "an integer" if whole else "a number"
    lower = f"above {above:g}" if above >= least else f"{least:g} or more"
    upper = f", at most {most:g}" if most < sys.float_info.max else ""
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
    raise InputError(f"Setting {name!r} is {shown}", expected=f"{kind}, {lower}{upper}", code=code)


def require_type(name: str, value: object, kind: type, expected: str) -> None:
    """Require a setting to be of a type, which `expected` describes."""
    if not isinstance(value, kind):
        raise InputError(f"Setting {name!r} is {value!r:.60}", expected=expected, code="invalid_setting")


def require_tensors(least_rank: int, **tensors: Tensor) -> None:
    """Require real floating-point tensors with at least `least_rank` dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"Input {name!r} is a {type(tensor).__name__}", expected="a tensor", code="not_a_tensor")
        if not tensor.is_floating_point():
            problem = f"Tensor {name!r} has dtype {tensor.dtype}"
            advice = f"Convert it, for example with {name}.float()"
            raise InputError(problem, expected="a real floating-point dtype", advice=advice, code="not_floating_point")
        if tensor.ndim < least_rank:
            problem = f"Tensor {name!r} has shape {list(tensor.shape)}"
            expected = f"at least {least_rank} dimension{'s' * (least_rank > 1)}"
            raise ShapeError(problem, expected=expected, code="too_few_dimensions")


def require_finite(**tensors: Tensor) -> None:
    """Require that no tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        # One NaN or infinity makes the sum one: a pass ten times cheaper than testing every entry.
        if known(torch.isfinite(tensor.detach().sum())) is False and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            problem = f"Tensor {name!r} of shape {list(tensor.shape)} holds {count} NaN or infinite entries"
            advice = "Find out where they come from before they are written into a memory"
            raise InputError(problem, expected="finite numbers", advice=advice, code="not_finite")


def require_width(name: str, tensor: Tensor, width: int, of: str) -> None:
    """Require a last dimension of `width`, which is what `of` takes."""
    if tensor.shape[-1] != width:
        problem = f"Tensor {name!r} of shape {list(tensor.shape)} is {tensor.shape[-1]} wide"
        raise ShapeError(problem, expected=f"{width}, the width that {of} takes", code="wrong_width")


def require_broadcastable(what: str, *shapes: Iterable[int]) -> torch.Size:
    """Return the common shape of leading dimensions; raise an error that shows them all if there is none."""
    sizes = [tuple(shape) for shape in shapes]
    try:
        return torch.broadcast_shapes(*sizes)
    except RuntimeError:
        problem = f"The leading shapes of {what} are {', '.join(str(list(size)) for size in sizes)}"
        expected = "shapes that broadcast together"
        advice = "Insert dimensions of size 1 where they differ"
        raise ShapeError(problem, expected=expected, advice=advice, code="not_broadcastable") from None


def unknown_name(kind: str, got: object, names: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that does not exist, with the closest name that does.

    Its code is `unknown_` and the kind, so "unknown_rule" for a rule.
    """
    known_names = sorted(names)
    near = get_close_matches(str(got), known_names, n=1)
    advice = f"Did you mean {near[0]!r}?" if near else ""
    expected, code = f"one of {', '.join(known_names)}", f"unknown_{kind.replace(' ', '_')}"
    return UnknownNameError(f"Unknown {kind} {got!r}", expected=expected, advice=advice, code=code)


def usable_device(name: str) -> torch.device:
    """Return the device of that name, after allocating something on it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = f"Device {name!r} cannot be used here: {str(problem).splitlines()[0]}"
        advice, settings = "Try {device}", {"device": "cpu"}
        raise InputError(reason, advice=advice, settings=settings, code="unusable_device") from None
    return device
