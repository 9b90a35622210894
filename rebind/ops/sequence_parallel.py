r"""A scan over a sequence that is split over processes, each of which holds one segment of it.

A token maps the memory to W diag(d) (I − ε p eᵀ) + η v kᵀ: an affine map, and so is a whole segment,

    W_end = W_start M + U        M [d_k, d_k], U [d_v, d_k]

Segments compose like writes (law 1 of docs/algebra.md): one process after another would pass W on, and here all of them
exchange (M, U) once and compose those before their own. That is exact: there is no approximation in it.

One scan finds everything that a segment needs. Start it from zeros with d_k further rows of the memory, which start as
the identity and whose values are 0: these rows end as M, the others as U. At each token the further rows read
r_t = M_{1…t} q_t, and linearity gives the output of the real start,

    o_t = (output from zeros)_t + W_start r_t

Without an erase M is diagonal, the product of the decays, and needs no further rows.

The backward pass runs along the same chain, from the last segment to the first. With S_j the memory before segment j,
g_j the gradient with respect to S_j, and ∂_j what segment j itself contributes to it,

    g_n = gradient of the final memory      ∂U_j = g_{j+1}      ∂M_j = S_jᵀ g_{j+1}      g_j = ∂_j + g_{j+1} M_jᵀ
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.ops.scan import scan


@dataclass(frozen=True, eq=False)
class SequenceSplit:
    """The processes that hold one sequence, in the order of its segments. All must call the same functions."""

    group: Any = None  # a process group; None: all processes
    rank: int = 0  # the segment of this process
    count: int = 1

    @classmethod
    def of(cls, group: Any = None) -> SequenceSplit:
        """Return the split of a sequence over the processes of a group; None means all of them."""
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which have the same shape."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        distributed.all_gather(parts, x.contiguous(), group=self.group)
        return parts


# Of this process, not of a thread or a context: backward passes of a GPU run in threads of their own, and compilers
# cannot read the variable of a context.
_current: SequenceSplit | None = None


def current_split() -> SequenceSplit | None:
    """Return how the sequences that layers read are split; None outside of `split_sequence`."""
    return _current


@contextmanager
def split_sequence(split: SequenceSplit | None) -> Iterator[None]:
    """Run layers of `rebind.nn` on a segment of a sequence, the others of which are in other processes.

    Backward passes belong into the block if they compute activations again (gradient checkpointing).
    """
    global _current
    before, _current = _current, split
    try:
        yield
    finally:
        _current = before


def scan_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    split: SequenceSplit,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
    state: Tensor | None = None,
    normalize: bool = False,
    chunk: int | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run `scan` on a segment of a sequence; return its output, and the memories after the last segment.

    The arguments are those of `scan`, each for the tokens of this segment; `split` are the processes that hold the
    segments. `state` are the memories before the first segment, the same in every process, and its gradient arrives
    in the first one. With `mini_batch`, every segment but the last must be a multiple of it.
    """
    _check_mini_batch(q, mini_batch, split)
    wide = working_dtype(v)
    if normalize:
        q, k, v = q.to(wide), k.to(wide), functional.pad(v.to(wide), (0, 1), value=1.0)
    options = {"write": write, "chunk": chunk, "mini_batch": mini_batch, "backend": backend}
    if erase is None and probe is None and erase_key is None:
        out, end = scan(q, k, v, log_decay=log_decay, **options)  # type: ignore[arg-type]
        reads, decay = _decayed_queries(q, v, log_decay, wide)
        segment = torch.cat([end, decay.unsqueeze(-2)], dim=-2)
    else:
        d_v, d_k = v.shape[-1], k.shape[-1]
        rows = torch.eye(d_k, dtype=wide, device=v.device).expand(len(v), v.shape[2], d_k, d_k)
        start = torch.cat([rows.new_zeros(len(v), v.shape[2], d_v, d_k), rows], dim=-2)
        erases: dict[str, Any] = {"log_decay": log_decay, "erase": erase, "probe": probe, "erase_key": erase_key}
        erases["probe_before_decay"] = probe_before_decay
        both, segment = scan(q, k, functional.pad(v, (0, d_k)), state=start, **erases, **options)  # type: ignore[arg-type]
        out, reads = both.split([d_v, d_k], dim=-1)
    before = segment.new_zeros(*segment.shape[:2], v.shape[-1], k.shape[-1]) if state is None else state.to(wide)
    start, final = _Compose.apply(segment, before, split)  # type: ignore[no-untyped-call]
    out = out.to(wide) + torch.einsum("bhvk,bthk->bthv", start, reads.to(wide))
    if normalize:
        out = out[..., :-1] / out[..., -1:]
    return out.to(v.dtype), final


