"""Where the tokens of a program are, and where what belongs to a chunk is stored.

A sequence is cut in chunks of C tokens. What a kernel leaves for the next one is stored by chunk, [chunks, H, …], the
chunks of one sequence in order and sequences in order. Each packed sequence starts a new chunk, so there are at most
T // C + N of them: a bound that is known without waiting for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.inputs import ScanInputs


class Places(NamedTuple):
    """The chunks of some sequences, as arguments of `chunk_at` and `sequence_at`."""

    boundaries: Tensor | None  # [N + 1] first token of each packed sequence
    first: Tensor | None  # [N + 1] first chunk of each packed sequence
    owner: Tensor | None  # [chunks] the packed sequence that a chunk belongs to; N for an unused one
    length: int  # T: tokens per row, all packed sequences together
    chunks: int  # per row

    @classmethod
    def of(cls, inputs: ScanInputs, size: int) -> Places:
        length, boundaries = inputs.length, inputs.cu_seqlens
        if boundaries is None:
            return cls(None, None, None, length, -(-length // size))
        chunks = length // size + inputs.sequences
        first = torch.zeros_like(boundaries)
        first[1:] = ((boundaries.diff() + size - 1) // size).cumsum(0)
        owner = torch.searchsorted(first[1:], torch.arange(chunks, device=first.device, dtype=first.dtype), right=True)
        return cls(boundaries, first, owner, length, chunks)


@triton.jit
def chunks_in_use(first, NT, N, PACKED: tl.constexpr):
    """Return how many chunks a row has: for packed sequences, fewer than there is room for."""
    if PACKED:
        count = tl.load(first + N).to(tl.int32)
    else:
        count = NT
    return count


@triton.jit
def chunk_at(chunk, row, boundaries, first, owner, T, PACKED: tl.constexpr):
    """Return, for a chunk of a row, its sequence's first token and length, and its number in the sequence."""
    if PACKED:
        n = tl.load(owner + chunk)
        begin = tl.load(boundaries + n).to(tl.int64)
        length = (tl.load(boundaries + n + 1) - begin).to(tl.int32)
        number = (chunk - tl.load(first + n)).to(tl.int32)
    else:
        begin, length, number = row.to(tl.int64) * T, T, chunk
    return begin, length, number


@triton.jit
def sequence_at(n, boundaries, first, T, NT, PACKED: tl.constexpr):
    """Return a sequence's first token, its length, and its first chunk."""
    if PACKED:
        begin = tl.load(boundaries + n).to(tl.int64)
        length = (tl.load(boundaries + n + 1) - begin).to(tl.int32)
        chunk = tl.load(first + n).to(tl.int64)
    else:
        begin, length, chunk = n.to(tl.int64) * T, T, n.to(tl.int64) * NT
    return begin, length, chunk


@triton.jit
def load_rows(x, begin, row, length, head, heads, D: tl.constexpr, first, size: tl.constexpr, rows: tl.constexpr):
    """Load a tile [rows, size] of x [tokens, heads, D]: tokens from `row` of a sequence, columns from `first`, zeros
    past the edges."""
    line, column = tl.arange(0, rows), first + tl.arange(0, size)
    at = x + ((begin + row) * heads + head) * D + (line[:, None] * (heads * D) + column[None, :])  # one long number
    mask = (row + line < length)[:, None]
    if D % size != 0:
        mask = mask & (column < D)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_rows(
    x, tile, begin, row, length, head, heads, D: tl.constexpr, first, size: tl.constexpr, rows: tl.constexpr
):
    """Store what the corresponding load would read."""
    line, column = tl.arange(0, rows), first + tl.arange(0, size)
    at = x + ((begin + row) * heads + head) * D + (line[:, None] * (heads * D) + column[None, :])  # one long number
    mask = (row + line < length)[:, None]
    if D % size != 0:
        mask = mask & (column < D)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(
    x, place, first_row, first_column, R: tl.constexpr, D: tl.constexpr, rows: tl.constexpr, size: tl.constexpr
):
    """Load a tile [rows, size] of the `place`-th matrix [R, D] of x; zeros past its edges."""
    row = first_row + tl.arange(0, rows)
    column = first_column + tl.arange(0, size)
    at = x + place * (R * D) + row[:, None] * D + column[None, :]
    if R % rows != 0 or D % size != 0:
        return tl.load(at, mask=(row < R)[:, None] & (column < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def store_tile(
    x, tile, place, first_row, first_column, R: tl.constexpr, D: tl.constexpr, rows: tl.constexpr, size: tl.constexpr
):
    """Store what the corresponding load would read."""
    row = first_row + tl.arange(0, rows)
    column = first_column + tl.arange(0, size)
    at = x + place * (R * D) + row[:, None] * D + column[None, :]
    if R % rows != 0 or D % size != 0:
        tl.store(at, tile.to(x.dtype.element_ty), mask=(row < R)[:, None] & (column < D)[None, :])
    else:
        tl.store(at, tile.to(x.dtype.element_ty))
