"""The recurrence, one chunk of C tokens at a time, with the backward pass written out by hand.

A token's write is W_t = α_t W_{t−1} + u_t k_tᵀ with u_t = η_t v_t − ε_t α_t W_{t−1} k_t: what it adds at its key.
Unrolled over a chunk that starts from W, with γ_i = α_1⋯α_i, Γ_ij = α_{j+1}⋯α_i (0 above the diagonal) and the
tokens' u, k, q, v as rows of U, K, Q, V,

    (I + Γ ⊙ L) U = diag(η) V − diag(εγ) K Wᵀ          L = tril(diag(ε) K Kᵀ, −1)
    O  = diag(γ) Q Wᵀ + (Q Kᵀ ⊙ Γ) U
    W' = γ_C W + Uᵀ diag(Γ_C·) K

Every path of L's entries from j to i picks up the same Γ_ij, so (I + Γ ⊙ L)⁻¹ = Γ ⊙ T0 with T0 = (I + L)⁻¹: the gates
stay out of the solve, zeros among them do no harm, and a token that forgets everything needs no special case. ε = 0
makes T0 = I, and so does the definition of a mini-batch: all of its tokens read the first W.

**Backward.** Given Ō and W̄', and with R the right-hand side of the first line,

    Ū = (Q Kᵀ ⊙ Γ)ᵀ Ō + diag(Γ_C·) K W̄'ᵀ              R̄ = (Γ ⊙ T0)ᵀ Ū
    W̄ = γ_C W̄' + Ōᵀ diag(γ) Q − R̄ᵀ diag(εγ) K
    V̄ = diag(η) R̄                                     η̄_i = R̄_i·V_i
    Q̄ = diag(γ) Ō W + P̄ K                             P̄ = tril(Ō Uᵀ) ⊙ Γ
    K̄ = P̄ᵀ Q + diag(Γ_C·) U W̄' − (diag(ε) Z)ᵀ K − diag(ε) M
    ε̄_i = −M_i·K_i         M = diag(γ) R̄ W + Z K,     Z = tril(R̄ Uᵀ, −1) ⊙ Γ

where Z comes from the adjoint of the triangular system, −R̄ Uᵀ: no product of three C×C matrices anywhere.

The decay needs no products at all. Let c_i = ln γ_i. O_i and U_i − η_i V_i carry the factor e^{c_i}, and a U_j that
is read later the factor e^{−c_j}; adding up what each of them is worth, U's own terms cancel and leave

    c̄_i = Ō_i·O_i − R̄_i·(η_i V_i) = Q̄_i·Q_i − V̄_i·V_i        c̄_C also gains ⟨W̄', W'⟩

(O is linear in Q, U in V). The gradient of ln α_t is the sum of c̄_i over i ≥ t, chunk by chunk.

What grows with T is the inputs, the output, T0 and the state at the start of each chunk. All else is computed for one
group of chunks (see `layout`) and dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rebind.memory.checks import known
from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.layout import Group, Layout, layout_of


class Chunked:
    """The chunk form in plain torch: the backend of CPUs, and of every device without kernels."""

    name = "chunked"

    def __init__(self, group_size: int | None = None) -> None:
        self.group_size = group_size  # of a group's largest tensor; None: what suits the device

    def forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        layout = layout_of(inputs, _size(inputs), self.group_size)
        saved = _Saved.empty(inputs) if inputs.keep else _Saved()
        out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
        state = layout.in_waves(_zeros(inputs) if inputs.state is None else inputs.state)
        for group in layout.groups:
            chunks = _Chunks.load(inputs, layout, group)
            layout.store(_forward(chunks, saved.of(group, inputs.heads), state), out, group)
        return out, layout.in_order(state), saved.tensors

    def saved_like(self, inputs: ScanInputs) -> list[Tensor]:
        return _Saved.empty(inputs).tensors if inputs.keep else []

    def backward(self, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        layout = layout_of(inputs, _size(inputs), self.group_size)
        from_forward = _Saved(*saved)
        grads = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs.tensors[:6]
        ]
        d_state = layout.in_waves(_zeros(inputs) if d_final is None else d_final)
        for group in reversed(layout.groups):
            chunks = _Chunks.load(inputs, layout, group)
            errors = chunks.probes.new_empty(*chunks.probes.shape[:2], inputs.d_v)
            layout.load(d_out, group, errors[:, : layout.size])
            parts = _backward(chunks, from_forward.of(group, inputs.heads), errors, d_state)
            for grad, part in zip(grads, parts, strict=True):
                if grad is not None and part is not None:
                    layout.store(part, grad if grad.ndim == 4 else grad.unsqueeze(-1), group)
        return *grads, None, None if inputs.state is None else layout.in_order(d_state)


CHUNKED = Chunked()


def _size(inputs: ScanInputs) -> int:
    """Return the number of tokens per chunk, no more than there are.

    Work inside a chunk grows with its size; the number of states and of steps falls. For narrow heads on a CPU, where
    a step costs little, small chunks win: measured at widths 16 to 256.
    """
    narrow = max(inputs.d_k, inputs.d_v) <= 64
    best = 32 if narrow and inputs.v.device.type == "cpu" else 64
    return min(inputs.mini_batch or inputs.chunk or best, max(inputs.length, 1))


def _zeros(inputs: ScanInputs) -> Tensor:
    return torch.zeros(inputs.state_shape, dtype=inputs.working_dtype, device=inputs.v.device)


@dataclass(frozen=True)
class _Saved:
    """What the backward pass needs again, chunks in the order of the layout."""

    starts: Tensor | None = None  # [chunks · H, d_v, d_k]: the state before each chunk
    inverse: Tensor | None = None  # [chunks · H, C, C]: T0, where there is a system to solve

    @classmethod
    def empty(cls, inputs: ScanInputs) -> _Saved:
        size = _size(inputs)
        n, h, d_v, d_k = inputs.state_shape
        # For packed sequences, the largest possible number of chunks: a shape may not depend on the boundaries.
        chunks = n * -(-inputs.length // size) if inputs.cu_seqlens is None else inputs.length // size + n
        starts = torch.empty((chunks * h, d_v, d_k), dtype=inputs.working_dtype, device=inputs.v.device)
        return cls(starts, starts.new_empty((chunks * h, size, size)) if inputs.solves else None)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.starts, self.inverse) if x is not None]

    def of(self, group: Group, heads: int) -> _Saved:
        """Return the part of one group."""
        here = slice(group.first * heads, (group.first + group.chunks) * heads)
        return _Saved(*(x[here] for x in self.tensors))


@dataclass(frozen=True)
class _Decay:
    """How much of an earlier memory is left, between any two moments of a chunk."""

    between: Tensor  # [n, C, C] Γ: from after token j to after token i; 0 for i < j
    since: Tensor  # [n, C] γ: from the chunk's start to after token i
    until: Tensor  # [n, C] Γ_C·: from after token j to the chunk's end
    total: Tensor  # [n, 1, 1] γ_C
    forgets: Tensor  # [n, C] where nothing is left

    @classmethod
    def of(cls, log: Tensor) -> _Decay:
        """Compute it from ln α [n, C].

        It takes differences of logarithms, since ratios of products underflow. Sums run in float64, so that a
        difference of two large sums is still exact. Tokens that leave nothing, which no difference can express, are
        counted instead of added: Γ_ij is 0 if one lies between j and i.
        """
        forgets = log < math.log(torch.finfo(log.dtype).smallest_normal)
        wide = log.dtype if log.device.type == "mps" else torch.float64
        sums = log.masked_fill(forgets, 0.0).to(wide).cumsum(-1)
        logs = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(log.dtype)
        since = sums.to(log.dtype).exp_()
        if log.device.type != "cpu" or known(forgets.any()) is not False:  # elsewhere than on a CPU, reading would wait
            times = forgets.cumsum(-1)
            logs.masked_fill_(times.unsqueeze(-1) != times.unsqueeze(-2), -math.inf)
            since.masked_fill_(times > 0, 0.0)
        future = torch.full(logs.shape[-2:], -math.inf, dtype=logs.dtype, device=logs.device).triu_(1)
        between = logs.add_(future).exp_()
        return cls(between, since, between[:, -1], since[:, -1, None, None], forgets)

    def gradient(self, slope: Tensor) -> Tensor:
        """Return the gradient of ln α from that of every ln γ_i [n, C]."""
        return slope.flip(-1).cumsum(-1).flip(-1).masked_fill_(self.forgets, 0.0)


@dataclass(frozen=True)
class _Chunks:
    """The chunks of a group: n of them, heads included.

    Queries and keys both probe the memory, one for the output and one for what to erase. If keys do, both are in one
    tensor, queries first: then R is 2C, and C if nothing is erased.
    """

    probes: Tensor  # [n, R, d_k] Q, K
    reach: Tensor  # [n, R, d_k] diag(γ) Q, −diag(εγ) K: what each probe reads of the state at the chunk's start
    K: Tensor  # [n, C, d_k]
    V: Tensor  # [n, C, d_v]
    erase: Tensor | None  # [n, C]
    write: Tensor | None  # [n, C]
    decay: _Decay | None
    solves: bool  # whether a token reads what the chunk's earlier ones have written: T0 ≠ I
    waves: list[int]  # number of chunks in each wave

    @classmethod
    def load(cls, inputs: ScanInputs, layout: Layout, group: Group) -> _Chunks:
        n, size = group.chunks * inputs.heads, layout.size
        reads = inputs.erase is not None

        def empty(rows: int, width: int) -> Tensor:
            return torch.empty((n, rows, width), dtype=inputs.working_dtype, device=inputs.v.device)

        def numbers(x: Tensor | None) -> Tensor | None:
            return None if x is None else layout.load(x.unsqueeze(-1), group, empty(size, 1)).squeeze(-1)

        probes = empty(2 * size if reads else size, inputs.d_k)
        keys = probes[:, size:] if reads else empty(size, inputs.d_k)
        layout.load(inputs.q, group, probes[:, :size])
        layout.load(inputs.k, group, keys)
        log, erase = numbers(inputs.log_decay), numbers(inputs.erase)
        decay = None if log is None else _Decay.of(log)
        return cls(
            probes,
            _reach(probes, erase, decay),
            keys,
            layout.load(inputs.v, group, empty(size, inputs.d_v)),
            erase,
            numbers(inputs.write),
            decay,
            inputs.solves,
            [count * inputs.heads for count in group.waves],
        )

    @property
    def size(self) -> int:
        """C: tokens per chunk."""
        return self.V.shape[1]

    def split(self, *tensors: Tensor | None) -> list[tuple[Tensor, ...]]:
        """Return each wave's part of the tensors [n, …]; None stays None."""
        none = [None] * len(self.waves)
        return list(zip(*(none if x is None else x.split(self.waves) for x in tensors), strict=True))

    def causal(self, products: Tensor) -> Tensor:
        """Return products [n, C, C] ⊙ Γ, in place: nothing above the diagonal."""
        return products.tril_() if self.decay is None else products.mul_(self.decay.between)

    def inverse(self, overlaps: Tensor, out: Tensor | None) -> Tensor:
        """Return T0 = (I + L)⁻¹ from K Kᵀ [n, C, C], which is overwritten."""
        assert self.erase is not None
        eye = torch.eye(self.size, dtype=overlaps.dtype, device=overlaps.device).expand_as(overlaps)
        # Into a row-major result: more than twice as fast as the column-major one torch would make.
        into = torch.empty_like(eye, memory_format=torch.contiguous_format) if out is None else out
        system = overlaps.mul_(self.erase.unsqueeze(-1))
        return torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True, out=into)

    def gated(self, inverse: Tensor) -> Tensor:
        """Return T = Γ ⊙ T0."""
        return inverse if self.decay is None else inverse * self.decay.between

    def write_keys(self) -> Tensor:
        """Return diag(Γ_C·) K."""
        return _rows(self.K, None if self.decay is None else self.decay.until)


