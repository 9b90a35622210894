"""φ: where keys and queries are taken before they meet the memory.

A wider φ(k) leaves more room for keys that do not disturb each other. Every feature is an object
made for an input width `dim`; it says its output width before anything is computed, and keeps its
own state (FAVOR+'s projection is drawn once, when the object is made).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known, require_floating, require_rank, require_width, unknown_name
from rebind.memory.precision import working_dtype


class Feature(ABC):
    """A feature map [..., dim] → [..., width]. Subclasses with a `name` are found by `get_feature`."""

    name: ClassVar[str]
    _known: ClassVar[dict[str, type[Feature]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Feature._known[cls.name] = cls

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise ShapeError(f"dim is {dim}, expected 1 or more: the width of the keys that enter")
        self.dim = dim

    @property
    def width(self) -> int:
        """How wide φ(x) is."""
        return self.dim

    @property
    def options(self) -> dict[str, int]:
        """What besides `dim` rebuilds this feature."""
        return {}

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors that belong to this feature and are saved with it, under the names of its attributes."""
        return {}

    def up_to_scale(self, x: Tensor) -> Tensor:
        """φ(x) times some positive number a row: all that a normaliser needs, where φ itself may under- or overflow."""
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self._map(self._checked(x)).to(x.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        """The input in the working dtype."""
        self._check(x)
        return x.to(working_dtype(x))

    def _check(self, x: Tensor) -> None:
        require_rank(1, x=x)
        require_floating(x=x)
        require_width("x", x, self.dim, f"feature {self.name!r}")

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{type(self).__name__}({self.dim}{options})"

    @abstractmethod
    def _map(self, x: Tensor) -> Tensor: ...


class Identity(Feature):
    """φ(x) = x."""

    name = "identity"

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        return x

    def _map(self, x: Tensor) -> Tensor:
        return x


class EluPlusOne(Feature):
    """φ(x) = elu(x) + 1: positive everywhere (the Linear Transformer's)."""

    name = "elu+1"

    def _map(self, x: Tensor) -> Tensor:
        return functional.elu(x) + 1


class Relu(Feature):
    """φ(x) = max(x, 0)."""

    name = "relu"

    def _map(self, x: Tensor) -> Tensor:
        return functional.relu(x)


class Dpfp(Feature):
    """DPFP-ν, deterministic parameter-free projection (Schlag et al. eq. 37 and listing 1).

    With r = [relu(x), relu(−x)] the features are r_i · r_{i−j} for shifts j = 1…ν, cyclically: 2·dim·ν
    of them, most of them zero, so that different keys seldom share a direction.
    """

    name = "dpfp"

    def __init__(self, dim: int, nu: int = 1) -> None:
        super().__init__(dim)
        if not isinstance(nu, int) or not 1 <= nu <= 2 * dim - 1:
            raise InputError(
                f"nu is {nu}, expected 1 to {2 * dim - 1} for keys {dim} wide: beyond that the shifts come round again"
            )
        self.nu = nu

    @property
    def width(self) -> int:
        return 2 * self.dim * self.nu

    @property
    def options(self) -> dict[str, int]:
        return {"nu": self.nu}

    def _map(self, x: Tensor) -> Tensor:
        halves = functional.relu(torch.cat([x, -x], dim=-1))
        blocks = [halves * halves.roll(shift, dims=-1) for shift in range(1, self.nu + 1)]
        return blocks[0] if self.nu == 1 else torch.cat(blocks, dim=-1)


class Favor(Feature):
    """FAVOR+: positive random features whose inner product estimates exp(q·k/√dim) without bias.

    x is scaled by dim^(−1/4), so the product of two features carries softmax's 1/√dim. Each of the m
    projections w gives the pair exp(±w·x − ‖x‖²/2)/√(2m): 2m features. Directions come in orthogonal
    blocks (less variance than independent ones) with the norms of Gaussian vectors.

    The projection is drawn from `seed` when the object is made and never again.
    """

    name = "favor"

    def __init__(self, dim: int, m: int | None = None, seed: int = 0) -> None:
        super().__init__(dim)
        self.m = dim if m is None else m
        if self.m < 1:
            raise InputError(f"m is {m}, expected 1 or more: the number of random projections")
        self.seed = seed
        self.projection = orthogonal_projection(self.m, dim, seed)  # [m, dim]

    @property
    def width(self) -> int:
        return 2 * self.m

    @property
    def options(self) -> dict[str, int]:
        return {"m": self.m, "seed": self.seed}

    @property
    def state(self) -> dict[str, Tensor]:
        return {"projection": self.projection}

    def up_to_scale(self, x: Tensor) -> Tensor:
        """The features with the row's largest exponent taken out: softmax's own safeguard."""
        exponent = self._exponent(self._checked(x))
        return (exponent - exponent.amax(-1, keepdim=True).detach()).exp().to(x.dtype)

    def _map(self, x: Tensor) -> Tensor:
        return self._exponent(x).exp() * self.width**-0.5

    def _exponent(self, x: Tensor) -> Tensor:
        x = x * self.dim**-0.25
        angle = x @ self.projection.to(x).mT
        return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2


def orthogonal_projection(rows: int, dim: int, seed: int) -> Tensor:
    """Rows in orthogonal blocks of `dim`, each as long as a Gaussian vector: [rows, dim] float64."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, rows, dim):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(gaussian)
        basis = basis * triangle.diagonal().sign()  # makes the rotation uniformly distributed
        blocks.append(basis.mT[: rows - start])
    norms = torch.randn(rows, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * norms


def sum_normalise(x: Tensor, *, values: bool = True) -> Tensor:
    """x / Σx for non-negative features (Schlag et al. A.2); a row of zeros stays zero.

    Under the delta rule it balances what a write adds to a column against what it removes, and
    spares the read its denominator. `values=False` does not look for negative entries: a GPU is
    not waited for.
    """
    require_rank(1, x=x)
    require_floating(x=x)
    if values:
        require_non_negative(x)
    wide = _unit_peak(x)
    total = wide.sum(-1, keepdim=True)
    return (wide / total.where(total > 0, 1.0)).to(x.dtype)


def require_non_negative(x: Tensor) -> None:
    """Look for entries that a sum cannot normalise."""
    if known((x < 0).any()):
        raise InputError(
            f"sum normalisation got entries down to {float(x.min()):.3g}, expected none below 0: use a non-negative "
            f"feature (elu+1, relu, dpfp, favor), or normalise by L2"
        )


def l2_normalise(x: Tensor) -> Tensor:
    """x / ‖x‖; a row of zeros stays zero. With it a delta write at β = 1 replaces exactly."""
    require_rank(1, x=x)
    require_floating(x=x)
    wide = _unit_peak(x)
    energy = wide.square().sum(-1, keepdim=True)
    return (wide * energy.where(energy > 0, 1.0).rsqrt()).to(x.dtype)


def _unit_peak(x: Tensor) -> Tensor:
    """x in the working dtype over its largest entry: rows of 1e-30 and of 1e30 normalise alike."""
    wide = x.to(working_dtype(x))
    peak = wide.detach().abs().amax(-1, keepdim=True)
    return wide / peak.where(peak > 0, 1.0)


def get_feature(name: str | Feature, dim: int, **options: int) -> Feature:
    """The feature of that name for inputs `dim` wide; a feature object passes through."""
    if isinstance(name, Feature):
        if name.dim != dim:
            raise ShapeError(f"{name!r} takes inputs {name.dim} wide, expected {dim}: make it for the keys' width")
        if options:
            raise InputError(f"got {name!r} and {', '.join(options)} too, expected one of them: set it on the feature")
        return name
    if not isinstance(name, str) or name not in Feature._known:
        raise unknown_name("feature", name, Feature._known)
    made = Feature._known[name]
    takes = list(inspect.signature(made).parameters)[1:]
    unknown = [option for option in options if option not in takes]
    if unknown:
        raise InputError(
            f"feature {name!r} does not take {', '.join(unknown)}, it takes {', '.join(takes) or 'no options'}: "
            f"leave {unknown[0]} out"
        )
    return made(dim, **options)


def feature_names() -> list[str]:
    return sorted(Feature._known)
