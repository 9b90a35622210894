"""`Memory`, the object to start with: bind a value to a key, recall it, rebind it, unbind it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.chain import chain
from rebind.memory.checks import require_finite, require_tensors, require_width, unknown_name
from rebind.memory.closed_form import equality
from rebind.memory.features import Feature, get_feature, l2_normalize, sum_normalize
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Gate, Rule, get_rule
from rebind.memory.write import Write
from rebind.storage import open_tensors, seal_tensors, write_file

NORMALIZERS: dict[str, Callable[[Tensor], Tensor]] = {"l2": l2_normalize, "sum": sum_normalize, "none": lambda x: x}
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

    Keys pass through φ (`feature`) and are normalized before they meet the matrix `weights` [d_v, width of φ]. `bind`
    writes by the rule; `rebind` and `unbind` are exact whatever the rule.
    """

    def __init__(
        self,
        d_k: int,
        d_v: int,
        rule: str | Rule = "delta",
        feature: str | Feature = "identity",
        normalize: str = "l2",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **options: int,
    ) -> None:
        if d_v < 1:
            raise ShapeError(f"The width of the values, d_v, is {d_v}", expected="1 or more", code="invalid_width")
        if not dtype.is_floating_point:
            raise InputError(f"The dtype is {dtype}", expected="a floating-point dtype", code="not_floating_point")
        if normalize not in NORMALIZERS:
            raise unknown_name("normalization", normalize, NORMALIZERS)
        self.rule = get_rule(rule)
        if self.rule.several:
            problem = f"Rule {self.rule.name!r} writes several pairs per token"
            raise InputError(problem, expected="a rule of one pair", advice="Use 'delta'", code="rule_writes_several")
        self.feature = get_feature(feature, d_k, **options)
        self.normalize = normalize
        self.weights = torch.zeros(d_v, self.feature.width, dtype=dtype, device=device)
        self.rows = 0

    @property
    def d_k(self) -> int:
        return self.feature.dim

    @property
    def d_v(self) -> int:
        return self.weights.shape[0]

    @property
    def load_factor(self) -> float:
        """Rows stored relative to the space available: above 1 no memory of this width can hold them all.

        `rows` counts what was bound and not unbound; binding a key again counts again.
        """
        return self.rows / self.feature.width

    def __repr__(self) -> str:
        return (
            f"Memory({self.d_k} → {self.d_v}, rule={self.rule.name!r}, feature={self.feature!r}, "
            f"normalize={self.normalize!r}, rows={self.rows}, load_factor={self.load_factor:.0%})"
        )

    def bind(self, keys: Tensor, values: Tensor, **gates: Gate) -> None:
        """Write one pair ([d_k], [d_v]) or several in order ([n, d_k], [n, d_v]) by the memory's rule.

        A gate is a number, or a tensor [n] of one number per key.
        """
        phi, rows = self._phi(keys), self._values(values, keys)
        for name, gate in gates.items():
            if isinstance(gate, Tensor) and gate.ndim and tuple(gate.shape) != (len(phi),):
                problem = f"Gate {name!r} has shape {list(gate.shape)}"
                expected = f"a number, or one per key: [{len(phi)}]"
                raise ShapeError(problem, expected=expected, code="gate_does_not_match")
        if len(phi):
            self._commit(chain(self.rule.write(phi, rows, **gates)), self.rows + len(phi))

    def recall(self, queries: Tensor) -> Tensor:
        """Return what the memory answers: [d_v] for a query [d_k], [..., d_v] for [..., d_k]."""
        phi = self._phi(queries, queries=True)
        dtype = working_dtype(phi)
        return (phi.to(dtype) @ self.weights.to(dtype).mT).to(phi.dtype)

    def rebind(self, keys: Tensor, values: Tensor, *, protect: Tensor | None = None) -> None:
        """Replace the answers of stored keys exactly, by the smallest change of the weights that does it.

        Keys orthogonal to these keep their answers; others move by their overlap. `protect` holds keys [m, d_k] whose
        answers must not move at all (except those that are rebound).
        """
        self._rewrite(keys, self._values(values, keys), protect, self.rows)

    def unbind(self, keys: Tensor, *, protect: Tensor | None = None) -> None:
        """Make keys answer zero, as `rebind` to zero would, and free their rows."""
        count = len(self._phi(keys))
        self._rewrite(keys, self.weights.new_zeros(count, self.d_v), protect, max(self.rows - count, 0))

    def interference(self, keys: Tensor) -> Interference:
        """Measure how much each of these keys disturbs the others, under this memory's rule and feature map.

        For n random keys on the unit sphere of width d the expected disturbance is (n−1)/d.
        """
        phi = self._phi(keys)
        gain = self.rule.write(phi, phi.new_zeros(len(phi), self.d_v)).gain.squeeze(-2)
        overlap = (phi @ gain.mT).fill_diagonal_(0)
        energy = overlap.square()
        return Interference(overlap, caused=energy.sum(0), suffered=energy.sum(1))

    def save(self, path: str | Path) -> None:
        """Write the memory to a safetensors file, atomically."""
        description = {
            "format": FORMAT,
            "rule": self.rule.name,
            "feature": self.feature.name,
            "options": self.feature.options,
            "normalize": self.normalize,
            "d_k": self.d_k,
            "rows": self.rows,
        }
        state = {f"feature.{name}": tensor for name, tensor in self.feature.state.items()}
        tensors = {name: tensor.detach().contiguous() for name, tensor in {"weights": self.weights, **state}.items()}
        write_file(path, seal_tensors(save(tensors, metadata={"rebind": json.dumps(description)})))

    @classmethod
    def load(cls, path: str | Path) -> Memory:
        """Read a memory from a file that `save` wrote."""
        if not Path(path).is_file():
            raise InputError(f"There is no file {path}", advice="Check the path", code="no_such_file")
        try:
            with open_tensors(path) as (file, metadata):
                description = json.loads(metadata["rebind"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if description["format"] != FORMAT:
                raise ValueError(f"its format is {description['format']!r}")
            sizes = description["d_k"], tensors["weights"].shape[0]
            parts = (description[name] for name in ("rule", "feature", "normalize"))
            memory = cls(*sizes, *parts, dtype=tensors["weights"].dtype, **description["options"])
            for name in memory.feature.state:
                setattr(memory.feature, name, tensors[f"feature.{name}"])
            memory.weights, memory.rows = tensors["weights"], int(description["rows"])
            require_width("weights", memory.weights, memory.feature.width, f"feature map {memory.feature!r}")
            return memory
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as problem:
            reason = f"File {path} does not hold a memory: {problem}"
            raise InputError(reason, expected="a file that Memory.save wrote", code="not_a_memory_file") from None

    def _phi(self, keys: Tensor, *, queries: bool = False) -> Tensor:
        """Return keys as they meet the matrix. Queries may have any leading shape, and their features may be zero."""
        require_tensors(1, keys=keys)
        require_width("keys", keys, self.d_k, "this memory")
        if not queries:
            if keys.ndim > 2:
                problem = f"Keys have shape {list(keys.shape)}"
                raise ShapeError(problem, expected="[d_k] or [n, d_k]", code="too_many_dimensions")
            keys = keys.reshape(-1, self.d_k)
        keys = keys.to(self.weights)
        require_finite(keys=keys)
        phi = self.feature(keys) if self.normalize == "none" else self.feature.up_to_scale(keys)
        phi = NORMALIZERS[self.normalize](phi)
        empty = (phi == 0).all(-1)
        if not queries and empty.any():
            problem = f"Key {int(empty.nonzero()[0])} is all zeros under {self.feature!r}"
            advice = "Use another feature map, or keys that are not zero"
            raise InputError(problem, expected="a direction to write along", advice=advice, code="zero_key")
        return phi

    def _values(self, values: Tensor, keys: Tensor) -> Tensor:
        require_tensors(1, values=values)
        require_width("values", values, self.d_v, "this memory")
        require_finite(values=values)
        if values.shape[:-1] != keys.shape[:-1]:
            problem = f"Keys have shape {list(keys.shape)} and values {list(values.shape)}"
            raise ShapeError(problem, expected="one value per key", code="row_counts_differ")
        return values.reshape(-1, self.d_v).to(self.weights)

    def _rewrite(self, keys: Tensor, values: Tensor, protect: Tensor | None, rows: int) -> None:
        """Make the least change after which `keys` answer `values` and `protect` answers what it did before."""
        phi = self._phi(keys)
        if protect is not None:
            protected = self._phi(protect)
            overlap = l2_normalize(protected) @ l2_normalize(phi).mT
            same = (overlap > 1 - 8 * torch.finfo(phi.dtype).eps).any(-1)  # a key cannot both change and stay
            protected = protected[~same]
            phi, values = torch.cat([phi, protected]), torch.cat([values, protected @ self.weights.mT])
        if len(phi):
            self._commit(Write(phi, values, equality(phi)), rows)

    def _commit(self, write: Write, rows: int) -> None:
        """Apply a write, unless the new weights would hold NaN or infinity."""
        weights = write.apply(self.weights)
        require_finite(weights=weights)
        self.weights, self.rows = weights, rows