def _decayed_queries(q: Tensor, v: Tensor, log_decay: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return diag(d_1 ⋯ d_t) q_t for every token [B, T, H, d_k], and the product of all decays [B, H, d_k]."""
    reads = q.to(wide).repeat_interleave(v.shape[2] // q.shape[2], dim=2)
    if log_decay is None:
        return reads, reads.new_ones(len(q), v.shape[2], q.shape[-1])
    total = log_decay.to(wide).cumsum(1).exp()
    total = total.unsqueeze(-1) if total.ndim == 3 else total
    return reads * total, total[:, -1].expand(-1, -1, q.shape[-1])


def _check_mini_batch(q: Tensor, mini_batch: int | None, split: SequenceSplit) -> None:
    if mini_batch is not None and split.rank < split.count - 1 and q.shape[1] % mini_batch:
        expected = f"a multiple of the mini-batch, {mini_batch}"
        raise InputError(f"A segment has {q.shape[1]} tokens", expected=expected, code="mini_batch_crosses_segments")


def _apply(memory: Tensor, segment: Tensor) -> Tensor:
    """Return W M + U of a segment [U; M], in which a diagonal M is a single row."""
    add, by = segment.split([memory.shape[-2], segment.shape[-2] - memory.shape[-2]], dim=-2)
    return (memory * by if _is_diagonal(by) else memory @ by) + add


def _is_diagonal(by: Tensor) -> bool:
    return by.shape[-2] == 1


class _Compose(torch.autograd.Function):
    """From the map of each process's segment to the memory before this one's, and to that after the last."""

    @staticmethod
    def forward(ctx: Any, segment: Tensor, state: Tensor, split: SequenceSplit) -> tuple[Tensor, Tensor]:
        segments = split.all_gather(segment)
        states = [state]
        for one in segments:
            states.append(_apply(states[-1], one))
        ctx.split, ctx.count = split, len(segments)
        ctx.save_for_backward(*segments, *states[:-1])
        return states[split.rank].clone(), states[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_start: Tensor, d_final: Tensor) -> tuple[Tensor, Tensor, None]:
        segments, states = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        gathered = ctx.split.all_gather(torch.stack([d_start, d_final]))
        slope = torch.stack([one[1] for one in gathered]).sum(0)  # every process may have read the final memory
        d_segment = torch.zeros_like(segments[0])
        for rank in reversed(range(ctx.count)):
            by = segments[rank][..., slope.shape[-2] :, :]
            if rank == ctx.split.rank:
                d_by = (states[rank] * slope).sum(-2, keepdim=True) if _is_diagonal(by) else states[rank].mT @ slope
                d_segment = torch.cat([slope, d_by], dim=-2)
            slope = gathered[rank][0] + (slope * by if _is_diagonal(by) else slope @ by.mT)
        return d_segment, slope if ctx.split.rank == 0 else torch.zeros_like(slope), None


# What other parts of a layer need of the segments before their own


def previous_tokens(x: Tensor, before: Tensor, split: SequenceSplit) -> Tensor:
    """Return the last n tokens of the segment before x [B, T, C], which a convolution over n + 1 tokens needs.

    The first segment has none before it, and gets `before` [B, n, C].
    """
    if x.shape[1] < before.shape[1]:
        problem = f"A segment has {x.shape[1]} tokens, and the next one needs {before.shape[1]} of them"
        raise InputError(problem, advice="Use fewer processes per sequence", code="segment_too_short")
    if not before.shape[1]:
        return before
    tail = x[:, x.shape[1] - before.shape[1] :]
    out: Tensor = _Previous.apply(tail, before.to(x.dtype), split)  # type: ignore[no-untyped-call]
    return out


class _Previous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tail: Tensor, before: Tensor, split: SequenceSplit) -> Tensor:
        ctx.split = split
        tails = split.all_gather(tail)
        return before.clone() if split.rank == 0 else tails[split.rank - 1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        split, slopes = ctx.split, ctx.split.all_gather(slope)
        nothing = torch.zeros_like(slope)
        d_tail = slopes[split.rank + 1] if split.rank + 1 < split.count else nothing
        return d_tail, slope if split.rank == 0 else nothing, None


def tokens_before(x: Tensor, split: SequenceSplit, dim: int) -> Tensor:
    """Return the tokens of all segments before this one, along a dimension; segments have the same length.

    Attention needs them: the keys and values of a whole sequence must fit on every device.
    """
    out: Tensor = _Before.apply(x, split, dim)  # type: ignore[no-untyped-call]
    return out


class _Before(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: SequenceSplit, dim: int) -> Tensor:
        ctx.split, ctx.dim, ctx.length = split, dim, x.shape[dim]
        parts = split.all_gather(x)
        return torch.cat([x.narrow(dim, 0, 0), *parts[: split.rank]], dim=dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        split, dim, length = ctx.split, ctx.dim, ctx.length
        shape = list(slope.shape)
        shape[dim] = length * split.count
        everything = slope.new_zeros(shape)
        everything.narrow(dim, 0, length * split.rank).copy_(slope)
        distributed.all_reduce(everything, group=split.group)
        return everything.narrow(dim, length * split.rank, length).contiguous(), None, None
