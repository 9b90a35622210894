"""`Memory`: the object to start with. Bind a value to a key, recall it, rebind it, unbind it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.chain import chain
from rebind.memory.checks import require_finite, require_floating, require_rank, require_width, unknown_name
from rebind.memory.closed_form import equality
from rebind.memory.features import Feature, get_feature, l2_normalise, sum_normalise
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
        """Rows stored against the space available: above 1 no memory of this width can keep them all."""
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
        gates = {
            name: torch.as_tensor(gate, dtype=phi.dtype, device=phi.device).expand(len(phi))
            for name, gate in gates.items()
        }
        write = chain(self.rule.write(phi, rows, **gates))
        self._commit(write, self.rows + len(phi))

    def recall(self, queries: Tensor) -> Tensor:
        """What the memory answers: [d_v] for a query [d_k], [..., d_v] for [..., d_k]."""
        return self._phi(queries, keep_shape=True) @ self.weights.mT

    def rebind(self, keys: Tensor, values: Tensor, *, protect: Tensor | None = None) -> None:
        """Replace what stored keys answer, exactly, by the smallest change of the weights that does it.

        Keys orthogonal to these keep their answers; others move by their overlap. `protect` names keys
        [m, d_k] whose answers must not move at all.
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
        data = save({"weights": self.weights.detach().contiguous()}, metadata={"rebind": json.dumps(described)})
        _write_atomically(Path(path), data)

    def _phi(self, keys: Tensor, *, keep_shape: bool = False) -> Tensor:
        require_rank(1, keys=keys)
        require_floating(keys=keys)
        require_width("keys", keys, self.d_k, "this memory")
        require_finite(keys=keys)
        if not keep_shape:
            if keys.ndim > 2:
                raise ShapeError(f"keys are {list(keys.shape)}, expected [d_k] or [n, d_k]: flatten leading dimensions")
            keys = keys.reshape(-1, self.d_k)
        return NORMALISERS[self.normalise](self.feature(keys.to(self.weights)))

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
    try:
        with safe_open(str(path), framework="pt") as file:
            described = json.loads((file.metadata() or {}).get("rebind", "{}"))
            if described.get("format") != FORMAT:
                raise InputError(
                    f"{path} is not a saved memory (format {described.get('format')!r}, expected {FORMAT!r})"
                    f": pass a file that Memory.save wrote"
                )
            weights = file.get_tensor("weights")
    except (SafetensorError, json.JSONDecodeError) as problem:
        raise InputError(f"{path} cannot be read as safetensors ({problem}): it is damaged or something else") from None
    memory = Memory(
        described["d_k"],
        weights.shape[0],
        described["rule"],
        described["feature"],
        described["normalise"],
        dtype=weights.dtype,
        **described["options"],
    )
    require_width("weights", weights, memory.feature.width, f"feature {memory.feature!r} in {path}")
    memory.weights, memory.rows = weights, described["rows"]
    return memory


def _write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to disk, rename over it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
