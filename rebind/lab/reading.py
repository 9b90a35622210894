"""Reads with one query a sequence, and their gradients, without what autograd would keep on the way.

Training asks one key a sequence. What is read for it needs the products a_j = φ(k_j)·φ(q) and, where a rule corrects,
one sweep over the keys. Written out by hand these take a fraction of the memory traffic, a dozen launches, no
synchronisation (they can be recorded as a CUDA graph), and no sum whose order is left to chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.memory.features import Dpfp, Favor, Feature

CHUNK = 64  # keys that `corrected` takes at once
LEAST = 1e-6  # what is added to the sum that a read is divided by


def constant(feature: Feature, like: Tensor) -> Tensor | None:
    """What `similarity` wants to know of a feature, once: DPFP's neighbours, FAVOR+'s projection."""
    if isinstance(feature, Favor):
        return feature.projection.to(like)
    if not isinstance(feature, Dpfp):
        return None
    # M [2d, 2d]: 1 where b is one of a's ν neighbours, cyclically, on the one side plus on the other
    place = torch.arange(2 * feature.dim, device=like.device)
    behind = (place.unsqueeze(-1) - place) % len(place)
    near = ((behind >= 1) & (behind <= feature.nu)).to(like)
    return near + near.mT


@dataclass(frozen=True)
class Products:
    """φ(q)·φ(k_j) = `scaled` · e^`shift`, where a feature's products may be too large or too small to be written down.

    `shift` [..., Q, 1] is a constant: what does not change when both are scaled by it has its gradient from `scaled`.
    """

    scaled: Tensor  # [..., Q, L]
    shift: Tensor | None = None  # None: 0

    def share(self, weights: Tensor) -> Tensor:
        """c_j / (Σ c + 1e-6) of weights that are linear in `scaled`: 1e-6 is scaled along, so nothing depends on it.

        Between the bounds that is exact; beyond them 1e-6 is either nothing beside the largest weight, or everything.
        """
        least = LEAST if self.shift is None else LEAST * (-self.shift).clamp(-60.0, 80.0).exp()
        shares: Tensor = _Share.apply(weights, least)  # type: ignore[no-untyped-call]
        return shares


def similarity(feature: Feature, known: Tensor | None, k: Tensor, q: Tensor) -> Products:
    """φ(q)·φ(k_j) of keys [..., L, d] and queries [..., Q, d]; `known` is the feature's constant.

    For one query, as in training, φ is never formed where that can be spared.
    """
    if isinstance(feature, Favor) and known is not None:
        return _favor(k, q, known)
    if known is None or q.shape[-2] > 1:
        return Products(feature(q) @ feature(k).mT)
    if isinstance(feature, Dpfp) and has_kernels(k):
        flat = (x.reshape(-1, *x.shape[-2:]) for x in (k, q))
        found: Tensor = _DpfpByKernels.apply(*flat, feature.nu)  # type: ignore[no-untyped-call]
        return Products(found.reshape(*q.shape[:-1], k.shape[-2]))
    products: Tensor = _DpfpSimilarity.apply(k, q, known)  # type: ignore[no-untyped-call]
    return Products(products.unsqueeze(-2))


def has_kernels(x: Tensor) -> bool:
    """Whether x is where kernels of ours run: on a GPU, in float32."""
    return x.is_cuda and x.dtype == torch.float32 and find_spec("triton") is not None


def _favor(k: Tensor, q: Tensor, projection: Tensor) -> Products:
    """FAVOR+'s products, with the largest exponent of a query's, over features and keys, as the shift.

    A product can be as large as e^‖w‖²/2m, where k/d^¼ = q/d^¼ = w. A row w of the projection has ‖w‖² of about d; at
    d = 64 some have 90 to 103, float32 ends at e^88.7, and training goes that way. With exponents a_r of the query and
    b_jr of the keys the largest a_r + b_jr is the largest a_r + B_r, B_r = max_j b_jr, so in

        Σ_r e^{a_r + B_r − shift} e^{b_jr − B_r}

    no factor is above 1, one product is 1, and what underflows is below 1e-37 beside it.
    """
    if q.shape[-2] == 1:
        scaled, shift = _FavorSimilarity.apply(k, q, projection)  # type: ignore[no-untyped-call]
        return Products(scaled.unsqueeze(-2), shift)
    a, b = _exponents(q, projection), _exponents(k, projection)
    most = b.detach().amax(-2, keepdim=True)
    a = a + most
    shift = a.detach().amax(-1, keepdim=True)
    return Products((a - shift).exp() @ (b - most).exp().mT / a.shape[-1], shift)


def _exponents(x: Tensor, projection: Tensor) -> Tensor:
    """±P x/d^¼ − ‖x‖²/2√d: the logarithms of FAVOR+'s features, but for their common factor."""
    x = x * x.shape[-1] ** -0.25
    angle = x @ projection.mT
    return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2


