"""The recurrence, one chunk of C tokens at a time, with the backward pass written out by hand.

A token's write is W_t = W~_t + u_t k_tᵀ with W~_t = W_{t−1} diag(d_t) and u_t = η_t v_t − ε_t W~_t p_t: what it adds at
its key. Unrolled over a chunk that starts from W, with G_i = d_1 ⊙ ⋯ ⊙ d_i and tokens as rows,

    W~_t = W diag(G_t) + Σ_{j<t} u_j (G_t/G_j ⊙ k_j)ᵀ

Queries and probes both read it, a query after its token's write and a probe before. With rows X = [Q; −diag(ε) P] for
both and the scores s_ij = x_i · (G_i/G_j ⊙ k_j), which `decay` computes, S_Q = tril(s) of queries and S_P =
tril(s, −1) of probes,

    (I − S_P) U = diag(η) V + X_P^ Wᵀ          X^ = X ⊙ G
    O  = X_Q^ Wᵀ + S_Q U
    W' = W diag(G_C) + Uᵀ K^                   K^_j = G_C/G_j ⊙ k_j

With one decay per token, d = α, and p = k this is the WY form of DeltaNet's chunks. ε = 0 leaves no system to solve,
and so does the definition of a mini-batch: all of its tokens read the first W.

**Backward.** Given Ō and W̄', with R the right-hand side of the system and T = (I − S_P)⁻¹,

    Ū = S_Qᵀ Ō + K^ W̄'ᵀ          R̄ = Tᵀ Ū          V̄ = diag(η) R̄          η̄_i = R̄_i·V_i
    W̄ = W̄' diag(G_C) + Eᵀ X^                        E = [Ō; R̄]

because R̄ is to probes what Ō is to queries: the adjoint of the triangular system is s̄_P = tril(R̄ Uᵀ, −1), no product of
three C × C matrices. So with links L = E Uᵀ, lower triangular, everything else is the pull-back of the scores and of X^
and K^, which `decay` also computes:

    x̄_i = Σ_j l_ij G_i/G_j ⊙ k_j + G_i ⊙ (E W)_i          k̄_j = Σ_i l_ij G_i/G_j ⊙ x_i + G_C/G_j ⊙ (U W̄')_j
    Q̄ = X̄_Q          P̄ = −diag(ε) X̄_P          ε̄_i = −X̄_P,i · P_i

and P̄ is part of K̄ where keys are the probes. The gradient of ln d is derived in `decay`.

What grows with T is the inputs, the output, T and the state at the start of each chunk. All else is computed for one
group of chunks (see `layout`) and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.ops.chunked.decay import ChunkDecay, DecayPerChannel, DecayPerToken, Undecayed
from rebind.ops.chunked.layout import Group, Layout, layout_of
from rebind.ops.inputs import Gradients, ScanInputs


class Chunked:
    """The chunk form in plain torch: the backend of CPUs, and of every device without kernels."""

    name = "chunked"

    def __init__(self, group_size: int | None = None) -> None:
        self.group_size = group_size  # of a group's largest tensor; None: what suits the device

    def forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        layout = layout_of(inputs, _size(inputs), self.group_size)
        saved = _Saved.empty(inputs) if inputs.keep else _Saved()
        out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
        state = None if _starts_afresh(inputs, layout) else layout.in_waves(_zeros(inputs, inputs.state))
        for group in layout.groups:
            chunks = _Chunks.load(inputs, layout, group)
            part, state = _forward(chunks, saved.of(group, inputs.heads), state)
            layout.store(part, out, group)
        assert state is not None
        return out, layout.in_order(state), saved.tensors

    def saved_like(self, inputs: ScanInputs) -> list[Tensor]:
        return _Saved.empty(inputs).tensors if inputs.keep else []

    def backward(self, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        layout = layout_of(inputs, _size(inputs), self.group_size)
        from_forward = _Saved(*saved)
        grads = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.tensors[:-1]
        ]
        fresh = _starts_afresh(inputs, layout)
        d_state = None if fresh and d_final is None else layout.in_waves(_zeros(inputs, d_final))
        for group in reversed(layout.groups):
            chunks = _Chunks.load(inputs, layout, group)
            errors = chunks.X.new_empty(*chunks.X.shape[:2], inputs.d_v)
            layout.load(d_out, group, errors[:, : layout.size])
            part_of_saved = from_forward.of(group, inputs.heads)
            parts = _backward(chunks, None if fresh else part_of_saved.starts, part_of_saved.inverse, errors, d_state)
            for grad, part in zip(grads, parts, strict=True):
                if grad is not None and part is not None:
                    layout.store(part, grad if grad.ndim == 4 else grad.unsqueeze(-1), group)
        return *grads, None if inputs.state is None or d_state is None else layout.in_order(d_state)


CHUNKED = Chunked()


def _size(inputs: ScanInputs) -> int:
    """Return the number of tokens per chunk, no more than there are; with a decay per channel, a power of two.

    Work inside a chunk grows with its size; the number of states and of steps falls. For narrow heads on a CPU, where
    a step costs little, small chunks win: measured at widths 16 to 256. Packed sequences have chunks of their average
    length if that is less, for the last chunk of each is filled up: a size may not depend on the boundaries.
    """
    narrow = max(inputs.d_k, inputs.d_v) <= 64
    best = 32 if narrow and inputs.v.device.type == "cpu" else 64
    length = inputs.length if inputs.cu_seqlens is None else -(-inputs.length // max(inputs.sequences, 1))
    if inputs.mini_batch is not None:
        return min(inputs.mini_batch, max(inputs.length, 1))
    size = min(inputs.chunk or best, max(length, 1))
    return size if not inputs.by_channel else 1 << (int(size) - 1).bit_length()


def _starts_afresh(inputs: ScanInputs, layout: Layout) -> bool:
    """Return whether no chunk starts from a state that could differ from zero: sequences of one chunk, no states."""
    return inputs.state is None and len(layout.groups) == 1 and len(layout.groups[0].waves) == 1


def _zeros(inputs: ScanInputs, given: Tensor | None) -> Tensor:
    """Return states or their gradients, zeros where there are none."""
    if given is not None:
        return given
    return torch.zeros(inputs.state_shape, dtype=inputs.working_dtype, device=inputs.v.device)


@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs again, chunks in the order of the layout."""

    starts: Tensor | None = None  # [chunks · H, d_v, d_k]: the state before each chunk
    inverse: Tensor | None = None  # [chunks · H, C, C]: T, where there is a system to solve

    @classmethod
    def empty(cls, inputs: ScanInputs) -> _Saved:
        size = _size(inputs)
        n, h, d_v, d_k = inputs.state_shape
        # For packed sequences, the largest possible number of chunks: a shape may not depend on the boundaries.
        chunks = n * -(-inputs.length // size) if inputs.cu_seqlens is None else inputs.length // size + n
        afresh = inputs.state is None and inputs.cu_seqlens is None and inputs.length <= size
        count = 0 if afresh else chunks * h
        starts = torch.empty((count, d_v, d_k), dtype=inputs.working_dtype, device=inputs.v.device)
        return cls(starts, starts.new_empty((chunks * h, size, size)) if inputs.solves else None)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.starts, self.inverse) if x is not None]

    def of(self, group: Group, heads: int) -> _Saved:
        """Return the part of one group."""
        here = slice(group.first * heads, (group.first + group.chunks) * heads)
        return _Saved(*(x[here] for x in self.tensors))


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a group: n of them, heads included. R is 2C if something is erased, else C."""

    X: Tensor  # [n, R, d_k] queries, and −ε times probes
    K: Tensor  # [n, C, d_k]
    V: Tensor  # [n, C, d_v]
    P: Tensor | None  # [n, C, d_k] probes; None: nothing is erased
    erase: Tensor | None  # [n, C, 1]
    write: Tensor | None  # [n, C, 1]
    decay: ChunkDecay
    decays: bool
    solves: bool  # whether a token reads what the chunk's earlier ones have written
    waves: list[int]  # number of chunks in each wave

    @classmethod
    def load(cls, inputs: ScanInputs, layout: Layout, group: Group) -> _Chunks:
        n, size = group.chunks * inputs.heads, layout.size

        def load(x: Tensor | None, width: int, into: Tensor | None = None) -> Tensor | None:
            if x is None:
                return None
            shape = (n, size, width)
            into = torch.empty(shape, dtype=inputs.working_dtype, device=x.device) if into is None else into
            return layout.load(x if x.ndim == 4 else x.unsqueeze(-1), group, into)

        rows = size if inputs.erase is None else 2 * size
        X = torch.empty((n, rows, inputs.d_k), dtype=inputs.working_dtype, device=inputs.v.device)
        load(inputs.q, inputs.d_k, X[:, :size])
        K, V = load(inputs.k, inputs.d_k), load(inputs.v, inputs.d_v)
        assert K is not None
        assert V is not None
        erase, P = load(inputs.erase, 1), None
        if erase is not None:
            P = K if inputs.probe is None else load(inputs.probe, inputs.d_k)
            assert P is not None
            torch.mul(P, -erase, out=X[:, size:])
        log = load(inputs.log_decay, inputs.d_k if inputs.by_channel else 1)
        decay: ChunkDecay = Undecayed()
        if log is not None:
            decay = DecayPerChannel(log) if inputs.by_channel else DecayPerToken(log.squeeze(-1))
        waves = [count * inputs.heads for count in group.waves]
        return cls(X, K, V, P, erase, load(inputs.write, 1), decay, log is not None, inputs.solves, waves)

    @property
    def size(self) -> int:
        """C: tokens per chunk."""
        return self.V.shape[1]

    @property
    def values(self) -> Tensor:
        """diag(η) V."""
        return self.V if self.write is None else self.V * self.write

    def split(self, *tensors: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Return each wave's part of the tensors [n, …]; None stays None."""
        none = [None] * len(self.waves)
        return list(zip(*(none if x is None else x.split(self.waves) for x in tensors), strict=True))


