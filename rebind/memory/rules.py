"""The fast rules: how a memory changes at every token.

A rule is a class with a name, its gates and their defaults, and its *coefficients* in the recurrence

    W~ = W diag(d)          W' = W~ + η v uᵀ − ε (W~ p) eᵀ

with the decay d, the key u that v is written at, the probe p that reads what is left of the memory, and the erase key e
along which part of that is taken away. Most rules have u = p = e = k, and many have one number for d, which is then α:
W' = α W (I − ε k kᵀ) + η v kᵀ.

Everything else (the `Write`, the checks, the scan over sequences, the contract tests) follows from these, so adding a
rule is adding a class here. Each step minimizes an online objective: docs/algebra.md, law 6.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.chain import chain
from rebind.memory.checks import known, require_broadcastable, require_finite, require_tensors, unknown_name
from rebind.memory.features import l2_normalize
from rebind.memory.precision import common_dtype, working_dtype
from rebind.memory.write import Write

# A constant, one number per key [...], or for some gates one per channel [..., d_k] or [..., d_v].
Gate = float | Tensor

SMALLEST_DECAY = 1e-13  # what a probe that reads before a decay is divided by at least, to read after it instead


@dataclass(frozen=True)
class Coefficients:
    """What a rule makes of keys k [..., d_k] and its gates. A plain number is a constant of the rule."""

    decay: Gate  # d: how much of the memory is retained, a number per key or per channel [..., d_k]
    erase: Gate  # ε: how much of what the probe reads is removed
    write: Gate  # η: how much of v is written
    key: Tensor | None = None  # u [..., d_k]; None: k
    probe: Tensor | None = None  # p [..., d_k]; None: k
    erase_key: Tensor | None = None  # e [..., d_k]; None: u
    value: Gate = 1.0  # [..., d_v]: what v is multiplied by
    probe_before_decay: bool = False  # whether p reads W, not W~


class Rule(ABC):
    """One fast rule. `get_rule` finds every subclass that has a `name`."""

    name: ClassVar[str]
    gates: ClassVar[dict[str, float]]  # every gate with its default
    largest: ClassVar[dict[str, float]] = {}  # upper bounds of the gates that have one
    signed: ClassVar[tuple[str, ...]] = ()  # the gates that may be negative
    channels: ClassVar[dict[str, str]] = {}  # the gates that may be a vector, of the width of the "key" or the "value"
    reads: ClassVar[bool]  # whether the write probes the memory; if so ε = η, except where e ≠ u
    decay: ClassVar[str | None] = None  # the gate that is d itself, if any: its logarithm may be passed instead
    several: ClassVar[bool] = False  # whether a token has several keys and values

    _known: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            Rule._known[cls.name] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def coefficients(self, k: Tensor, *, check_values: bool = True, **gates: Gate) -> Coefficients:
        """Return the coefficients of keys [..., d_k]; a gate is a constant or of shape [...], or has `channels`.

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
        """Return the write of each key [..., d_k] and value [..., d_v]: a batch of writes of one row, two if e ≠ u."""
        require_tensors(1, v=v)
        c = self.coefficients(k, check_values=True, **gates)
        dtype = common_dtype(k, v, *(gate for gate in gates.values() if isinstance(gate, Tensor)))
        wide = working_dtype(k)
        key = (k if c.key is None else c.key).to(wide)
        probe = k if c.probe is None else c.probe
        if c.probe_before_decay:
            probe = undecayed_probe(probe, c.decay)
        rows = [((probe if self.reads else torch.zeros_like(k)), v * c.value, _times(c.write, key))]
        if c.erase_key is not None:  # a row that only erases; both read W~
            erases = (_times(c.erase, probe), torch.zeros_like(v), c.erase_key.to(wide))
            rows = [erases, (torch.zeros_like(key), *rows[0][1:])]
        parts = [torch.stack(torch.broadcast_tensors(*part), dim=-2).to(dtype) for part in zip(*rows, strict=True)]
        number, channels = (1.0, c.decay) if self.decays_by_channel(c.decay, k) else (c.decay, None)
        return Write(parts[0], parts[1], parts[2], number, channels)  # type: ignore[arg-type]

    @staticmethod
    def decays_by_channel(decay: Gate, k: Tensor) -> bool:
        """Return whether a decay has a number for each channel of the keys [..., d_k], not one for each key."""
        return isinstance(decay, Tensor) and decay.ndim == k.ndim

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
        self._check_shape(k, name, value)
        if not check_values:
            return
        require_finite(**{name: value})
        most = self.largest.get(name, float("inf"))
        if name not in self.signed and known(((value < 0) | (value > most)).any()):
            problem = f"Gate {name!r} of rule {self.name!r} ranges from {value.min():.3g} to {value.max():.3g}"
            expected = "0 or more" if most == float("inf") else f"0 to {most:g}"
            advice = "Pass it through a sigmoid or softplus"
            raise InputError(problem, expected=expected, advice=advice, code="gate_out_of_range")

    def _check_shape(self, k: Tensor, name: str, gate: Tensor) -> None:
        """Require a gate of one number per key or, if it has channels and as many dimensions as k, one for each."""
        if name in self.channels and gate.ndim == k.ndim:
            width = k.shape[-1] if self.channels[name] == "key" else gate.shape[-1]
            require_broadcastable(f"k and {name}", (*k.shape[:-1], width), gate.shape)
        elif gate.shape == k.shape and k.shape[-1] not in (*k.shape[-2:-1], 1):  # which could not broadcast
            problem = f"Gate {name!r} of rule {self.name!r} has shape {list(gate.shape)}, and k {list(k.shape)}"
            expected = f"a number per key, {list(k.shape[:-1])}"
            others = [rule.name for rule in Rule._known.values() if name in rule.channels]
            advice = f"Rules with a number per channel: {', '.join(others)}" if others else ""
            raise ShapeError(problem, expected=expected, advice=advice, code="gate_does_not_match")
        else:
            require_broadcastable(f"k and {name}", k.shape[:-1], gate.shape)


