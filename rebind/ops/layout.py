"""Where the tokens of each chunk lie.

Every sequence is cut in chunks of `size` tokens, the last one filled up with zeros. Chunks that can be worked on
at the same time form a *wave*: wave w holds the w-th chunk of every sequence that has one, longest sequences
first, so that a wave's states are always the first few. Waves follow one another; the chunks of some consecutive
waves form a *group*, small enough for what is computed from it to stay in the cache.

    sequences of 5, 2 and 3 chunks:     wave   0 0 0  1 1 1  2 2  3  4
                                    sequence   0 2 1  0 2 1  0 2  0  0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.ops.inputs import Inputs, check_boundary_values

# Numbers in a group's largest tensor, about: what a core's cache holds several of, or what keeps a GPU busy.
CACHED, BUSY = 2**17, 2**25


@dataclass(frozen=True)
class Group:
    """Some consecutive waves."""

    first_wave: int
    first: int  # index of the first chunk
    waves: tuple[int, ...]  # how many chunks each wave has

    @property
    def chunks(self) -> int:
        return sum(self.waves)


class Layout(ABC):
    """Sequences as waves of chunks. Chunks come as [chunks · H, size, D], states as [N · H, Dv, Dk]."""

    size: int
    heads: int
    sharing: int
    groups: list[Group]

    @staticmethod
    def of(inputs: Inputs, size: int) -> Layout:
        return _Rows(inputs, size) if inputs.cu_seqlens is None else _Packed(inputs, size)

    @abstractmethod
    def load(self, x: Tensor, group: Group, into: Tensor) -> Tensor:
        """Copy a group's part of x [B, T, H or Hk, D] `into` [chunks · H, size, D], zeros past a sequence's end."""

    @abstractmethod
    def store(self, chunks: Tensor, x: Tensor, group: Group) -> None:
        """The way back; where value heads share a key head their chunks are added up."""

    @abstractmethod
    def in_waves(self, state: Tensor) -> Tensor:
        """States [N, H, Dv, Dk] in the order of the waves: a new [N · H, Dv, Dk]."""

    @abstractmethod
    def in_order(self, state: Tensor) -> Tensor:
        """States [N · H, Dv, Dk] in the order they were given: [N, H, Dv, Dk]."""

    def _group(self, counts: list[int], inputs: Inputs) -> list[Group]:
        """Consecutive waves of `counts` chunks in groups that are small enough, of one wave at least."""
        room = CACHED if inputs.v.device.type == "cpu" else BUSY
        widest = max(self.size, inputs.k.shape[3], inputs.v.shape[3])
        most = max(room // max(self.heads * self.size * widest, 1), 1)
        groups = [Group(0, 0, ())]
        for wave, count in enumerate(counts):
            last = groups[-1]
            if last.waves and last.chunks + count > most:
                groups.append(Group(wave, last.first + last.chunks, (count,)))
            else:
                groups[-1] = Group(last.first_wave, last.first, (*last.waves, count))
        return [group for group in groups if group.waves]

    def _fold(self, chunks: Tensor, heads: int) -> Tensor:
        """[chunks · H, size, D] as [chunks, heads, size, D], added up where heads < H."""
        split = chunks.unflatten(0, (-1, heads, self.heads // heads))
        return split.squeeze(2) if heads == self.heads else split.sum(2)


class _Rows(Layout):
    """Every row of the batch is a sequence of T tokens: chunks are slices."""

    def __init__(self, inputs: Inputs, size: int) -> None:
        self.size, self.heads = size, inputs.heads
        self.rows, self.length = inputs.q.shape[0], inputs.length
        waves = -(-self.length // size) if self.rows else 0
        self.groups = self._group([self.rows] * waves, inputs)

    def load(self, x: Tensor, group: Group, into: Tensor) -> Tensor:
        heads = x.shape[2]
        chunks = into.view(len(group.waves), self.rows, heads, self.heads // heads, *into.shape[1:])
        for tokens, here in self._slices(x, group):
            held = tokens.shape[2]
            chunks[here, :, :, :, :held] = tokens.permute(0, 1, 3, 2, 4).unsqueeze(3)
            if held < self.size:
                chunks[here, :, :, :, held:] = 0
        return into

    def store(self, chunks: Tensor, x: Tensor, group: Group) -> None:
        folded = self._fold(chunks, x.shape[2]).unflatten(0, (-1, self.rows))
        for tokens, here in self._slices(x, group):
            tokens.copy_(folded[here][:, :, :, : tokens.shape[2]].permute(0, 1, 3, 2, 4))

    def in_waves(self, state: Tensor) -> Tensor:
        return state.flatten(0, 1).clone()

    def in_order(self, state: Tensor) -> Tensor:
        return state.view(self.rows, self.heads, *state.shape[1:])

    def _slices(self, x: Tensor, group: Group) -> list[tuple[Tensor, slice]]:
        """Views [waves, B, tokens, H, D] of a group's whole chunks and of a last part of one, with their place."""
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


class _Packed(Layout):
    """Sequences laid end to end: chunks are gathered. The boundaries are read on the host, which waits for a GPU."""

    def __init__(self, inputs: Inputs, size: int) -> None:
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
        self.groups = self._group(active, inputs)
        # For every chunk, in order of waves: its first token, and how many of its tokens there are.
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