class _Share(torch.autograd.Function):
    """s_j = c_j/n with n = Σ c + least: dc_j = (ds_j − Σ ds·s)/n."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, least: float | Tensor) -> Tensor:
        total = weights.sum(-1, keepdim=True) + least
        shares = weights / total
        ctx.save_for_backward(shares, total)
        return shares

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        shares, total = ctx.saved_tensors
        return (slope - (slope * shares).sum(-1, keepdim=True)).div_(total), None


def half_square(read: Tensor, wanted: Tensor) -> Tensor:
    """½‖o − v‖² [..., Q] of reads [..., Q, S] for one-hot values [..., Q]."""
    losses: Tensor = _HalfSquare.apply(read, wanted)  # type: ignore[no-untyped-call]
    return losses


class _HalfSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Tensor, wanted: Tensor) -> Tensor:
        minus = torch.full_like(wanted, -1, dtype=read.dtype).unsqueeze(-1)
        error = read.scatter_add(-1, wanted.unsqueeze(-1), minus)
        ctx.save_for_backward(error)
        return error.square().sum(-1) / 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (error,) = ctx.saved_tensors
        return error * slope.unsqueeze(-1), None


class _DpfpSimilarity(torch.autograd.Function):
    """φ(k)·φ(q) = Σ_j Σ_i p_i p_{i−j} = ½ pᵀ M p with p = [relu k ∘ relu q, relu −k ∘ relu −q]: φ is never formed."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, near: Tensor) -> Tensor:
        d = k.shape[-1]
        p = k.new_empty(*k.shape[:-1], 2 * d)
        torch.mul(k.clamp_min(0), q.clamp_min(0), out=p[..., :d])
        torch.mul(k.clamp_max(0), q.clamp_max(0), out=p[..., d:])
        around = p @ near
        ctx.save_for_backward(k, q, around)
        return p.mul_(around).sum(-1) / 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        k, q, around = ctx.saved_tensors
        d = k.shape[-1]
        share = torch.where(k > 0, around[..., :d], around[..., d:])  # ∂/∂p where k is, and q must be
        share.mul_(slope.unsqueeze(-1)).mul_(((k > 0) & (q > 0)) | ((k < 0) & (q < 0)))
        return share * q, (share * k).sum(-2, keepdim=True), None