def _times(gate: Gate, x: Tensor) -> Tensor:
    """Return a gate, one number per row or per channel, times x [..., width]."""
    return gate * x if not isinstance(gate, Tensor) or gate.ndim == x.ndim else gate.unsqueeze(-1) * x


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
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
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
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=gates["alpha"], erase=gates["beta"], write=gates["beta"])


class Gla(Rule):
    """Gated linear attention: W diag(α) + v kᵀ, with a decay α per key channel."""

    name = "gla"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0}
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    channels: ClassVar[dict[str, str]] = {"alpha": "key"}
    reads = False
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        return Coefficients(decay=gates["alpha"], erase=0.0, write=1.0)


class Kda(GatedDelta):
    """Kimi Delta Attention: Gated DeltaNet with a decay α per key channel."""

    name = "kda"
    channels: ClassVar[dict[str, str]] = {"alpha": "key"}


class Gdn2(Rule):
    """Gated DeltaNet-2: W~ + (w ⊙ v − W~ (b ⊙ k)) kᵀ with W~ = W diag(α).

    What is erased and what is written have gates of their own, b (`erase`) per key channel and w (`write`) per value
    channel.
    """

    name = "gdn2"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "erase": 1.0, "write": 1.0}
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    channels: ClassVar[dict[str, str]] = {"alpha": "key", "erase": "key", "write": "value"}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        w = gates["write"]
        value = w.unsqueeze(-1) if isinstance(w, Tensor) and w.ndim < k.ndim else w
        return Coefficients(gates["alpha"], erase=1.0, write=1.0, probe=_times(gates["erase"], k), value=value)


