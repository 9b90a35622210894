"""The fast rules: how a memory changes at every token.

A rule is a class with a name, its gates and their defaults, and its *coefficients* (α, ε, η) in the recurrence

    W ← α W (I − ε k kᵀ) + η v kᵀ.

Everything else (the `Write`, the checks, the scan over sequences, the contract tests) follows from these, so adding a
rule is adding a class here. Each step minimizes an online objective: docs/algebra.md, law 6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.memory.checks import known, require_broadcastable, require_finite, require_tensors, unknown_name
from rebind.memory.precision import common_dtype, working_dtype
from rebind.memory.write import Write

Gate = float | Tensor  # a constant, or one number per key: [...]


@dataclass(frozen=True)
class Coefficients:
    """α, ε and η of  W ← α W (I − ε k kᵀ) + η v kᵀ. A plain number is a constant of the rule."""

    decay: Gate  # α: how much of the memory is retained
    erase: Gate  # ε: how much of what k reads is removed
    write: Gate  # η: how much of v is written at k


class Rule(ABC):
    """One fast rule. `get_rule` finds every subclass that has a `name`."""

    name: ClassVar[str]
    gates: ClassVar[dict[str, float]]  # every gate with its default
    largest: ClassVar[dict[str, float]] = {}  # upper bounds of the gates that have one
    reads: ClassVar[bool]  # whether the write probes the memory with k; if so ε = η
    decay: ClassVar[str | None] = None  # the gate that is α itself, if any: its logarithm may be passed instead

    _known: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Rule._known[cls.name] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def coefficients(self, k: Tensor, *, check_values: bool = True, **gates: Gate) -> Coefficients:
        """Return α, ε, η for keys [..., d_k]; each is a constant or of shape [...].

        `check_values=False` does not read the values of the gates, for which a GPU would have to be waited for.
        """
        require_tensors(1, k=k)
        for name, gate in gates.items():
            self._check_gate(k, name, gate, check_values)
        return self.unchecked_coefficients(k, gates)

    def unchecked_coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        """Return `coefficients` for keys and gates that are known to be right, such as those a layer computes."""
        return self._coefficients(k, {**self.gates, **gates})

    def write(self, k: Tensor, v: Tensor, **gates: Gate) -> Write:
        """Return the one-row write of each key [..., d_k] and value [..., d_v]: a batch of writes."""
        require_tensors(1, v=v)
        coefficients = self.coefficients(k, check_values=True, **gates)
        dtype = common_dtype(k, v, *(gate for gate in gates.values() if isinstance(gate, Tensor)))
        strength = coefficients.write
        strength = strength.unsqueeze(-1) if isinstance(strength, Tensor) else strength
        gain = (strength * k.to(working_dtype(k))).unsqueeze(-2)
        probe = k if self.reads else torch.zeros_like(k)
        return Write(probe.unsqueeze(-2).to(dtype), v.unsqueeze(-2).to(dtype), gain.to(dtype), coefficients.decay)

    @abstractmethod
    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients: ...

    def _check_gate(self, k: Tensor, name: str, gate: Gate, check_values: bool = True) -> None:
        if name not in self.gates:
            problem = f"Rule {self.name!r} has no gate {name!r}"
            raise InputError(problem, expected=", ".join(self.gates) or "no gates", code="unknown_gate")
        if isinstance(gate, Tensor):
            require_tensors(0, **{name: gate})
        elif isinstance(gate, bool) or not isinstance(gate, (int, float)):
            raise InputError(f"Gate {name!r} is {gate!r}", expected="a number or a tensor", code="invalid_gate")
        value = gate.detach() if isinstance(gate, Tensor) else torch.tensor(float(gate))
        require_broadcastable(f"k and {name}", k.shape[:-1], value.shape)
        if not check_values:
            return
        require_finite(**{name: value})
        most = self.largest.get(name, float("inf"))
        if known(((value < 0) | (value > most)).any()):
            problem = f"Gate {name!r} of rule {self.name!r} ranges from {value.min():.3g} to {value.max():.3g}"
            expected = "0 or more" if most == float("inf") else f"0 to {most:g}"
            advice = "Pass it through a sigmoid or softplus"
            raise InputError(problem, expected=expected, advice=advice, code="gate_out_of_range")


class Sum(Rule):
    """Hebbian sum, linear attention: W + v kᵀ (Schlag et al. eq. 17). It only adds."""

    name = "sum"
    gates: ClassVar[dict[str, float]] = {}
    reads = False

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=1.0, erase=0.0, write=1.0)


class Rfa(Rule):
    """The gate of random feature attention: (1−β) W + β v kᵀ (Schlag et al. eq. 52)."""

    name = "rfa"
    gates: ClassVar[dict[str, float]] = {"beta": 0.5}
    largest: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = False

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=1 - gates["beta"], erase=0.0, write=gates["beta"])


class Mamba2(Rule):
    """One decay per token: α W + dt · v kᵀ."""

    name = "mamba2"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "dt": 1.0}
    reads = False
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=gates["alpha"], erase=0.0, write=gates["dt"])


class Delta(Rule):
    """DeltaNet: W + β (v − W k) kᵀ (Schlag et al. eq. 24). It replaces a part β of what k read."""

    name = "delta"
    gates: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = True

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=1.0, erase=gates["beta"], write=gates["beta"])


class Longhorn(Rule):
    """The implicit delta rule: ε = β / (1 + β‖k‖²), stable for keys of any norm (β ≥ 0).

    Its objective weighs staying put against answering right, ‖S − S′‖² + β‖S k − v‖², solved exactly. The literature
    also prints a minus before the second term; the update needs the plus.
    """

    name = "longhorn"
    gates: ClassVar[dict[str, float]] = {"beta": 1.0}
    reads = True

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        energy = k.to(working_dtype(k)).square().sum(-1)
        rate = gates["beta"] / (1 + gates["beta"] * energy)
        return Coefficients(decay=1.0, erase=rate, write=rate)


class GatedDelta(Rule):
    """Gated DeltaNet: α W (I − β k kᵀ) + β v kᵀ. It forgets everything a little and the value at k a lot."""

    name = "gated_delta"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "beta": 1.0}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=gates["alpha"], erase=gates["beta"], write=gates["beta"])


def get_rule(name: str | Rule) -> Rule:
    """Return the rule of that name; a rule object passes through."""
    if isinstance(name, Rule):
        return name
    if not isinstance(name, str) or name not in Rule._known:
        raise unknown_name("rule", name, Rule._known)
    return Rule._known[name]()


def rule_names() -> list[str]:
    """Return the names of all rules."""
    return sorted(Rule._known)
