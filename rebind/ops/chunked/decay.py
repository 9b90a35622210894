"""How much of an earlier memory is left between two moments of a chunk: nothing lost, one decay per token, or a vector.

With d_t the decay of token t, G_i = d_1 ⊙ ⋯ ⊙ d_i and rows x_i (what reads) and k_j (what was written), a chunk needs

    scores    s_ij = x_i · (G_i/G_j ⊙ k_j), i ≥ j          since     x_i ⊙ G_i          until     k_j ⊙ G_C/G_j

and in the backward pass, from links l_ij (the gradients of s_ij), those of x, k and ln d. A class here has one way of
doing it for each form of the decay.

Probes that read before the decay of their token have G_{i−1} in place of G_i everywhere. They are not separated by d_i
from anything.

**One number per token** leaves the product: s_ij = Γ_ij (x_i·k_j) with Γ_ij = γ_i/γ_j.

**One per channel** does not. x_i G_i and k_j/G_j would do, but 1/G_j overflows: e^160 after 32 tokens of KDA's smallest
ln d, −5. So the chunk is halved again and again. Between the halves of a block, with m the boundary,

    s_ij = (x_i ⊙ G_i/G_m) · (G_m/G_j ⊙ k_j)          i in the second half, j in the first

and both factors are at most 1: exponents are sums of numbers that are 0 or less, and no difference is ever taken. The
halves of blocks of C, C/2, …, 2 cover every pair i > j once, at the cost of one C × C product in all. Nothing
overflows, −inf needs no special case, and what underflows is as small as it looks.

**The gradient of ln d_t** is ⟨W̄~_t, W~_t⟩, one number per channel: the sum of l_ij s_ij over all pairs that the decay
of token t lies between, j < t ≤ i, the chunk's first state and its end among them. (The usual form, a running sum of
q·q̄ − k·k̄, is a difference of sums that share everything *not* separated by t: for α = 1e-8 it has no correct digit in
float32.) For one number per token the sum over the pairs is a product with a triangle of ones. Per channel, a
pair of halves crosses t in its first half for all j before t and in its second half for all i from t on: running sums
of k ⊙ k̄ and of x ⊙ x̄, for the parts of k̄ and x̄ that come from that pair of halves.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from rebind.memory.checks import known
from rebind.ops.chunked.layout import Workspace

Part = Tensor | None  # of a gradient; None: nothing


class ChunkDecay(Protocol):
    """The decays of n chunks of C tokens. Rows x [n, R, d_k] are C queries and, if R = 2C, C probes after them."""

    def total(self) -> Tensor | None:
        """Return G_C as it multiplies a state [n, d_v, d_k]; None if nothing is lost."""

    def since(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows x_i ⊙ G_i [n, R, d_k], in `out` (which may be x) or in the workspace; x itself if they equal."""

    def until(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows k_j ⊙ G_C/G_j [n, C, d_k], in `out` (which may be k) or in the workspace; k if they equal."""

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        """Return s [n, R, C]: nothing above the diagonal of queries, anything on and above that of probes."""

    def add_inner_gradients(
        self, links: Tensor, scores: Tensor, x: Tensor, k: Tensor, d_x: Tensor, d_k: Tensor
    ) -> Part:
        """Add what pairs inside of the chunk give to the gradients of x and of k; return what they give to ln d.

        Of `links` [n, R, C] only what is below the diagonal counts, and for queries on it. It may be changed.
        """

    def outer_gradient(
        self, x: Tensor, d_x: Tensor | None, k: Tensor, d_k: Tensor | None, through: Tensor | None
    ) -> Tensor | None:
        """Return what the chunk's first state and its end give to the gradient of ln d.

        `d_x` [n, R, d_k] is what x read of the first state, `d_k` [n, C, d_k] what k wrote for the end, and `through`
        [n, d_v, d_k] the first state times the gradient of the last. What there is nothing of is None.
        """


class Undecayed:
    """Nothing is lost."""

    def __init__(self, room: Workspace) -> None:
        self.room = room

    def total(self) -> Tensor | None:
        return None

    def since(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x

    def until(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        return k

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        scores = _products(x, k, self.room)
        scores[:, : k.shape[1]].tril_()
        return scores

    def add_inner_gradients(
        self, links: Tensor, scores: Tensor, x: Tensor, k: Tensor, d_x: Tensor, d_k: Tensor
    ) -> Part:
        links[:, : k.shape[1]].tril_()
        links[:, k.shape[1] :].tril_(-1)
        d_x.baddbmm_(links, k)
        d_k.baddbmm_(links.mT, x)
        return None

    def outer_gradient(
        self, x: Tensor, d_x: Tensor | None, k: Tensor, d_k: Tensor | None, through: Tensor | None
    ) -> Tensor | None:
        return None


class TokenDecays:
    """Decays α per token of all chunks of a call, from which those of a group are computed."""

    def __init__(self, log: Tensor, room: Workspace, probe_before_decay: bool = False) -> None:
        """Compute γ and the sums that give Γ from ln α [n, C, 1].

        Γ takes differences of logarithms, since ratios of products underflow. Sums run in float64, so that a
        difference of two large sums is still exact. Tokens that leave nothing, which no difference can express, are
        counted instead of added: Γ_ij is 0 if one lies between j and i.
        """
        forgets = log < math.log(torch.finfo(log.dtype).smallest_normal)
        wide = log.dtype if log.device.type == "mps" else torch.float64
        self.room, self.times, self.probe_before_decay = room, None, probe_before_decay
        self.sums = log.masked_fill(forgets, 0.0).to(wide).cumsum(1)  # [n, C, 1]
        self.gamma = self.sums.to(log.dtype).exp()  # [n, C, 1]
        if log.device.type != "cpu" or known(forgets.any()) is not False:  # elsewhere than on a CPU, reading would wait
            self.times = forgets.cumsum(1)
            self.gamma.masked_fill_(self.times > 0, 0.0)
        size = log.shape[1]
        self.future = torch.full((size, size), -math.inf, dtype=log.dtype, device=log.device).triu_(1)

    def of(self, here: slice) -> DecayPerToken:
        """Return the decays of some chunks."""
        sums, size = self.sums[here], len(self.future)
        shape = (len(sums), size, size)
        logs = torch.sub(sums, sums.mT, out=self.room("differences", *shape, dtype=sums.dtype))
        between = self.room("between", *shape).copy_(logs).add_(self.future)
        if self.times is not None:
            times = self.times[here]
            between.masked_fill_(times != times.mT, -math.inf)
        return DecayPerToken(between.exp_(), self.gamma[here], self.room, self.probe_before_decay)


class DecayPerToken:
    """One decay α per token."""

    def __init__(self, between: Tensor, gamma: Tensor, room: Workspace, probe_before_decay: bool) -> None:
        self.between = between  # [n, C, C] Γ: from after token j to after token i; 0 for i < j
        self.gamma = gamma  # [n, C, 1]
        self.room, self.probe_before_decay = room, probe_before_decay
        # Of queries and, if they differ, of probes: [n, 1 or 2, C, C] and [n, 1 or 2, C, 1].
        self.reads = _of_reads(between, 0.0, probe_before_decay)
        self.first_reads = _of_reads(gamma, 1.0, probe_before_decay)

    def total(self) -> Tensor | None:
        return self.gamma[:, -1:]

    def since(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _scale(x, self.first_reads, self.room("since", *x.shape) if out is None else out)

    def until(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        factor = self.between[:, -1, :, None].unsqueeze(1)
        return _scale(k, factor, self.room("until", *k.shape) if out is None else out)

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        return self._gate(_products(x, k, self.room))

    def add_inner_gradients(
        self, links: Tensor, scores: Tensor, x: Tensor, k: Tensor, d_x: Tensor, d_k: Tensor
    ) -> Part:
        size = k.shape[1]
        links[:, size:].diagonal(dim1=1, dim2=2).zero_()
        # l_ij s_ij; those with j ≥ i lie on no two sides of anything
        pairs = torch.mul(links, scores, out=self.room("pairs", *links.shape))
        pairs = _sum_reads(pairs, size, self.probe_before_decay)
        before = torch.ones(size, size, dtype=k.dtype, device=k.device).triu_(1)  # 1 where j < t
        d_log = (pairs @ before).tril_().sum(1)  # over t ≤ i
        links = self._gate(links)
        d_x.baddbmm_(links, k)
        d_k.baddbmm_(links.mT, x)
        return d_log.unsqueeze(-1)

    def outer_gradient(
        self, x: Tensor, d_x: Tensor | None, k: Tensor, d_k: Tensor | None, through: Tensor | None
    ) -> Tensor | None:
        read = None if d_x is None else _sum_reads(self._dot(x, d_x), k.shape[1], self.probe_before_decay)
        through = None if through is None else through.sum((1, 2)).view(-1, 1, 1) * self.gamma[:, -1:]
        return _crossing(read, None if d_k is None else self._dot(k, d_k), through)

    def _dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the products of rows [n, R, width] as [n, R, 1]."""
        return torch.mul(x, y, out=self.room("product", *x.shape)).sum(-1, keepdim=True)

    def _gate(self, products: Tensor) -> Tensor:
        """Multiply products [n, R, C] by Γ, in place."""
        return _scale(products, self.reads, products)


class DecayPerChannel:
    """One decay per key channel. C is a power of two."""

    def __init__(self, log: Tensor, room: Workspace, probe_before_decay: bool = False) -> None:
        """Compute the factors of all halves from ln d [n, C, d_k]."""
        self.room, self.probe_before_decay = room, probe_before_decay
        n, size, width = log.shape
        before, after = log.clone(), torch.zeros_like(log)  # sums from a half's start to i, from after j to its end
        # (m, G_i/G_m of queries and of probes for second halves, G_m/G_j for first halves), each [n, C/2m, m, d_k]
        self.halves: list[tuple[int, tuple[Tensor, Tensor], Tensor | None]] = []
        m = 1
        while m < size:
            first, second = before.view(n, -1, 2, m, width).unbind(2)
            rest = after.view(n, -1, 2, m, width)[:, :, 0]
            since = second.exp()
            probes_since = _one_earlier(since, 2, 1.0) if probe_before_decay else since
            self.halves.append((m, (since, probes_since), rest.exp() if m > 1 else None))
            rest += second[:, :, -1:]
            second += first[:, :, -1:]
            m *= 2
        self.since_start, self.until_end = before.exp_(), after.exp_()
        self.first_reads = _of_reads(self.since_start, 1.0, probe_before_decay)

    def total(self) -> Tensor | None:
        return self.since_start[:, -1:]

    def since(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return _scale(x, self.first_reads, self.room("since", *x.shape) if out is None else out)

    def until(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        return _scale(k, self.until_end.unsqueeze(1), self.room("until", *k.shape) if out is None else out)

    def scores(self, x: Tensor, k: Tensor) -> Tensor:
        scores = x.new_zeros(len(x), x.shape[1], k.shape[1])
        for index, (part, rows) in enumerate(self._parts(scores, x)):
            for m, seconds, first in self.halves:
                second = seconds[index]
                products = torch.bmm(_second(rows, m, second), _first(k, m, first).mT)
                _corners(part, m).copy_(products.view(len(x), -1, m, m))
        queries, here = x[:, : k.shape[1]], scores[:, : k.shape[1]]
        here.diagonal(dim1=1, dim2=2).copy_((queries * k).sum(-1))
        return scores

    def add_inner_gradients(
        self, links: Tensor, scores: Tensor, x: Tensor, k: Tensor, d_x: Tensor, d_k: Tensor
    ) -> Part:
        n, size, width = k.shape
        own, d_log = links[:, :size].diagonal(dim1=1, dim2=2).unsqueeze(-1), torch.zeros_like(k)
        d_k.addcmul_(own, x[:, :size])
        d_x[:, :size].addcmul_(own, k)
        for m, seconds, first in self.halves:
            earlier = _first(k, m, first)
            d_earlier = torch.zeros_like(earlier)
            read = torch.zeros_like(seconds[0])
            parts = zip(self._parts(links, x), self._parts(links, d_x), strict=True)
            for index, ((part, rows), (_, d_rows)) in enumerate(parts):
                second = seconds[index]
                link = _corners(part, m).reshape(-1, m, m)
                d_later = torch.bmm(link, earlier).view_as(second).mul_(second)
                d_earlier.baddbmm_(link.mT, _second(rows, m, second))
                d_rows.view(n, -1, 2, m, width)[:, :, 1] += d_later
                later = rows.view(n, -1, 2, m, width)[:, :, 1]
                if index == 1 and self.probe_before_decay:
                    read[:, :, :-1].addcmul_(d_later[:, :, 1:], later[:, :, 1:])
                else:
                    read.addcmul_(d_later, later)
            d_earlier = d_earlier.view_as(read)
            d_earlier = d_earlier if first is None else d_earlier.mul_(first)
            d_k.view(n, -1, 2, m, width)[:, :, 0] += d_earlier
            slope = d_log.view(n, -1, 2, m, width)
            if m == 1:
                slope[:, :, 1] += read
                continue
            written = d_earlier * k.view(n, -1, 2, m, width)[:, :, 0]
            ones = torch.ones(m, m, dtype=k.dtype, device=k.device)
            slope[:, :, 1] += ones.triu() @ read  # over i ≥ t
            slope[:, :, 0] += ones.tril(-1) @ written  # over j < t
        return d_log

    def outer_gradient(
        self, x: Tensor, d_x: Tensor | None, k: Tensor, d_k: Tensor | None, through: Tensor | None
    ) -> Tensor | None:
        read = None if d_x is None else _sum_reads(x * d_x, k.shape[1], self.probe_before_decay)
        through = None if through is None else through.sum(1, keepdim=True) * self.since_start[:, -1:]
        return _crossing(read, None if d_k is None else k * d_k, through)

    def _parts(self, of: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return queries and probes of two tensors [n, R, …] apart."""
        size = len(self.since_start[0])
        return [(of[:, at : at + size], x[:, at : at + size]) for at in range(0, x.shape[1], size)]


def _products(x: Tensor, k: Tensor, room: Workspace) -> Tensor:
    """Return all products x_i · k_j [n, R, C]."""
    return torch.bmm(x, k.mT, out=room("scores", len(x), x.shape[1], k.shape[1]))


def _scale(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write rows x [n, R, width] times the factors [n, 1 or 2, C, width or 1] of their tokens into `out`."""
    rows, into = (tensor.unflatten(1, (-1, factor.shape[2])) for tensor in (x, out))
    torch.mul(rows, factor[:, : rows.shape[1]], out=into)
    return out


def _one_earlier(x: Tensor, dim: int, first: float) -> Tensor:
    """Return x with every token in the place of the next one, and the number `first` in the first place."""
    return torch.cat([torch.full_like(x.narrow(dim, 0, 1), first), x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def _of_reads(factor: Tensor, first: float, probe_before_decay: bool) -> Tensor:
    """Return a factor [n, C, width] for queries and, if they read another memory, for probes: [n, 1 or 2, C, width]."""
    return torch.stack([factor, _one_earlier(factor, 1, first)], 1) if probe_before_decay else factor.unsqueeze(1)


def _sum_reads(x: Tensor, size: int, probe_before_decay: bool) -> Tensor:
    """Return what queries and probes of a token, rows of x [n, R, width], add up to [n, C, width]. It may change x.

    Probes that read before a decay are counted where the token before them is.
    """
    queries, probes = x[:, :size], x[:, size:]
    if not probes.shape[1]:
        return queries
    if not probe_before_decay:
        return queries.add_(probes)
    queries[:, :-1] += probes[:, 1:]
    return queries


def _first(k: Tensor, m: int, factor: Tensor | None) -> Tensor:
    """Return the first halves of k [n, C, width] in blocks of 2m, times a factor: [n · C/2m, m, width]."""
    rows = k.view(len(k), -1, 2, m, k.shape[-1])[:, :, 0]
    return (rows if factor is None else rows * factor).reshape(-1, m, k.shape[-1])


def _second(x: Tensor, m: int, factor: Tensor) -> Tensor:
    """Return the second halves of x [n, C, width] in blocks of 2m, times a factor: [n · C/2m, m, width]."""
    return (x.view(len(x), -1, 2, m, x.shape[-1])[:, :, 1] * factor).view(-1, m, x.shape[-1])


def _corners(pairs: Tensor, m: int) -> Tensor:
    """Return the view [n, C/2m, m, m] of pairs [n, C, C] with i in the second and j in the first half of one block."""
    blocks = pairs.unflatten(2, (-1, 2 * m)).unflatten(1, (-1, 2 * m))
    return blocks.diagonal(dim1=1, dim2=3)[:, m:, :m].permute(0, 3, 1, 2)


def _crossing(read: Part, written: Part, through: Part) -> Part:
    """Return for every t `read` over i ≥ t, `written` over j < t, and `through`, summed: each [n, C or 1, width]."""
    parts = []
    if read is not None:
        parts.append(read.flip(1).cumsum(1).flip(1))
    if written is not None:
        parts.append(torch.nn.functional.pad(written[:, :-1], (0, 0, 1, 0)).cumsum(1))
    if through is not None:
        parts.append(through)
    return sum(parts[1:], parts[0]) if parts else None
