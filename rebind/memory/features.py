"""Feature maps φ, applied to keys and queries before they meet the memory.

A wider φ(k) leaves more room for keys that do not disturb each other. A feature map is an object for one input width
`dim`; it knows its output width before anything is computed, and owns its state (FAVOR+'s projection is drawn once,
when the object is created).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known, require_tensors, require_width, unknown_name
from rebind.memory.precision import working_dtype


class Feature(ABC):
    """A feature map [..., dim] → [..., width]. `get_feature` finds every subclass that has a `name`."""

    name: ClassVar[str]
    _known: ClassVar[dict[str, type[Feature]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Feature._known[cls.name] = cls

    def __init__(self, dim: int) -> None:
        if dim < 1:
            raise ShapeError(f"The width of the keys is {dim}", expected="1 or more", code="invalid_width")
        self.dim = dim

    @property
    def width(self) -> int:
        """Width of φ(x)."""
        return self.dim

    @property
    def options(self) -> dict[str, int]:
        """Arguments besides `dim` that rebuild this feature map."""
        return {}

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors that belong to this feature map and are saved with it, by attribute name."""
        return {}

    def up_to_scale(self, x: Tensor) -> Tensor:
        """Return φ(x) times some positive number per row, which is enough to normalize it and cannot overflow."""
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        return self._map(self._checked(x)).to(x.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        """Return the input in the working dtype."""
        self._check(x)
        return x.to(working_dtype(x))

    def _check(self, x: Tensor) -> None:
        require_tensors(1, x=x)
        require_width("x", x, self.dim, f"feature map {self.name!r}")

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
            expected = f"a whole number from 1 to {2 * dim - 1} for keys {dim} wide: further shifts repeat these"
            raise InputError(f"The number of shifts, ν, is {nu}", expected=expected, code="invalid_nu")
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

    x is scaled by dim^(−1/4), so the product of two features carries softmax's 1/√dim. Each of the m projections w
    gives the pair exp(±w·x − ‖x‖²/2)/√(2m): 2m features. Directions come in orthogonal blocks (less variance than
    independent ones) with the norms of Gaussian vectors.

    The projection is drawn from `seed` when the object is created and never again.
    """

    name = "favor"

    def __init__(self, dim: int, m: int | None = None, seed: int = 0) -> None:
        super().__init__(dim)
        self.m = dim if m is None else m
        if self.m < 1:
            raise InputError(f"The number of random projections, m, is {m}", expected="1 or more", code="invalid_m")
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
        """Return the features with the row's largest exponent taken out, as a stable softmax does."""
        exponent = self._exponent(self._checked(x))
        return (exponent - exponent.amax(-1, keepdim=True).detach()).exp().to(x.dtype)

    def _map(self, x: Tensor) -> Tensor:
        return self._exponent(x).exp() * self.width**-0.5

    def _exponent(self, x: Tensor) -> Tensor:
        x = x * self.dim**-0.25
        angle = x @ self.projection.to(x).mT
        return torch.cat([angle, -angle], dim=-1) - x.square().sum(-1, keepdim=True) / 2


def orthogonal_projection(rows: int, dim: int, seed: int) -> Tensor:
    """Draw rows in orthogonal blocks of `dim`, each as long as a Gaussian vector: [rows, dim] float64."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, rows, dim):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(gaussian)
        basis = basis * triangle.diagonal().sign()  # makes the rotation uniformly distributed
        blocks.append(basis.mT[: rows - start])
    norms = torch.randn(rows, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * norms


def sum_normalize(x: Tensor) -> Tensor:
    """Return x / Σx for non-negative features (Schlag et al. A.2); a row of zeros stays zero.

    Under the delta rule it balances what a write adds to a column against what it removes, and reads need no
    denominator.
    """
    require_tensors(1, x=x)
    require_non_negative(x)
    wide = _unit_peak(x)
    total = wide.sum(-1, keepdim=True)
    return (wide / total.where(total > 0, 1.0)).to(x.dtype)


def require_non_negative(x: Tensor) -> None:
    """Require entries that sum normalization can handle."""
    if known((x < 0).any()):
        problem = f"Sum normalization received entries down to {float(x.min()):.3g}"
        advice = "Use a non-negative feature map (elu+1, relu, dpfp, favor), or normalize by the L2 norm"
        raise InputError(problem, expected="no entry below 0", advice=advice, code="negative_features")


def l2_normalize(x: Tensor) -> Tensor:
    """Return x / ‖x‖; a row of zeros stays zero. With such keys a delta write at β = 1 replaces exactly."""
    require_tensors(1, x=x)
    wide = _unit_peak(x)
    energy = wide.square().sum(-1, keepdim=True)
    return (wide * energy.where(energy > 0, 1.0).rsqrt()).to(x.dtype)


def _unit_peak(x: Tensor) -> Tensor:
    """Return x in the working dtype over its largest entry: rows of 1e-30 and of 1e30 normalize alike."""
    wide = x.to(working_dtype(x))
    peak = wide.detach().abs().amax(-1, keepdim=True)
    return wide / peak.where(peak > 0, 1.0)


def get_feature(name: str | Feature, dim: int, **options: int) -> Feature:
    """Return the feature map of that name for inputs `dim` wide; a feature object passes through."""
    if isinstance(name, Feature):
        if name.dim != dim or options:
            problem = f"{name!r} was passed for keys {dim} wide, with options {', '.join(options) or 'none'}"
            expected = "an object for keys of this width, which has its options already"
            raise ShapeError(problem, expected=expected, code="feature_does_not_match")
        return name
    if not isinstance(name, str) or name not in Feature._known:
        raise unknown_name("feature", name, Feature._known)
    feature_class = Feature._known[name]
    parameters = list(inspect.signature(feature_class).parameters)[1:]
    unknown = [option for option in options if option not in parameters]
    if unknown:
        problem = f"Feature map {name!r} does not take {', '.join(unknown)}"
        raise InputError(problem, expected=", ".join(parameters) or "no options", code="unknown_feature_option")
    return feature_class(dim, **options)


def feature_names() -> list[str]:
    """Return the names of all feature maps."""
    return sorted(Feature._known)
