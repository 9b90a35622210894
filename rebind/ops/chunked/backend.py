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

With one decay per token, d = α, and p = k this is the WY form of DeltaNet's chunks. A probe that reads before the decay
has G_{i−1} in place of G_i, in its scores and in X_P^. ε = 0 leaves no system to solve, and so does the definition of a
mini-batch: all of its tokens read the first W.

**Backward.** Given Ō and W̄', with R the right-hand side of the system and T = (I − S_P)⁻¹,

    Ū = S_Qᵀ Ō + K^ W̄'ᵀ          R̄ = Tᵀ Ū          V̄ = diag(η) R̄          η̄_i = R̄_i·V_i
    W̄ = W̄' diag(G_C) + Eᵀ X^                        E = [Ō; R̄]

because R̄ is to probes what Ō is to queries: the adjoint of the triangular system is s̄_P = tril(R̄ Uᵀ, −1), no product of
three C × C matrices. So with links L = E Uᵀ, lower triangular, everything else is the pull-back of the scores and of X^
and K^, which `decay` also computes:

    x̄_i = Σ_j l_ij G_i/G_j ⊙ k_j + G_i ⊙ (E W)_i          k̄_j = Σ_i l_ij G_i/G_j ⊙ x_i + G_C/G_j ⊙ (U W̄')_j
    Q̄ = X̄_Q          P̄ = −diag(ε) X̄_P          ε̄_i = −X̄_P,i · P_i

and P̄ is part of K̄ where keys are the probes. The gradient of ln d is derived in `decay`.

What grows with T is the inputs, the output, T, U and the state at the start of each chunk. All else is computed for one
group of chunks (see `layout`), in memory that the next group uses again.

**Cost.** For keys and values of width d the products of a token are 4 C d + 3 d² multiplications forward (both scores,
T R and S_Q U; both reads and the write) and 10 C d + 6 d² backward, where only the scores are computed again. On a CPU
they take two thirds of the time, and the rest are passes over memory; so C is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.ops.chunked.decay import ChunkDecay, DecayPerChannel, TokenDecays, Undecayed
from rebind.ops.chunked.layout import Group, Layout, Workspace, layout_of
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
        state = None if _starts_afresh(inputs, layout) else layout.in_waves(_or_zeros(inputs, inputs.state))
        loader = _Loader(inputs, layout)
        for group in layout.groups:
            part, state = _forward(loader.chunks(group), saved.of(group, inputs.heads), state)
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
        d_state = None if fresh and d_final is None else layout.in_waves(_or_zeros(inputs, d_final))
        loader = _Loader(inputs, layout)
        numbers = [None if x is None or x.ndim == 4 else loader.empty(1) for x in inputs.tensors[:-1]]
        for group in reversed(layout.groups):
            chunks, here = loader.chunks(group), group.rows(inputs.heads)
            errors = loader.room("errors", *chunks.X.shape[:2], inputs.d_v)
            layout.load(d_out, group, errors[:, : layout.size])
            part_of_saved = from_forward.of(group, inputs.heads)
            parts = _backward(chunks, part_of_saved, None if fresh else part_of_saved.starts, errors, d_state)
            for grad, number, part in zip(grads, numbers, parts, strict=True):
                if number is not None and part is not None:
                    number[here] = part
                elif grad is not None and part is not None:
                    layout.store(part, grad, group)
        for grad, number in zip(grads, numbers, strict=True):
            if grad is not None and number is not None and layout.groups:
                layout.store(number, grad.unsqueeze(-1), layout.whole)
        return *grads, None if inputs.state is None or d_state is None else layout.in_order(d_state)


CHUNKED = Chunked()


def _size(inputs: ScanInputs) -> int:
    """Return the number of tokens per chunk, no more than there are; with a decay per channel, a power of two.

    Work inside a chunk grows with its size; the number of states and of steps falls. On a CPU, where a step costs
    little, small chunks win: measured at widths 16 to 256. Wider heads gain nothing, and their states take memory.
    Packed sequences have chunks of their average length if that is less, for the last chunk of each is filled up: a
    size may not depend on the boundaries.
    """
    narrow = max(inputs.d_k, inputs.d_v) <= 128
    best = 32 if narrow and inputs.v.device.type == "cpu" else 64
    length = inputs.length if inputs.cu_seqlens is None else -(-inputs.length // max(inputs.sequences, 1))
    if inputs.mini_batch is not None:
        return min(inputs.mini_batch, max(inputs.length, 1))
    size = min(inputs.chunk or best, max(length, 1))
    return size if not inputs.by_channel else 1 << (int(size) - 1).bit_length()


def _starts_afresh(inputs: ScanInputs, layout: Layout) -> bool:
    """Return whether no chunk starts from a state that could differ from zero: sequences of one chunk, no states."""
    return inputs.state is None and len(layout.groups) == 1 and len(layout.groups[0].waves) == 1


def _or_zeros(inputs: ScanInputs, states: Tensor | None) -> Tensor:
    """Return states or their gradients, zeros where there are none."""
    if states is not None:
        return states
    return torch.zeros(inputs.state_shape, dtype=inputs.working_dtype, device=inputs.v.device)


@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs again, chunks in the order of the layout."""

    starts: Tensor | None = None  # [chunks · H, d_v, d_k]: the state before each chunk
    U: Tensor | None = None  # [chunks · H, C, d_v]: what tokens add at their keys, where they read before they write
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
        U = None if inputs.erase is None else starts.new_empty((chunks * h, size, d_v))
        return cls(starts, U, starts.new_empty((chunks * h, size, size)) if inputs.solves else None)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.starts, self.U, self.inverse) if x is not None]

    def of(self, group: Group, heads: int) -> _Saved:
        """Return the part of one group."""
        return _Saved(*(x[group.rows(heads)] for x in self.tensors))


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
    room: Workspace

    @property
    def size(self) -> int:
        """C: tokens per chunk."""
        return self.V.shape[1]

    @property
    def values(self) -> Tensor:
        """diag(η) V."""
        return self.V if self.write is None else torch.mul(self.V, self.write, out=self.room("R", *self.V.shape))

    def split(self, *tensors: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Return each wave's part of the tensors [n, …]; None stays None."""
        none = [None] * len(self.waves)
        return list(zip(*(none if x is None else x.split(self.waves) for x in tensors), strict=True))


class _Loader:
    """The inputs in chunks, a group at a time; coefficients, of which there are few, all at once."""

    def __init__(self, inputs: ScanInputs, layout: Layout) -> None:
        self.inputs, self.layout, self.room = inputs, layout, Workspace(inputs)
        self.erase = self._numbers(inputs.erase)
        self.write = self.erase if inputs.write is inputs.erase else self._numbers(inputs.write)
        log = None if inputs.by_channel else self._numbers(inputs.log_decay)
        self.decays = None if log is None else TokenDecays(log, self.room, inputs.probe_before_decay)

    def empty(self, width: int) -> Tensor:
        """Return an uninitialized tensor [chunks · H, C, width]."""
        inputs, count = self.inputs, self.layout.whole.chunks * self.inputs.heads
        return torch.empty((count, self.layout.size, width), dtype=inputs.working_dtype, device=inputs.v.device)

    def _numbers(self, x: Tensor | None) -> Tensor | None:
        """Return one number per token in chunks [chunks · H, C, 1]."""
        return None if x is None else self.layout.load(x.unsqueeze(-1), self.layout.whole, self.empty(1))

    def chunks(self, group: Group) -> _Chunks:
        """Return the chunks of a group."""
        inputs, layout, room = self.inputs, self.layout, self.room
        here, n, size = group.rows(inputs.heads), group.chunks * inputs.heads, layout.size
        erase, write = (None if x is None else x[here] for x in (self.erase, self.write))
        K = layout.load(inputs.k, group, room("K", n, size, inputs.d_k))
        V = layout.load(inputs.v, group, room("V", n, size, inputs.d_v))
        X, P = room("X", n, size if erase is None else 2 * size, inputs.d_k), None
        layout.load(inputs.q, group, X[:, :size])
        if erase is not None:
            P = K if inputs.probe is None else layout.load(inputs.probe, group, room("P", *K.shape))
            torch.mul(P, -erase, out=X[:, size:])
        decay: ChunkDecay = Undecayed(room)
        if self.decays is not None:
            decay = self.decays.of(here)
        elif inputs.log_decay is not None:
            log = layout.load(inputs.log_decay, group, room("log", *K.shape))
            decay = DecayPerChannel(log, room, inputs.probe_before_decay)
        waves, decays = [count * inputs.heads for count in group.waves], inputs.log_decay is not None
        return _Chunks(X, K, V, P, erase, write, decay, decays, inputs.solves, waves, room)


def _inverse(scores: Tensor, out: Tensor | None) -> Tensor:
    """Return T = (I − S_P)⁻¹ from the scores of probes [n, C, C], of which only the part below the diagonal is read."""
    eye = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device).expand_as(scores)
    # Into a row-major result: more than twice as fast as the column-major one torch would make.
    into = torch.empty_like(eye, memory_format=torch.contiguous_format) if out is None else out
    return torch.linalg.solve_triangular(-scores, eye, upper=False, unitriangular=True, out=into)


def _forward(chunks: _Chunks, saved: _Saved, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output of a group's chunks [n, C, d_v], and the states, which advance in place; None: zeros."""
    C, X, K, decay, room = chunks.size, chunks.X, chunks.K, chunks.decay, chunks.room
    scores = decay.scores(X if chunks.solves else X[:, :C], K)
    T = _inverse(scores[:, C:], saved.inverse) if chunks.solves else None
    R, write_keys, total = chunks.values, decay.until(K), decay.total()
    U, out = R if chunks.P is None else room("U", *R.shape) if saved.U is None else saved.U, room("out", *R.shape)
    if state is None:
        U = U.copy_(R) if T is None else torch.bmm(T, R, out=U)
        return torch.bmm(scores[:, :C], U, out=out), torch.bmm(U.mT, write_keys)
    starts = room("starts", len(K), *state.shape[1:]) if saved.starts is None else saved.starts
    reach = decay.since(X)
    reads = None if chunks.P is None else reach[:, C:]
    waves = chunks.split(starts, starts.mT, reads, R, T, U, U.mT, write_keys, total)
    followings, W = _followings([wave[0] for wave in waves], state), state
    for (start, to_read, read, r, t, u, to_write, write, left), following in zip(waves, followings, strict=True):
        if W is not start:
            start.copy_(W[: len(start)])
        if read is not None:
            torch.baddbmm(r, read, to_read, out=u if t is None else r)
        if t is not None:
            torch.bmm(t, r, out=u)
        W = following
        (W.copy_(start) if left is None else torch.mul(start, left, out=W)).baddbmm_(to_write, write)
    return torch.bmm(scores[:, :C], U, out=out).baddbmm_(reach[:, :C], starts.mT), state


def _followings(places: list[Tensor], state: Tensor) -> list[Tensor]:
    """Return where what follows the states at `places` goes: to the next place, unless a sequence or the group ends."""
    nexts = [*places[1:], state[:0]]
    return [then if len(then) == len(now) else state[: len(now)] for now, then in zip(places, nexts, strict=True)]


def _backward(
    chunks: _Chunks, saved: _Saved, starts: Tensor | None, errors: Tensor, d_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a group's q, k, v, log_decay, erase, write and probe; those of states go back in place.

    `starts` None: chunks start from zeros. `errors` [n, R, d_v] holds Ō, and room for R̄ if something is erased.
    `d_state` None: nothing depends on the last states, and the gradients of the first are not wanted.
    """
    C, X, K, V, decay, room = chunks.size, chunks.X, chunks.K, chunks.V, chunks.decay, chunks.room
    T, U = saved.inverse, chunks.values if saved.U is None else saved.U
    scores = decay.scores(X if chunks.solves and chunks.decays else X[:, :C], K)
    d_U = torch.bmm(scores[:, :C].mT, errors[:, :C], out=room("d_U", *V.shape))
    d_X, d_K, through = room("d_X", *X.shape), room("d_K", *K.shape), None
    if d_state is not None:
        d_ends = _retreat(chunks, T, errors, d_U, d_state)
        torch.bmm(U, d_ends, out=d_K)
        decay.until(d_K, out=d_K)
        if chunks.decays and starts is not None:
            through = d_ends.mul_(starts)
    elif chunks.P is not None:
        errors[:, C:] = d_U if T is None else torch.bmm(T.mT, d_U)
    d_R = d_U if chunks.P is None else errors[:, C:]
    if starts is not None:
        torch.bmm(errors, starts, out=d_X)
        decay.since(d_X, out=d_X)
    outer = None
    if chunks.decays:
        outer = decay.outer_gradient(X, None if starts is None else d_X, K, None if d_state is None else d_K, through)
    for gradient, absent in ((d_X, starts is None), (d_K, d_state is None)):
        if absent:
            gradient.zero_()
    rows = len(scores[0]) if chunks.decays else len(X[0]) if chunks.solves else C  # a mini-batch's probes read W alone
    links = torch.bmm(errors[:, :rows], U.mT, out=room("links", len(X), rows, C))
    slope = decay.add_inner_gradients(links, scores, X[:, :rows], K, d_X[:, :rows], d_K)
    slope = slope if outer is None or slope is None else slope.add_(outer)
    d_P = d_erase = None
    product = room("product", *K.shape)
    if chunks.P is not None:
        d_erase = -torch.mul(d_X[:, C:], chunks.P, out=product).sum(-1, keepdim=True)
        d_P = d_X[:, C:].mul_(-chunks.erase)  # type: ignore[operator]
        if chunks.P is K:
            d_K, d_P = d_K.add_(d_P), None
    product = room("product", *V.shape)
    d_write = None if chunks.write is None else torch.mul(d_R, V, out=product).sum(-1, keepdim=True)
    d_V = d_R if chunks.write is None else torch.mul(d_R, chunks.write, out=product)
    return d_X[:, :C], d_K, d_V, slope, d_erase, d_write, d_P


def _retreat(chunks: _Chunks, T: Tensor | None, errors: Tensor, d_U: Tensor, d_state: Tensor) -> Tensor:
    """Return the gradients of the states after each chunk [n, d_v, d_k], last wave first.

    On the way d_U gains what later chunks read, and `errors` gains R̄ = TᵀŪ.
    """
    C, decay = chunks.size, chunks.decay
    d_ends = chunks.room("d_ends", len(d_U), *d_state.shape[1:])
    inverse, solved = None if T is None else T.mT, None if chunks.P is None else errors[:, C:]
    reads, write_keys, total = decay.since(chunks.X), decay.until(chunks.K), decay.total()
    waves = chunks.split(d_ends, d_ends.mT, d_U, inverse, solved, errors.mT, reads, write_keys, total)[::-1]
    followings, d_W = _followings([wave[0] for wave in waves], d_state), d_state
    for (d_end, to_read, d_u, t, r, error, read, write, left), following in zip(waves, followings, strict=True):
        if d_W is not d_end:
            d_end.copy_(d_state[: len(d_end)])
        d_u.baddbmm_(write, to_read)
        if r is not None:
            r.copy_(d_u if t is None else torch.bmm(t, d_u))
        d_W = following
        (d_W.copy_(d_end) if left is None else torch.mul(d_end, left, out=d_W)).baddbmm_(error, read)
    return d_ends