def _inverse(scores: Tensor, out: Tensor | None) -> Tensor:
    """Return T = (I − S_P)⁻¹ from the scores of probes [n, C, C], of which only the part below the diagonal is read."""
    eye = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device).expand_as(scores)
    # Into a row-major result: more than twice as fast as the column-major one torch would make.
    into = torch.empty_like(eye, memory_format=torch.contiguous_format) if out is None else out
    return torch.linalg.solve_triangular(-scores, eye, upper=False, unitriangular=True, out=into)


def _forward(chunks: _Chunks, saved: _Saved, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output of a group's chunks [n, C, d_v], and the states, which advance in place; None: zeros."""
    C, X, K, decay = chunks.size, chunks.X, chunks.K, chunks.decay
    scores = decay.scores(X if chunks.solves else X[:, :C], K)
    T = _inverse(scores[:, C:], saved.inverse) if chunks.solves else None
    U, write_keys = chunks.values if T is None else torch.bmm(T, chunks.values), decay.until(K)
    if state is None:
        return torch.bmm(scores[:, :C], U), torch.bmm(U.mT, write_keys)
    starts = state.new_empty(len(K), *state.shape[1:]) if saved.starts is None else saved.starts
    reach, total = decay.since(X), decay.total()
    reads = None if chunks.P is None else reach[:, C:] if T is None else torch.bmm(T, reach[:, C:])
    U = U.clone() if U is chunks.V and reads is not None else U
    for start, u, read, write, left in chunks.split(starts, U, reads, write_keys, total):
        W = state[: len(start)]
        start.copy_(W)
        if read is not None:
            u.baddbmm_(read, W.mT)
        if left is not None:
            W.mul_(left)
        W.baddbmm_(u.mT, write)
    return torch.bmm(scores[:, :C], U).baddbmm_(reach[:, :C], starts.mT), state


def _backward(
    chunks: _Chunks, starts: Tensor | None, T: Tensor | None, errors: Tensor, d_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a group's q, k, v, log_decay, erase, write and probe; those of states go back in place.

    `starts` None: chunks start from zeros. `errors` [n, R, d_v] holds Ō, and room for R̄ if something is erased.
    `d_state` None: nothing depends on the last states, and the gradients of the first are not wanted.
    """
    C, X, K, V, decay = chunks.size, chunks.X, chunks.K, chunks.V, chunks.decay
    reach, U = decay.since(X), chunks.values
    if chunks.P is not None and starts is not None:
        U = torch.baddbmm(U, reach[:, C:], starts.mT)
    U = U if T is None else torch.bmm(T, U)
    scores = decay.scores(X if chunks.solves and chunks.decays else X[:, :C], K)
    d_U = torch.bmm(scores[:, :C].mT, errors[:, :C])
    d_ends = None
    if d_state is not None:
        d_ends = _retreat(chunks, T, errors, d_U, d_state, reach)
    elif chunks.P is not None:
        errors[:, C:] = d_U if T is None else torch.bmm(T.mT, d_U)
    d_R = d_U if chunks.P is None else errors[:, C:]

    rows = len(scores[0]) if chunks.decays else len(X[0]) if chunks.solves else C  # a mini-batch's probes read W alone
    links = torch.bmm(errors[:, :rows], U.mT)
    read = later = outer = None
    if starts is not None:
        read = torch.bmm(errors, starts)
        read = decay.since(read, out=read)
    if d_ends is not None:
        later = torch.bmm(U, d_ends)
        later = decay.until(later, out=later)
    if chunks.decays:
        kept = None if starts is None or d_ends is None else d_ends * starts
        outer = decay.outer_gradient(X, read, K, later, kept)
    d_X, d_K = torch.zeros_like(X) if read is None else read, torch.zeros_like(K) if later is None else later
    slope = decay.add_inner_gradients(links, scores, X[:, :rows], K, d_X[:, :rows], d_K)
    slope = slope if outer is None or slope is None else slope.add_(outer)
    d_P = d_erase = None
    if chunks.P is not None:
        d_erase = -(d_X[:, C:] * chunks.P).sum(-1, keepdim=True)
        d_P = d_X[:, C:].mul_(-chunks.erase)  # type: ignore[operator]
        if chunks.P is K:
            d_K, d_P = d_K.add_(d_P), None
    d_write = None if chunks.write is None else (d_R * V).sum(-1, keepdim=True)
    d_V = d_R if chunks.write is None else d_R * chunks.write
    return d_X[:, :C], d_K, d_V, slope, d_erase, d_write, d_P


def _retreat(chunks: _Chunks, T: Tensor | None, errors: Tensor, d_U: Tensor, d_state: Tensor, reach: Tensor) -> Tensor:
    """Return the gradients of the states after each chunk [n, d_v, d_k], last wave first.

    On the way d_U gains what later chunks read, and `errors` gains R̄ = TᵀŪ.
    """
    C, decay = chunks.size, chunks.decay
    d_ends = d_state.new_empty(len(d_U), *d_state.shape[1:])
    waves = chunks.split(d_ends, d_U, T, errors, reach, decay.until(chunks.K), decay.total())
    for d_end, d_u, t, error, reads, write, left in reversed(waves):
        d_W = d_state[: len(d_end)]
        d_end.copy_(d_W)
        d_u.baddbmm_(write, d_W.mT)
        if chunks.P is not None:
            error[:, C:] = d_u if t is None else torch.bmm(t.mT, d_u)
        if left is not None:
            d_W.mul_(left)
        d_W.baddbmm_(error.mT, reads)
    return d_ends
