"""Checks of the arguments of layers and configs."""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError


def require_positive(**sizes: object) -> None:
    """Require integers of 1 or more."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"Argument {name!r} is {size!r}", expected="an integer of 1 or more", code="invalid_size")


def require_sequence(name: str, x: Tensor, width: int, *, rank: int = 3) -> None:
    """Require tokens [B, T, width], or one token per sequence [B, width] for `rank` 2, and no empty batch."""
    if x.ndim != rank or x.shape[-1] != width or 0 in x.shape:
        raise ShapeError(
            f"Tensor {name!r} has shape {list(x.shape)}",
            expected=f"[B, T, {width}]" if rank == 3 else f"[B, {width}]",
            advice="Use forward for sequences of one or more tokens, and step for one token per sequence",
            code="wrong_sequence_shape",
        )


def require_tokens(name: str, ids: Tensor) -> None:
    """Require token ids [B, T], and no empty batch."""
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(
            f"{name} has shape {list(ids.shape)}",
            expected="[B, T] with one or more tokens",
            advice="Add the batch dimension of a single sequence with unsqueeze(0)",
            code="wrong_token_shape",
        )


def require_mask(mask: Tensor | None, x: Tensor) -> None:
    """Require one boolean per token of x [..., width]."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:-1]):
        raise InputError(
            f"The mask is a {mask.dtype} tensor of shape {list(mask.shape)}",
            expected=f"a boolean tensor of shape {list(x.shape[:-1])}, true for real tokens",
            advice="Convert it with mask.bool(), and mask only the tokens of this call",
            code="invalid_mask",
        )


def require_rows(rows: int, state_rows: int) -> None:
    """Require a state for as many sequences as the batch has."""
    if rows != state_rows:
        raise ShapeError(
            f"The batch has {rows} sequences and the state {state_rows}",
            expected="equal numbers",
            advice="Start without a state, or choose its rows with state.select",
            code="state_of_other_batch",
        )


def head_width(name: str, dim: int, heads: int, width: int | None) -> int:
    """Return the width of a head: `width`, or dim / heads if it is None."""
    require_positive(dim=dim, heads=heads, **({} if width is None else {name: width}))
    if width is None and dim % heads:
        raise ShapeError(
            f"A width of {dim} cannot be split evenly into {heads} heads",
            expected=f"a number of heads that divides {dim}",
            advice=f"Change the number of heads, or choose {{{name}}}",
            settings={name: None},
            code="indivisible_heads",
        )
    return dim // heads if width is None else width


def shared_key_heads(heads: int, key_heads: int | None) -> int:
    """Return the number of key heads: `key_heads`, or one for each head if it is None."""
    count = heads if key_heads is None else key_heads
    require_positive(key_heads=count)
    if heads % count:
        raise ShapeError(
            f"{heads} heads cannot share {count} key heads evenly",
            expected=f"a number of key heads that divides {heads}",
            code="indivisible_key_heads",
        )
    return count