class Comba(Rule):
    """Comba: α W + β (v − W p) kᵀ with p = b ⊙ k (`feedback`). It reads the memory before it decays."""

    name = "comba"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "beta": 1.0, "feedback": 1.0}
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    channels: ClassVar[dict[str, str]] = {"feedback": "key"}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        beta, probe = gates["beta"], _times(gates["feedback"], k)
        return Coefficients(gates["alpha"], beta, beta, probe=probe, probe_before_decay=True)


class Preconditioned(Rule):
    """The delta rule with a step size per channel: W~ + β (v − W~ k) (M ⊙ k)ᵀ, W~ = W diag(α).

    M (`scale`) preconditions the step as Adam's second moment would. With one α per key it is PGDN, with one per
    channel PKDA.
    """

    name = "preconditioned"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "beta": 1.0, "scale": 1.0}
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    channels: ClassVar[dict[str, str]] = {"alpha": "key", "scale": "key"}
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        beta = gates["beta"]
        return Coefficients(gates["alpha"], beta, beta, key=_times(gates["scale"], k), probe=k)


class Rwkv7(Rule):
    """RWKV-7: W diag(α) − (W κ̂) (a ⊙ κ̂)ᵀ + v k~ᵀ, with κ̂ = normalized κ ⊙ k and k~ = k ⊙ (1 + (a − 1) mix).

    `a` is the rate at which what κ̂ reads is replaced, per channel. The memory is read before it decays, as by `comba`.
    """

    name = "rwkv7"
    gates: ClassVar[dict[str, float]] = {"alpha": 1.0, "a": 1.0, "kappa": 1.0, "mix": 0.0}
    largest: ClassVar[dict[str, float]] = {"alpha": 1.0}
    channels: ClassVar[dict[str, str]] = dict.fromkeys(("alpha", "a", "kappa", "mix"), "key")
    signed: ClassVar[tuple[str, ...]] = ("kappa", "mix")  # published models learn them without bounds
    reads = True
    decay = "alpha"

    def _coefficients(self, k: Tensor, gates: dict[str, Gate]) -> Coefficients:
        removed = l2_normalize(_times(gates["kappa"], k))
        rate = _times(gates["a"], torch.ones_like(k))
        key = k * (1 + _times(gates["mix"], rate - 1))
        erase_key = rate * removed
        return Coefficients(
            gates["alpha"], 1.0, 1.0, key=key, probe=removed, erase_key=erase_key, probe_before_decay=True
        )


class DeltaProduct(Delta):
    """DeltaProduct: several delta writes per token, one after another.

    `write` takes the keys and values of a token as rows, [..., n, d_k] and [..., n, d_v]. A scan takes the rows of all
    tokens in order, [B, T · n, H, width].
    """

    name = "delta_product"
    several = True

    def write(self, k: Tensor, v: Tensor, **gates: Gate) -> Write:
        """Return the composition of the writes of each token's rows."""
        return chain(super().write(k, v, **gates))


class GatedDeltaProduct(GatedDelta):
    """Gated DeltaProduct: the memory decays by α once per token, then come several delta writes."""

    name = "gated_delta_product"
    several = True

    def write(self, k: Tensor, v: Tensor, **gates: Gate) -> Write:
        """Return the composition of a token's decay, with α [...], and of the writes of its rows, with β [..., n]."""
        alpha = gates.pop("alpha", 1.0)
        decays = get_rule("mamba2").write(torch.zeros_like(k[..., 0, :]), v[..., 0, :], alpha=alpha)
        return chain(super().write(k, v, **gates)) @ decays

    def _check_shape(self, k: Tensor, name: str, gate: Tensor) -> None:
        if name != "alpha":  # which has fewer rows: one per token
            super()._check_shape(k, name, gate)


def undecayed_probe(probe: Tensor, decay: Gate) -> Tensor:
    """Return the probe that reads after a decay what `probe` reads before it: exact down to a decay of 1e-13."""
    if not isinstance(decay, Tensor):
        return probe / max(decay, SMALLEST_DECAY)
    return _times(1 / decay.clamp_min(SMALLEST_DECAY), probe)


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