def _reach(probes: Tensor, erase: Tensor | None, decay: _Decay | None) -> Tensor:
    if erase is None:
        return _rows(probes, None if decay is None else decay.since)
    since = torch.ones_like(erase) if decay is None else decay.since
    return _rows(probes, torch.cat([since, -erase * since], dim=1))


def _forward(chunks: _Chunks, saved: _Saved, state: Tensor) -> Tensor:
    """Return the output of a group's chunks [n, C, d_v]; the states advance in place."""
    C, K, decay = chunks.size, chunks.K, chunks.decay
    starts = state.new_empty(len(K), *state.shape[1:]) if saved.starts is None else saved.starts
    write_keys, read_keys = chunks.write_keys(), None if chunks.erase is None else chunks.reach[:, C:]
    U = _rows(chunks.V, chunks.write)
    products = torch.bmm(chunks.probes if chunks.solves else chunks.probes[:, :C], K.mT)
    if chunks.solves:
        T = chunks.gated(chunks.inverse(products[:, C:], saved.inverse))
        U, read_keys = torch.bmm(T, U), torch.bmm(T, chunks.reach[:, C:])
    waves = chunks.split(starts, U, read_keys, write_keys, None if decay is None else decay.total)
    for start, u, read, write, total in waves:
        W = state[: len(start)]
        start.copy_(W)
        if read_keys is not None:
            u.baddbmm_(read, W.mT)
        if decay is not None:
            W.mul_(total)
        W.baddbmm_(u.mT, write)
    return torch.bmm(chunks.causal(products[:, :C]), U).baddbmm_(chunks.reach[:, :C], starts.mT)


