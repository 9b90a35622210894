"""Where a program's tokens lie, and where what belongs to a chunk is stored.

A sequence is cut in chunks of C tokens. What a kernel leaves for the next is stored by chunk, [chunks, H, …],
the chunks of one sequence in order and sequences in order. Packed sequences begin their chunks anew, so there are
at most T // C + N of them: a bound that is known without waiting for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebind.ops.inputs import Inputs


@dataclass(frozen=True, eq=False)
class Places:
    """The chunks of some sequences."""

    length: int  # T: tokens a row, all packed sequences together
    sequences: int  # N
    rows: int  # B
    chunks: int  # a row
    boundaries: Tensor | None  # [N + 1] first token of each packed sequence
    first: Tensor | None  # [N + 1] first chunk of each packed sequence
    owner: Tensor | None  # [chunks] which packed sequence a chunk belongs to; N for one that is not used

    @classmethod
    def of(cls, inputs: Inputs, size: int) -> Places:
        rows, length = inputs.q.shape[:2]
        if inputs.cu_seqlens is None:
            return cls(length, rows, rows, -(-length // size), None, None, None)
        boundaries = inputs.cu_seqlens
        chunks = length // size + inputs.sequences
        first = torch.zeros_like(boundaries)
        first[1:] = ((boundaries.diff() + size - 1) // size).cumsum(0)
        owner = torch.searchsorted(first[1:], torch.arange(chunks, device=first.device, dtype=first.dtype), right=True)
        return cls(length, inputs.sequences, rows, chunks, boundaries, first, owner)

    @property
    def all_chunks(self) -> int:
        return self.rows * self.chunks

    @property
    def arguments(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, int, int]:
        """What `chunk_at` and `sequence_at` want, in order."""
        return self.boundaries, self.first, self.owner, self.length, self.chunks


@triton.jit
def chunks_in_use(first, NT, N, PACKED: tl.constexpr):
    """How many chunks a row has: of packed sequences, fewer than there is room for."""
    if PACKED:
        count = tl.load(first + N).to(tl.int32)
    else:
        count = NT
    return count


@triton.jit
def chunk_at(chunk, row, boundaries, first, owner, T, PACKED: tl.constexpr):
    """A chunk of a row of the batch: (its sequence's first token and length, its number in the sequence)."""
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
    """A sequence: (its first token, its length, its first chunk)."""
    if PACKED:
        begin = tl.load(boundaries + n).to(tl.int64)
        length = (tl.load(boundaries + n + 1) - begin).to(tl.int32)
        chunk = tl.load(first + n).to(tl.int64)
    else:
        begin, length, chunk = n.to(tl.int64) * T, T, n.to(tl.int64) * NT
    return begin, length, chunk


@triton.jit
def load_rows(x, begin, row, length, head, heads, D: tl.constexpr, first, size: tl.constexpr, rows: tl.constexpr):
    """A tile [rows, size] of x [tokens, heads, D]: tokens from `row` of a sequence, columns from `first`; zeros
    where there is nothing."""
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
    """The way back."""
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
    """A tile [rows, size] of the `place`-th matrix [R, D] of x; zeros past its edges."""
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
    """The way back."""
    row = first_row + tl.arange(0, rows)
    column = first_column + tl.arange(0, size)
    at = x + place * (R * D) + row[:, None] * D + column[None, :]
    if R % rows != 0 or D % size != 0:
        tl.store(at, tile.to(x.dtype.element_ty), mask=(row < R)[:, None] & (column < D)[None, :])
    else:
        tl.store(at, tile.to(x.dtype.element_ty))
