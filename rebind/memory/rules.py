"""The fast rules: how a memory changes at every token.

Each rule is one class with a name, its gates and their defaults, and two formulas:

- its *coefficients* (α, ε, η) in the recurrence  W ← α W (I − ε k kᵀ) + η v kᵀ;
- the *online objective* of which that step is the minimum.

Everything else (the `Write`, the checks, the scan over sequences, the contract tests) follows
from these, so adding a rule is adding a class here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import (
    known,
    require_broadcastable,
    require_finite,
    require_floating,
    require_rank,
    require_width,
    unknown_name,
)
from rebind.memory.precision import common_dtype, working_dtype
from rebind.memory.write import Write

Gate = float | Tensor  # a constant, or one number a key: [...]


@dataclass(frozen=True)
class Coefficients:
    """α, ε and η of  W ← α W (I − ε k kᵀ) + η v kᵀ. A plain number is a constant of the rule."""

    decay: Gate  # α: how much of the memory is kept
    erase: Gate  # ε: how much of what k reads is removed
    write: Gate  # η: how much of v is written at k


class Gates:
    """A rule's gates as attributes. (torch.compile cannot trace a SimpleNamespace.)"""

    def __init__(self, values: dict[str, Gate]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name]


class Rule(ABC):
    """One fast rule. Subclasses with a `name` are found by `get_rule`."""

    name: ClassVar[str]
    gates: ClassVar[dict[str, float]]  # every gate with its default
    largest: ClassVar[dict[str, float]] = {}  # upper bounds of gates that have one
    reads: ClassVar[bool]  # whether the write probes the memory with k; if so ε = η
    decay: ClassVar[str | None] = None  # the gate that is α itself, where one is: its logarithm may be given instead

    _known: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Rule._known[cls.name] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def coefficients(self, k: Tensor, *, values: bool = True, **gates: Gate) -> Coefficients:
        """α, ε, η for keys [..., d_k]; each a constant or of shape [...].

        With `values=False` the gates' values are not looked at, which on a GPU would wait for them. `trusted` asks
        nothing at all.
        """
        require_rank(1, k=k)
        require_floating(k=k)
        return self._coefficients(k, self._gates(k, gates, values))

    def trusted(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        """`coefficients` of keys and gates that are known to be right, as a layer's own are."""
        return self._coefficients(k, Gates({**self.gates, **gates}))

    def write(self, k: Tensor, v: Tensor, **gates: Gate) -> Write:
        """The one-row write of each key [..., d_k] and value [..., d_v]: a batch of writes."""
        require_rank(1, v=v)
        coefficients = self.coefficients(k, values=True, **gates)
        dtype = common_dtype(k, v, *(gate for gate in gates.values() if isinstance(gate, Tensor)))
        wide = working_dtype(k)
        gain = (_column(coefficients.write) * k.to(wide)).unsqueeze(-2)
        probe = k if self.reads else torch.zeros_like(k)
        return Write(probe.unsqueeze(-2).to(dtype), v.unsqueeze(-2).to(dtype), gain.to(dtype), coefficients.decay)

    def objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, **gates: Gate) -> Tensor:
        """What the step from `previous` [..., d_v, d_k] minimises over `memory`: shape [...]."""
        require_rank(2, memory=memory, previous=previous)
        require_rank(1, k=k, v=v)
        require_width("k", k, memory.shape[-1], "this memory")
        require_width("v", v, memory.shape[-2], "this memory")
        if memory.shape[-2:] != previous.shape[-2:]:
            raise ShapeError(
                f"memory is {list(memory.shape)} and previous {list(previous.shape)}, expected the same last two "
                f"sizes: both are states of one memory"
            )
        require_broadcastable(
            "memory, previous, k and v", memory.shape[:-2], previous.shape[:-2], k.shape[:-1], v.shape[:-1]
        )
        dtype = working_dtype(memory, previous, k, v)
        out = common_dtype(memory, previous, k, v)
        memory, previous, k, v = (tensor.to(dtype) for tensor in (memory, previous, k, v))
        return self._objective(memory, previous, k, v, self._gates(k, gates)).to(out)

    @abstractmethod
    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients: ...

    @abstractmethod
    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor: ...

    def _gates(self, k: Tensor, given: dict[str, Gate], values: bool = True) -> Gates:
        for name, gate in given.items():
            if name not in self.gates:
                takes = ", ".join(self.gates) or "no gates"
                raise InputError(f"rule {self.name!r} got a gate {name!r}, takes {takes}: leave {name!r} out")
            value = self._gate(name, gate)
            if values:
                self._check_values(name, value)
            require_broadcastable(f"k and {name}", k.shape[:-1], value.shape)
        return Gates({**self.gates, **given})

    def _check_values(self, name: str, value: Tensor) -> None:
        require_finite(**{name: value})
        most = self.largest.get(name, float("inf"))
        if known(((value < 0) | (value > most)).any()):
            expected = "0 or more" if most == float("inf") else f"0 to {most:g}"
            raise InputError(
                f"gate {name!r} of rule {self.name!r} ranges from {value.min():.3g} to {value.max():.3g}, expected "
                f"{expected}: pass it through a sigmoid or softplus"
            )

    def _gate(self, name: str, gate: Gate) -> Tensor:
        if isinstance(gate, Tensor):
            require_floating(**{name: gate})
            return gate.detach()
        if isinstance(gate, bool) or not isinstance(gate, (int, float)):
            raise InputError(f"gate {name!r} is {gate!r}, expected a number or a tensor of one a key: convert it first")
        return torch.tensor(float(gate))


