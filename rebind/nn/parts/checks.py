"""Checks of the arguments of layers, models and configs."""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError


def require_positive(**sizes: object) -> None:
    """Require integers of 1 or more."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"Argument {name!r} is {size!r}", expected="an integer of 1 or more", code="invalid_size")


def require_multiple(what: str, number: int, divisor: int, of: str) -> None:
    """Require heads that share a width, or other heads, evenly."""
    if divisor < 1 or number % divisor:
        problem, expected = f"{what} is {number}", f"a multiple of {divisor}, {of}"
        raise ShapeError(problem, expected=expected, advice="Change the number of heads", code="indivisible_heads")


def head_width(dim: int, heads: int, width: int | None = None) -> int:
    """Return the width of a head: `width`, or dim / heads if it is None."""
    require_positive(dim=dim, heads=heads)
    if width is None:
        require_multiple("The width", dim, heads, "the number of heads")
        return dim // heads
    require_positive(head_width=width)
    return width


def shared_heads(heads: int, key_heads: int | None) -> int:
    """Return the number of key heads, each shared by equally many heads; None means as many as there are heads."""
    if key_heads is None:
        return heads
    require_positive(key_heads=key_heads)
    require_multiple("The number of heads", heads, key_heads, "the number of key heads")
    return key_heads


def require_sequence(name: str, x: Tensor, width: int, mask: Tensor | None, *, rank: int = 3) -> None:
    """Require tokens [B, T, width], or [B, width] for `rank` 2, with one boolean per token as their mask."""
    if x.ndim != rank or x.shape[-1] != width or 0 in x.shape:
        raise ShapeError(
            f"Tensor {name!r} has shape {list(x.shape)}",
            expected=f"[B, T, {width}]" if rank == 3 else f"[B, {width}]",
            advice="Use forward for sequences of one or more tokens, and step for one token per sequence",
            code="wrong_sequence_shape",
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        raise InputError(
            f"The mask is a {mask.dtype} tensor of shape {list(mask.shape)}",
            expected=f"a boolean tensor of shape {list(x.shape[:-1])}, true for real tokens",
            advice="Convert it with mask.bool(), and mask only the tokens of this call",
            code="invalid_mask",
        )


def require_rows(sequences: int, state_rows: int) -> None:
    """Require a state for as many sequences as the batch has."""
    if sequences != state_rows:
        problem = f"The batch has {sequences} sequences and the state {state_rows}"
        advice = "Start without a state, or choose its rows with state.select"
        raise ShapeError(problem, advice=advice, code="state_of_other_batch")


def require_tokens(name: str, ids: Tensor) -> None:
    """Require token ids [B, T], and no empty batch."""
    if ids.ndim != 2 or 0 in ids.shape:
        problem, advice = f"{name} has shape {list(ids.shape)}", "Add the batch dimension with unsqueeze(0)"
        raise ShapeError(problem, expected="[B, T], not empty", advice=advice, code="wrong_token_shape")


def boolean_mask(name: str, mask: Tensor | None, batch: int, length: int, *, longer: bool = False) -> Tensor | None:
    """Return the attention mask [B, length] of a model, or one that is longer, as booleans."""
    if mask is None:
        return None
    if mask.ndim != 2 or len(mask) != batch or mask.shape[1] < length or (mask.shape[1] > length and not longer):
        expected = f"[{batch}, {length}]" + (", or longer on the left for the context" if longer else "")
        raise ShapeError(f"{name} has shape {list(mask.shape)}", expected=expected, code="wrong_attention_mask_shape")
    return mask.to(torch.bool)
