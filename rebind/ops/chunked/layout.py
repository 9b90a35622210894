"""The order in which a chunked scan processes the chunks of all sequences.

Every sequence is cut in chunks of `size` tokens, the last one filled up with zeros. Chunks that can be processed at the
same time form a *wave*: wave w holds the w-th chunk of every sequence that has one, longest sequences first, so that
the states of a wave are always the first few. Waves follow one another; the chunks of some consecutive waves form a
*group*, small enough for what is computed from it to stay in the cache.

    sequences of 5, 2 and 3 chunks:     wave   0 0 0  1 1 1  2 2  3  4
                                    sequence   0 2 1  0 2 1  0 2  0  0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.ops.inputs import ScanInputs, check_boundary_values

# Approximate size of a group's largest tensor: a core's cache holds several of the first; the second keeps a GPU busy.
CPU_GROUP, GPU_GROUP = 2**17, 2**25


@dataclass(frozen=True)
class Group:
    """Some consecutive waves."""

    first_wave: int
    first: int  # index of the first chunk
    waves: tuple[int, ...]  # number of chunks in each wave

    @property
    def chunks(self) -> int:
        return sum(self.waves)

    def rows(self, heads: int) -> slice:
        """Where the group is among all chunks of so many heads, [chunks · H, …]."""
        return slice(self.first * heads, (self.first + self.chunks) * heads)


class Workspace:
    """Memory for what is computed from a group, which the next group overwrites.

    Memory that is fresh costs more than what is computed into it: the system hands it out in zeroed pages, and it is
    not in the cache.
    """

    def __init__(self, inputs: ScanInputs) -> None:
        self.dtype, self.device = inputs.working_dtype, inputs.v.device
        self.buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor, in the memory of the last one of this name."""
        numel, buffer = math.prod(shape), self.buffers.get(name)
        if buffer is None or len(buffer) < numel:
            buffer = self.buffers[name] = torch.empty(numel, dtype=dtype or self.dtype, device=self.device)
        return buffer[:numel].view(shape)


def layout_of(inputs: ScanInputs, size: int, group_size: int | None = None) -> Layout:
    """Return the layout of these inputs in chunks of `size` tokens and groups of about `group_size` numbers."""
    group_size = group_size or (CPU_GROUP if inputs.v.device.type == "cpu" else GPU_GROUP)
    return (Layout if inputs.cu_seqlens is None else PackedLayout)(inputs, size, group_size)