def _backward(chunks: _Chunks, saved: _Saved, errors: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a group's q, k, v, log_decay, erase and write; those of the states go back in place.

    `errors` [n, R, d_v] holds Ō, and room for R̄ if keys probe the memory too.
    """
    C, K, V, erase, decay, starts = chunks.size, chunks.K, chunks.V, chunks.erase, chunks.decay, saved.starts
    assert starts is not None
    T = None if saved.inverse is None else chunks.gated(saved.inverse)
    R = _rows(V, chunks.write)
    if erase is not None:
        R = (R.clone() if R is V else R).baddbmm_(chunks.reach[:, C:], starts.mT)
    U = R if T is None else torch.bmm(T, R)

    d_U = torch.bmm(chunks.causal(torch.bmm(chunks.probes[:, :C], K.mT)).mT, errors[:, :C])
    d_ends = _retreat(chunks, T, errors, d_U, d_state)

    d_R = d_U if erase is None else errors[:, C:]
    since = None if decay is None else decay.since if erase is None else decay.since.repeat(1, 2)
    links = torch.bmm(errors, U.mT)  # P̄, and Z where keys probe: how much of each U_j there is in each error
    chunks.causal(links[:, :C])
    if erase is not None and T is not None:
        chunks.causal(links[:, C:]).diagonal(dim1=1, dim2=2).zero_()
    elif erase is not None:
        links[:, C:] = 0
    d_probes = torch.bmm(_rows(errors, since), starts).baddbmm_(links, K)  # Q̄, M
    d_erase = None
    if erase is not None:
        links[:, C:] *= -erase.unsqueeze(-1)
    later = torch.bmm(_rows(U, None if decay is None else decay.until), d_ends)  # what the keys did to W'
    d_K = torch.bmm(links.mT, chunks.probes).add_(later)
    if erase is not None:
        d_K.addcmul_(d_probes[:, C:], erase.unsqueeze(-1), value=-1)
        d_erase = -_dots(d_probes[:, C:], K)
    d_V = _rows(d_R, chunks.write)
    d_write = None if chunks.write is None else _dots(d_R, V)
    d_log = None
    if decay is not None:
        slope = _dots(d_probes[:, :C], chunks.probes[:, :C]) - _dots(d_V, V)
        slope[:, -1] += decay.total.flatten() * (d_ends * starts).sum((-2, -1)) + _dots(later, K).sum(-1)  # ⟨W̄', W'⟩
        d_log = decay.gradient(slope)
    numbers = (None if x is None else x.unsqueeze(-1) for x in (d_log, d_erase, d_write))
    return d_probes[:, :C], d_K, d_V, *numbers


def _retreat(chunks: _Chunks, T: Tensor | None, errors: Tensor, d_U: Tensor, d_state: Tensor) -> Tensor:
    """Return the gradients of the states after each chunk [n, d_v, d_k], last wave first.

    On the way d_U gains what later chunks read, and `errors` gains R̄ = TᵀŪ.
    """
    C, decay = chunks.size, chunks.decay
    d_ends = d_state.new_empty(len(d_U), *d_state.shape[1:])
    totals = None if decay is None else decay.total
    waves = chunks.split(d_ends, d_U, T, errors, chunks.reach, chunks.write_keys(), totals)
    for d_end, d_u, t, error, reach, write, total in reversed(waves):
        d_W = d_state[: len(d_end)]
        d_end.copy_(d_W)
        d_u.baddbmm_(write, d_W.mT)
        if chunks.erase is not None:
            error[:, C:] = d_u if T is None else torch.bmm(t.mT, d_u)
        if decay is not None:
            d_W.mul_(total)
        d_W.baddbmm_(error.mT, reach)
    return d_ends


def _rows(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return x [n, C, width] with each row times its scale [n, C]; x itself if there is no scale."""
    return x if scale is None else x * scale.unsqueeze(-1)


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of every row [n, C]."""
    return (a * b).sum(-1)