class _DpfpByKernels(torch.autograd.Function):
    """The same in two kernels, for keys [n, L, d] and queries [n, 1, d]."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, nu: int) -> Tensor:
        from rebind.lab.dpfp_kernels import products

        k, q = k.contiguous(), q.contiguous()
        ctx.save_for_backward(k, q)
        ctx.nu = nu
        return products(k, q, nu)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        from rebind.lab.dpfp_kernels import slopes

        k, q = ctx.saved_tensors
        return *slopes(k, q, slope.contiguous(), ctx.nu), None


class _FavorSimilarity(torch.autograd.Function):
    """φ(k)·φ(q) = 1/2m Σ_r (e^{z_r − c} + e^{−z_r − c}), z = P(k + q)/d^¼, c = (‖k‖² + ‖q‖²)/2√d; and the shift."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
        scale, count = k.shape[-1] ** -0.25, len(projection)
        z = ((k + q) * scale) @ projection.mT
        c = (k.square().sum(-1, keepdim=True) + q.square().sum(-1, keepdim=True)) * (scale**2 / 2)
        shift = (torch.linalg.vector_norm(z, ord=torch.inf, dim=-1, keepdim=True) - c).amax(-2, keepdim=True)
        c.add_(shift)
        up = (z - c).exp_()
        down = torch.sub(-c, z, out=z).exp_()
        products = (up.sum(-1) + down.sum(-1)) / (2 * count)
        lean = up.sub_(down) @ projection * (scale / (2 * count))  # ∂ products / ∂ (k + q), by z
        ctx.save_for_backward(k, q, products, lean)
        ctx.scale = scale
        ctx.mark_non_differentiable(shift)
        return products, shift

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        k, q, products, lean = ctx.saved_tensors
        by_z = lean * slope.unsqueeze(-1)
        by_c = (slope * products * ctx.scale**2).unsqueeze(-1)
        return by_z - by_c * k, by_z.sum(-2, keepdim=True) - by_c.sum(-2, keepdim=True) * q, None


def corrected(k: Tensor, q: Tensor, erase: Tensor) -> Tensor:
    """x = (K q)ᵀ T₀ [..., 1, L] of one query [..., 1, D], for keys [..., L, D] and ε [..., L].

    From the last key to the first, x_j = k_j·r and r ← r − ε_j x_j k_j, with r = q before the last: the query as it
    looks before each write. Chunks of keys go at once: within one x (I + A) = K r, A = tril(diag(ε) K Kᵀ, −1).
    """
    lead, (length, width) = k.shape[:-2], k.shape[-2:]
    flat = k.reshape(-1, length, width), q.reshape(-1, 1, width), erase.reshape(-1, length)
    x: Tensor = (_CorrectedByKernels if has_kernels(k) else _Corrected).apply(*flat)  # type: ignore[no-untyped-call]
    return x.reshape(*lead, 1, length)


class _Corrected(torch.autograd.Function):
    """With y from the transposed sweep and p_i = Σ_{j<i} y_j k_j, the gradients are

    dk_j = y_j r_j − ε_j x_j p_j,    dε_j = −x_j k_j·p_j,    dq = Σ y_j k_j.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, erase: Tensor) -> Tensor:
        length = k.shape[1]
        size = min(CHUNK, 1 << (length - 1).bit_length())
        keys, rates = _chunks(k, size), _chunks(erase.unsqueeze(-1), size)
        erasers = keys * rates
        inverse = unit_lower_inverse(erasers @ keys.mT)  # [n, chunks, size, size]
        r, seen, found = q, [], []
        for at in reversed(range(keys.shape[1])):
            x = (r @ keys[:, at].mT) @ inverse[:, at]
            seen.append(r)
            found.append(x)
            r = torch.baddbmm(r, x, erasers[:, at], alpha=-1)
        x = torch.stack(found[::-1], dim=1)  # [n, chunks, 1, size]
        ctx.save_for_backward(keys, rates, inverse, torch.stack(seen[::-1], dim=1), x)
        ctx.length = length
        return x.flatten(1)[:, :length]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, rates, inverse, seen, x = ctx.saved_tensors
        erasers = keys * rates
        slopes = _chunks(slope.unsqueeze(-1), keys.shape[2]).mT  # [n, chunks, 1, size]
        p = torch.zeros_like(seen[:, 0])
        before, found = [], []
        for at in range(keys.shape[1]):
            y = torch.baddbmm(slopes[:, at], p, erasers[:, at].mT, alpha=-1) @ inverse[:, at].mT
            before.append(p)
            found.append(y)
            p = torch.baddbmm(p, y, keys[:, at])
        x, y = x.mT, torch.stack(found, dim=1).mT  # [n, chunks, size, 1]
        earlier = torch.ones_like(inverse[0, 0]).tril(-1)
        p_then = torch.stack(before, dim=1) + earlier @ (y * keys)
        r_then = seen - earlier.mT @ (x * erasers)
        d_keys = y * r_then - (x * rates) * p_then
        d_rates = -x * (keys * p_then).sum(-1, keepdim=True)
        cut = slice(0, ctx.length)
        return d_keys.flatten(1, 2)[:, cut], p, d_rates.flatten(1)[:, cut]


class _CorrectedByKernels(torch.autograd.Function):
    """The same key by key, which on a GPU takes two kernels and not a hundred."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, q: Tensor, erase: Tensor) -> Tensor:
        from rebind.lab.correct_kernels import sweep

        k, q, erase = k.contiguous(), q.contiguous(), erase.contiguous()
        x, rest = sweep(k, q, erase)
        ctx.save_for_backward(k, erase, x, rest)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from rebind.lab.correct_kernels import unsweep

        k, erase, x, rest = ctx.saved_tensors
        return unsweep(k, erase, x, rest, slope.contiguous())