class Layout:
    """Sequences as waves of chunks: [chunks · H, size, width] for tokens, [N · H, d_v, d_k] for states.

    Here every row of the batch is a sequence of T tokens, and chunks are slices.
    """

    def __init__(self, inputs: ScanInputs, size: int, group_size: int) -> None:
        self.size, self.heads = size, inputs.heads
        self.rows, self.length = inputs.q.shape[0], inputs.length
        waves = -(-self.length // size) if self.rows else 0
        self.groups = self._group([self.rows] * waves, inputs, group_size)

    def load(self, x: Tensor, group: Group, into: Tensor) -> Tensor:
        """Copy a group's part of x [B, T, H or H_k, width] `into` [chunks · H, size, width], zeros past the end."""
        heads = x.shape[2]
        chunks = into.view(len(group.waves), self.rows, heads, self.heads // heads, *into.shape[1:])
        for tokens, here in self._slices(x, group):
            count = tokens.shape[2]
            chunks[here, :, :, :, :count] = tokens.permute(0, 1, 3, 2, 4).unsqueeze(3)
            if count < self.size:
                chunks[here, :, :, :, count:] = 0
        return into

    def store(self, chunks: Tensor, x: Tensor, group: Group) -> None:
        """Copy chunks back into x; chunks of value heads that share a key head are added up."""
        folded = self._fold(chunks, x.shape[2]).unflatten(0, (-1, self.rows))
        for tokens, here in self._slices(x, group):
            tokens.copy_(folded[here][:, :, :, : tokens.shape[2]].permute(0, 1, 3, 2, 4))

    @property
    def whole(self) -> Group:
        """All waves."""
        return Group(0, 0, tuple(count for group in self.groups for count in group.waves))

    def in_waves(self, state: Tensor) -> Tensor:
        """Return states [N, H, d_v, d_k] in the order of the waves: a new [N · H, d_v, d_k]."""
        return state.flatten(0, 1).clone()

    def in_order(self, state: Tensor) -> Tensor:
        """Return states [N · H, d_v, d_k] in their original order: [N, H, d_v, d_k]."""
        return state.view(self.rows, self.heads, *state.shape[1:])

    def _slices(self, x: Tensor, group: Group) -> list[tuple[Tensor, slice]]:
        """Return views [waves, B, tokens, H, width] of a group's whole chunks and of a last partial one."""
        begin = group.first_wave * self.size
        end = min(begin + len(group.waves) * self.size, self.length)
        whole, rest = divmod(end - begin, self.size)
        parts = []
        if whole:
            tokens = x[:, begin : begin + whole * self.size].unflatten(1, (whole, self.size))
            parts.append((tokens.transpose(0, 1), slice(0, whole)))
        if rest:
            parts.append((x[:, end - rest : end].unsqueeze(0), slice(whole, whole + 1)))
        return parts

    def _group(self, counts: list[int], inputs: ScanInputs, group_size: int) -> list[Group]:
        """Put consecutive waves of `counts` chunks in groups that are small enough, of at least one wave."""
        widest = max(self.size, inputs.d_k, inputs.d_v)
        most = max(group_size // max(self.heads * self.size * widest, 1), 1)
        groups = [Group(0, 0, ())]
        for wave, count in enumerate(counts):
            last = groups[-1]
            if last.waves and last.chunks + count > most:
                groups.append(Group(wave, last.first + last.chunks, (count,)))
            else:
                groups[-1] = Group(last.first_wave, last.first, (*last.waves, count))
        return [group for group in groups if group.waves]

    def _fold(self, chunks: Tensor, heads: int) -> Tensor:
        """Return [chunks · H, size, width] as [chunks, heads, size, width], added up if heads < H."""
        split = chunks.unflatten(0, (-1, heads, self.heads // heads))
        return split.squeeze(2) if heads == self.heads else split.sum(2)


class PackedLayout(Layout):
    """Sequences laid end to end: chunks are gathered. Reading the boundaries on the host waits for a GPU."""

    def __init__(self, inputs: ScanInputs, size: int, group_size: int) -> None:
        assert inputs.cu_seqlens is not None
        self.size, self.heads = size, inputs.heads
        device = inputs.q.device
        bounds = inputs.cu_seqlens.tolist()
        check_boundary_values(bounds, inputs.length)
        begins = torch.tensor(bounds[:-1], dtype=torch.long)
        lengths = torch.tensor(bounds, dtype=torch.long).diff()
        counts = -(-lengths // size)
        order = torch.argsort(counts, descending=True, stable=True)
        self.order = order.to(device)
        waves = int(counts.max()) if len(counts) else 0
        active = [int((counts > wave).sum()) for wave in range(waves)]
        self.groups = self._group(active, inputs, group_size)
        # For every chunk, in the order of waves: its tokens, and which of them exist.
        sequence = torch.cat([order[:count] for count in active]) if active else order[:0]
        wave = torch.repeat_interleave(torch.arange(waves), torch.tensor(active, dtype=torch.long))
        offset = wave * size + torch.arange(size)[:, None]  # [size, chunks]
        self.real = (offset < lengths[sequence]).T.contiguous().to(device)  # [chunks, size]
        self.tokens = (begins[sequence] + offset).T.contiguous().to(device)

    def load(self, x: Tensor, group: Group, into: Tensor) -> Tensor:
        tokens, real = self._places(group)
        heads = x.shape[2]
        picked = x[0].index_select(0, tokens.where(real, 0).flatten()).masked_fill_(~real.view(-1, 1, 1), 0)
        chunks = into.view(group.chunks, heads, self.heads // heads, *into.shape[1:])
        chunks.copy_(picked.view(-1, self.size, *x.shape[2:]).transpose(1, 2).unsqueeze(2))
        return into

    def store(self, chunks: Tensor, x: Tensor, group: Group) -> None:
        tokens, real = self._places(group)
        folded = self._fold(chunks, x.shape[2]).transpose(1, 2)
        x[0].index_copy_(0, tokens[real], folded[real].to(x.dtype))

    def in_waves(self, state: Tensor) -> Tensor:
        return state.index_select(0, self.order).flatten(0, 1)

    def in_order(self, state: Tensor) -> Tensor:
        split = state.view(-1, self.heads, *state.shape[1:])
        return torch.empty_like(split).index_copy_(0, self.order, split)

    def _places(self, group: Group) -> tuple[Tensor, Tensor]:
        here = slice(group.first, group.first + group.chunks)
        return self.tokens[here], self.real[here]
