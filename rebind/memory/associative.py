"""`Memory`: the object to start with. Bind a value to a key, recall it, rebind it, unbind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.files import write_atomically
from rebind.memory.chain import chain
from rebind.memory.checks import require_finite, require_floating, require_rank, require_width, unknown_name
from rebind.memory.closed_form import equality
from rebind.memory.features import Feature, get_feature, l2_normalise, sum_normalise
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Gate, Rule, get_rule
from rebind.memory.write import Write

NORMALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "l2": l2_normalise,
    "sum": sum_normalise,
    "none": lambda x: x,
}
FORMAT = "rebind-memory-1"


@dataclass(frozen=True)
class Interference:
    """How keys disturb each other in a memory."""

    overlap: Tensor  # [n, n]: how much of a value written at key j is read back at key i; 0 on the diagonal
    caused: Tensor  # [n]: Σ_i overlap², what each key does to the others
    suffered: Tensor  # [n]: Σ_j overlap², what the others do to each key


class Memory:
    """A weight matrix used as an associative memory.

    >>> m = Memory(8, 3, rule="delta", feature="dpfp")
    >>> key, value = torch.randn(8), torch.randn(3)
    >>> m.bind(key, value)
    >>> torch.allclose(m.recall(key), value, atol=1e-5)
    True

    Keys pass through φ (`feature`) and are normalised before they meet the matrix, which is
    `weights` [d_v, φ's width]. `rule` says how `bind` writes; `rebind` and `unbind` are exact whatever
    the rule.
    """

    def __init__(
        self,
        d_k: int,
        d_v: int,
        rule: str | Rule = "delta",
        feature: str | Feature = "identity",
        normalise: str = "l2",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: int,
    ) -> None:
        if d_v < 1:
            raise ShapeError(f"d_v is {d_v}, expected 1 or more: the width of the values")
        if not dtype.is_floating_point:
            raise InputError(f"dtype is {dtype}, expected a real floating-point one: float32 suits most uses")
        if normalise not in NORMALISERS:
            raise unknown_name("normalisation", normalise, NORMALISERS)
        self.rule = get_rule(rule)
        self.feature = get_feature(feature, d_k, **options)
        self.normalise = normalise
        self.weights = torch.zeros(d_v, self.feature.width, dtype=dtype, device=device)
        self.rows = 0

    @property
    def d_k(self) -> int:
        return self.feature.dim

    @property
    def d_v(self) -> int:
        return self.weights.shape[0]

    @property
    def load(self) -> float:
        """Rows stored against the space available: above 1 no memory of this width can keep them all.

        `rows` counts what was bound and not unbound; binding a key again counts again.
        """
        return self.rows / self.feature.width

    def __repr__(self) -> str:
        return (
            f"Memory({self.d_k} → {self.d_v}, rule={self.rule.name!r}, feature={self.feature!r}, "
            f"normalise={self.normalise!r}, rows={self.rows}, load={self.load:.0%})"
        )

    def bind(self, keys: Tensor, values: Tensor, **gates: Gate) -> None:
        """Write one pair ([d_k], [d_v]) or several in order ([n, d_k], [n, d_v]) by the memory's rule."""
        phi, rows = self._phi(keys), self._values(values, keys)
        if len(phi) == 0:
            return
        if keys.ndim == 1:  # a gate of one key is a number; as a batch of one it needs its dimension
            gates = {name: gate.reshape(-1) if isinstance(gate, Tensor) else gate for name, gate in gates.items()}
        write = chain(self.rule.write(phi, rows, **gates))
        self._commit(write, self.rows + len(phi))

    def recall(self, queries: Tensor) -> Tensor:
        """What the memory answers: [d_v] for a query [d_k], [..., d_v] for [..., d_k]."""
        phi = self._phi(queries, queries=True)
        dtype = working_dtype(phi)
        return (phi.to(dtype) @ self.weights.to(dtype).mT).to(phi.dtype)

    def rebind(self, keys: Tensor, values: Tensor, *, protect: Tensor | None = None) -> None:
        """Replace what stored keys answer, exactly, by the smallest change of the weights that does it.

        Keys orthogonal to these keep their answers; others move by their overlap. `protect` names keys
        [m, d_k] whose answers must not move at all (those being rebound excepted).
        """
        self._rewrite(keys, self._values(values, keys), protect, self.rows)

    def unbind(self, keys: Tensor, *, protect: Tensor | None = None) -> None:
        """Make keys answer nothing (zero), as `rebind` to zero, and free their rows."""
        count = len(self._phi(keys))
        self._rewrite(keys, self.weights.new_zeros(count, self.d_v), protect, max(self.rows - count, 0))

    def interference(self, keys: Tensor) -> Interference:
        """How much each of these keys disturbs the others, under this memory's rule and feature.

        For n random keys on the unit sphere of width d the expected disturbance is (n−1)/d.
        """
        phi = self._phi(keys)
        gain = self.rule.write(phi, phi.new_zeros(len(phi), self.d_v)).gain.squeeze(-2)
        overlap = (phi @ gain.mT).fill_diagonal_(0)
        energy = overlap.square()
        return Interference(overlap, caused=energy.sum(0), suffered=energy.sum(1))

    def save(self, path: str | Path) -> None:
        """Write the memory to a safetensors file, whole or not at all."""
        described = {
            "format": FORMAT,
            "rule": self.rule.name,
            "feature": self.feature.name,
            "options": self.feature.options,
            "normalise": self.normalise,
            "d_k": self.d_k,
            "rows": self.rows,
        }
        if not Path(path).parent.is_dir():
            raise InputError(f"folder {Path(path).parent} does not exist, expected one to save in: make it first")
        for kind, part, known_as in (("rule", self.rule, Rule._known), ("feature", self.feature, Feature._known)):
            if known_as.get(part.name) is not type(part):
                raise InputError(
                    f"{kind} {type(part).__name__} goes by the name {part.name!r} of another class, expected a name of "
                    f"its own: give it one, so that loading finds it"
                )
        tensors = {"weights": self.weights, **{f"feature.{n}": t for n, t in self.feature.state.items()}}
        data = save(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            metadata={"rebind": json.dumps(described)},
        )
        write_atomically(Path(path), data)

    def _phi(self, keys: Tensor, *, queries: bool = False) -> Tensor:
        """Keys as they meet the matrix. Queries may have any leading shape and may be empty of features."""
        require_rank(1, keys=keys)
        require_floating(keys=keys)
        require_width("keys", keys, self.d_k, "this memory")
        if not queries:
            if keys.ndim > 2:
                raise ShapeError(f"keys are {list(keys.shape)}, expected [d_k] or [n, d_k]: flatten leading dimensions")
            keys = keys.reshape(-1, self.d_k)
        keys = keys.to(self.weights)
        require_finite(keys=keys)
        phi = self.feature(keys) if self.normalise == "none" else self.feature.up_to_scale(keys)
        phi = NORMALISERS[self.normalise](phi)
        empty = (phi == 0).all(-1)
        if not queries and empty.any():
            raise InputError(
                f"key {int(empty.nonzero()[0])} is all zeros under {self.feature!r}, expected a direction to write "
                f"along: use another feature, or keys that are not zero"
            )
        return phi

    def _values(self, values: Tensor, keys: Tensor) -> Tensor:
        require_rank(1, values=values)
        require_floating(values=values)
        require_width("values", values, self.d_v, "this memory")
        require_finite(values=values)
        if values.shape[:-1] != keys.shape[:-1]:
            raise ShapeError(
                f"keys are {list(keys.shape)} and values {list(values.shape)}, expected as many of one as of the "
                f"other: one value a key"
            )
        return values.reshape(-1, self.d_v).to(self.weights)

    def _rewrite(self, keys: Tensor, values: Tensor, protect: Tensor | None, rows: int) -> None:
        """The least change of the weights after which `keys` answer `values` and `protect` what it did."""
        phi = self._phi(keys)
        if protect is not None:
            held = self._phi(protect)
            overlap = l2_normalise(held) @ l2_normalise(phi).mT
            same = (overlap > 1 - 8 * torch.finfo(phi.dtype).eps).any(-1)  # a key cannot both change and stay
            held = held[~same]
            phi, values = torch.cat([phi, held]), torch.cat([values, held @ self.weights.mT])
        if len(phi):
            self._commit(Write(phi, values, equality(phi).value), rows)

    def _commit(self, write: Write, rows: int) -> None:
        """Nothing changes until the new weights are known to be sound."""
        weights = write.apply(self.weights)
        require_finite(weights=weights)
        self.weights, self.rows = weights, rows


def load(path: str | Path) -> Memory:
    """Read a memory that `Memory.save` wrote."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file, expected one that Memory.save wrote: check the path")
    try:
        with safe_open(str(path), framework="pt") as file:
            described = json.loads((file.metadata() or {}).get("rebind", "{}"))
            if not isinstance(described, dict) or described.get("format") != FORMAT:
                raise InputError(
                    f"{path} is not a saved memory of format {FORMAT!r}: pass a file that Memory.save wrote"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return _rebuild(described, tensors)
    except (SafetensorError, json.JSONDecodeError) as problem:
        raise InputError(
            f"{path} cannot be read as safetensors ({problem}): it is damaged or something else; save the memory again"
        ) from None
    except (KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{path} describes no memory ({problem!r} is amiss): save the memory again") from None


def _rebuild(described: dict[str, Any], tensors: dict[str, Tensor]) -> Memory:
    weights, rows = tensors["weights"], described["rows"]
    require_rank(2, weights=weights)
    require_floating(weights=weights)
    require_finite(weights=weights)
    if not isinstance(rows, int) or rows < 0:
        raise TypeError(f"rows = {rows!r}")
    memory = Memory(
        described["d_k"],
        weights.shape[0],
        described["rule"],
        described["feature"],
        described["normalise"],
        dtype=weights.dtype,
        **described["options"],
    )
    require_width("weights", weights, memory.feature.width, f"feature {memory.feature!r}")
    for name, drawn in memory.feature.state.items():
        saved = tensors[f"feature.{name}"]
        if saved.shape != drawn.shape:
            raise ShapeError(
                f"{name} is {list(saved.shape)}, {memory.feature!r} has {list(drawn.shape)}: save it again"
            )
        setattr(memory.feature, name, saved)
    memory.weights, memory.rows = weights, rows
    return memory