def _chunks(x: Tensor, size: int) -> Tensor:
    """[n, L, D] as [n, chunks, size, D]; the last is filled up with zeros, which write and erase nothing."""
    return functional.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))


def unit_lower_inverse(matrix: Tensor) -> Tensor:
    """(I + tril(matrix, −1))⁻¹ for [..., C, C], C a power of two."""
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    if matrix.device.type == "cpu":
        return torch.linalg.solve_triangular(matrix.tril(-1), one, upper=False, unitriangular=True)
    return _doubled(matrix, one.expand_as(matrix).contiguous())


def _doubled(matrix: Tensor, inverse: Tensor) -> Tensor:
    """The same by matrix products alone: `inverse`, at first I, becomes that of the blocks of 2, 4, … on the diagonal.

    [[D₁, 0], [A, D₂]] has the inverse [[D₁⁻¹, 0], [−D₂⁻¹ A D₁⁻¹, D₂⁻¹]]: no powers, so nothing cancels.
    """
    count, half = matrix.shape[-1], 1
    while half < count:
        lower, made = _diagonal_blocks(matrix, 2 * half), _diagonal_blocks(inverse, 2 * half)
        first, second = made[..., :half, :half], made[..., half:, half:]
        made[..., half:, :half] = -(second @ lower[..., half:, :half] @ first)
        half *= 2
    return inverse


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal, as a view: [..., C/size, size, size]."""
    count = matrix.shape[-1] // size
    tiled = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))  # [..., block, row, block, column]
    return tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def rows(table: Tensor, index: Tensor, back: Tensor | None) -> Tensor:
    """Rows of each model's table [models, S, D] at index [models, B, L]: [models, B, L, D].

    `back` is what the gradient takes: where every row comes once a sequence, its place [models, B, S]; else the index
    as one-hots [models, B, L, S]; None where no gradient is wanted. Adding at indices would leave the order of the sum
    to chance on a GPU.
    """
    taken: Tensor = _Rows.apply(table, index, back)  # type: ignore[no-untyped-call]
    return taken


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, back: Tensor | None) -> Tensor:
        ctx.save_for_backward(back)
        flat = index.flatten(1).unsqueeze(-1).expand(-1, -1, table.shape[-1])
        return table.gather(1, flat).unflatten(1, index.shape[1:])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        if back.ndim == 3:
            return slope.gather(2, back.unsqueeze(-1).expand(-1, -1, -1, slope.shape[-1])).sum(1), None, None
        return back.flatten(1, 2).mT @ slope.flatten(1, 2), None, None