class Sum(Rule):
    """Hebbian sum, linear attention: W + v kᵀ (Schlag et al. eq. 17). It only ever adds."""

    name = "sum"
    gates: ClassVar[dict[str, float]] = {}
    reads = False

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        return Coefficients(decay=1.0, erase=0.0, write=1.0)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        return _distance(memory, previous) - 2 * _agreement(memory, k, v)


class Rfa(Rule):
    """Random feature attention's gate: (1−β) W + β v kᵀ (Schlag et al. eq. 52)."""

    name = "rfa"
    gates: ClassVar[dict[str, float]] = {"beta": 0.5}
    largest: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = False

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        return Coefficients(decay=1 - gate.beta, erase=0.0, write=gate.beta)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        kept = _matrix(1 - gate.beta) * previous
        return _distance(memory, kept) - 2 * gate.beta * _agreement(memory, k, v)


class Mamba2(Rule):
    """A scalar decay a token: α W + dt · v kᵀ."""

    name = "mamba2"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "dt": 1.0}
    reads = False
    decay = "alpha"

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        return Coefficients(decay=gate.alpha, erase=0.0, write=gate.dt)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        return _distance(memory, _matrix(gate.alpha) * previous) - 2 * gate.dt * _agreement(memory, k, v)


class Delta(Rule):
    """DeltaNet: W + β (v − W k) kᵀ (Schlag et al. eq. 24). Replaces what k read, in part β."""

    name = "delta"
    gates: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = True

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        return Coefficients(decay=1.0, erase=gate.beta, write=gate.beta)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        error = v - _read(previous, k)
        return _distance(memory, previous) - 2 * gate.beta * _agreement(memory, k, error)


class Longhorn(Rule):
    """The implicit delta rule: ε = β / (1 + β‖k‖²), stable for keys of any norm (β ≥ 0).

    Its objective weighs staying put against answering right, ‖S − S′‖² + β‖S k − v‖², solved
    exactly. It is also found in print with a minus before the second term; the update needs the plus.
    """

    name = "longhorn"
    gates: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = True

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        energy = k.to(working_dtype(k)).square().sum(-1)
        rate = gate.beta / (1 + gate.beta * energy)
        return Coefficients(decay=1.0, erase=rate, write=rate)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        miss = (_read(memory, k) - v).square().sum(-1)
        return _distance(memory, previous) + gate.beta * miss


class GatedDelta(Rule):
    """Gated DeltaNet: α W (I − β k kᵀ) + β v kᵀ. Forgets everything a little and k's value a lot."""

    name = "gated_delta"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "beta": 1.0}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gate: Gates) -> Coefficients:
        return Coefficients(decay=gate.alpha, erase=gate.beta, write=gate.beta)

    def _objective(self, memory: Tensor, previous: Tensor, k: Tensor, v: Tensor, gate: Gates) -> Tensor:
        kept = _matrix(gate.alpha) * previous
        error = v - _read(kept, k)
        return _distance(memory, kept) - 2 * gate.beta * _agreement(memory, k, error)


def get_rule(name: str | Rule) -> Rule:
    """The rule of that name; a rule object passes through."""
    if isinstance(name, Rule):
        return name
    if not isinstance(name, str) or name not in Rule._known:
        raise unknown_name("rule", name, Rule._known)
    return Rule._known[name]()


def rule_names() -> list[str]:
    return sorted(Rule._known)


def _column(gate: Gate) -> Gate:
    return gate.unsqueeze(-1) if isinstance(gate, Tensor) else gate


def _matrix(gate: Gate) -> Gate:
    return gate[..., None, None] if isinstance(gate, Tensor) else gate


def _read(memory: Tensor, k: Tensor) -> Tensor:
    return (memory @ k.unsqueeze(-1)).squeeze(-1)


def _distance(memory: Tensor, other: Tensor) -> Tensor:
    """‖S − S′‖²_F."""
    return (memory - other).square().sum((-2, -1))


def _agreement(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """⟨S k, v⟩."""
    return (_read(memory, k) * v).sum(-1)
