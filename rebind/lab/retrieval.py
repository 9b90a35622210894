"""The synthetic retrieval of Schlag et al.: models that learn which keys to write, many of them at once.

A sequence binds keys to values; then one key is asked for. Values are one-hots; keys are learned embeddings e; the
memory is addressed by k = W_K [v; e] and q = W_Q e through a feature φ, and gates come from [v; e].

A query comes after the last write, so no state is ever formed. With a_i = φ(k_i)·φ(q), the recurrence

    S_t = α_t (I − ε_t k_t k_tᵀ) S_{t−1} + η_t k_t v_tᵀ,    o = S_Lᵀ q

reads  o = Σ_j c_j v_j,  c_j = η_j (γ_L/γ_j) (T₀ᵀ a)_j,  T₀ = (I + tril(diag(ε) K Kᵀ, −1))⁻¹,  γ = cumprod(α):
one triangular system of L unknowns a query, whatever the rule, and none where ε = 0.

The seeds of one recipe make a stack: every parameter has a leading axis [models], and sequences are [models, batch, L].
`rebind.lab.stacks` trains them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError
from rebind.lab.experiment import Config
from rebind.lab.reading import constant, corrected, half_square, rows, similarity
from rebind.lab.squash import squashed
from rebind.memory import Feature, get_feature, get_rule
from rebind.memory.features import Favor

FEATURES: dict[str, tuple[str, dict[str, int]]] = {
    "linear": ("elu+1", {}),
    "dpfp-1": ("dpfp", {"nu": 1}),
    "dpfp-2": ("dpfp", {"nu": 2}),
    "dpfp-3": ("dpfp", {"nu": 3}),
    "favor-64": ("favor", {"m": 64}),
    "favor-128": ("favor", {"m": 128}),
    "favor-512": ("favor", {"m": 512}),
    "softmax": ("identity", {}),
}
SOLVED = 1e-3  # the loss at which training ends


@dataclass(frozen=True)
class Training(Config):
    """How every model is trained."""

    key_width: int = 64
    rate: float = 1e-3
    batch: int = 32
    steps: int = 100_000  # at most
    every: int = 100  # steps between evaluations
    patience: int = 11  # evaluations without improvement
    tested: int = 20  # sequences of an evaluation


@dataclass(frozen=True)
class Task:
    """Sequences to learn: `length` writes of `size` keys and values."""

    size: int  # S
    length: int  # L
    replacement: bool  # keys and values may come again; the latest counts

    @property
    def once(self) -> bool:
        """Whether every key and every value comes exactly once."""
        return not self.replacement and self.length == self.size

    def draw(self, count: int, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Keys and values, [models, count, L] each, a generator a model."""
        return self._ordered([self._noise(count, generator) for generator in generators])

    def lessons(self, count: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Sequences with one query each, [models, count, …], as `Sequences.of` takes them apart."""
        noise, places = [], []
        for generator in generators:
            noise.append(self._noise(count, generator))
            places.append(torch.randint(self.length, (count, 1), generator=generator, device=generator.device))
        keys, values = self._ordered(noise)
        query = keys.gather(-1, torch.stack(places))
        back = [keys.argsort(-1), values.argsort(-1)] if self.once else []
        return torch.cat([keys, values, query, latest(keys, values, query), *back], dim=-1)

    def _noise(self, count: int, generator: torch.Generator) -> Tensor:
        """What a model's keys and values are made of: [2, count, …]."""
        device = generator.device
        if self.replacement:
            return torch.randint(self.size, (2, count, self.length), generator=generator, device=device)
        return torch.rand(2, count, self.size, generator=generator, device=device)

    def _ordered(self, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        drawn = torch.stack(list(noise), dim=1)  # of all models at once
        keys, values = (drawn if self.replacement else drawn.argsort(-1)[..., : self.length]).unbind()
        return keys, values


@dataclass(frozen=True)
class Sequences:
    """What is written and asked: keys and values [models, B, L], queries and what they should read [models, B, Q]."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    wanted: Tensor
    back: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    """For the gradients of keys, values and queries, as `reading.rows` takes them."""

    @classmethod
    def of(cls, lessons: Tensor, task: Task) -> Sequences:
        """Of what `Task.lessons` drew, [models, B, …]."""
        length = task.length
        keys, values, queries, wanted, *places = lessons.split(
            [length, length, 1, 1, *([length, length] if task.once else [])], dim=-1
        )
        by_key, by_value = places if task.once else (hot(keys, task.size), hot(values, task.size))
        return cls(keys, values, queries, wanted, (by_key, by_value, hot(queries, task.size)))


@dataclass(frozen=True)
class Recipe:
    """What the models of a stack have in common."""

    task: Task
    feature: str
    rule: str = "sum"


class Stack:
    """Models of one recipe, a seed each. Parameters are float32, [models, …]."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], config: Training, device: torch.device) -> None:
        if recipe.feature not in FEATURES:
            raise InputError(
                f"feature {recipe.feature!r} is unknown, expected one of {', '.join(FEATURES)}: choose one of these"
            )
        self.recipe, self.task, self.softmax = recipe, recipe.task, recipe.feature == "softmax"
        self.rule = None if recipe.rule == "tanh" else get_rule(recipe.rule)
        name, options = FEATURES[recipe.feature]
        self.feature: Feature = get_feature(name, config.key_width, **options)
        gentle = self.softmax or isinstance(self.feature, Favor)
        drawn = [_initial(self.task.size, config.key_width, seed, gentle) for seed in seeds]
        self.parameters = {
            part: torch.stack([one[part] for one in drawn]).to(device).requires_grad_() for part in drawn[0]
        }
        for part, held in self.feature.state.items():  # where the models are, once, and not at every step
            setattr(self.feature, part, held.to(self.parameters["embed"]))
        self.constant = constant(self.feature, self.parameters["embed"].detach())

    def keep(self, which: Sequence[int]) -> None:
        """Only these models go on."""
        self.parameters = {name: p.detach()[list(which)].requires_grad_() for name, p in self.parameters.items()}

    def loss(self, sequences: Sequences) -> Tensor:
        """½‖o − v‖² of every query: [models, B, Q]."""
        return half_square(self.read(sequences), sequences.wanted)

    def read(self, sequences: Sequences) -> Tensor:
        """What is read for the queries after the writes: [models, B, Q, S]."""
        p, values = self.parameters, sequences.values
        by_key, by_value, by_query = sequences.back
        k = rows(self._table("key"), sequences.keys, by_key) + rows(p["key_value"], values, by_value)
        q = rows(self._table("query"), sequences.queries, by_query)
        if self.softmax:
            weights = torch.softmax(q @ k.mT / math.sqrt(k.shape[-1]), dim=-1)
        elif self.rule is None:
            return self.feature(q) @ squashed(self.feature(k), values, self.task.size).mT
        else:
            logits = None
            if self.rule.gates:
                logits = rows(self._table("gate"), sequences.keys, by_key) + rows(p["gate_value"], values, by_value)
            weights = self._weights(k, q, logits)
        return self._values_of(weights, values, by_value)

    def _table(self, part: str) -> Tensor:
        """W e + b of every embedding: [models, S, …]."""
        p = self.parameters
        return torch.baddbmm(p[f"{part}_bias"].unsqueeze(1), p["embed"], p[part].mT)

    def _weights(self, k: Tensor, q: Tensor, logits: Tensor | None) -> Tensor:
        """c [models, B, Q, L]. Rules that correct take features that sum to one; the others divide by Σ c."""
        assert self.rule is not None
        gates = {} if logits is None else _gates(self.recipe.rule, logits)
        if self.rule.reads:
            phi_k, phi_q = (_shares(self.feature.up_to_scale(x)) for x in (k, q))
            got = self.rule.coefficients(phi_k, values=False, **gates)
            return faded(correct(phi_k, phi_q, got.erase), got.decay, got.write)
        products = similarity(self.feature, self.constant, k, q)
        got = self.rule.coefficients(k, values=False, **gates)
        return products.share(faded(products.scaled, got.decay, got.write))

    def _values_of(self, weights: Tensor, values: Tensor, by_value: Tensor | None) -> Tensor:
        """Σ_j c_j v_j for one-hot values: [models, B, Q, S]."""
        if not self.task.once:
            return weights @ (hot(values, self.task.size) if by_value is None else by_value)
        zeros = weights.new_zeros(*weights.shape[:-1], self.task.size)
        return zeros.scatter_add(-1, values.unsqueeze(-2).expand_as(weights), weights)


def _gates(rule: str, logits: Tensor) -> dict[str, Any]:
    """Gates [models, B, L] of logits [models, B, L, 2]: σ keeps β and α below 1; Longhorn's β has no upper bound."""
    beta, alpha = logits.unbind(-1)
    every = {"beta": beta.clamp_max(20).exp() if rule == "longhorn" else beta.sigmoid(), "alpha": alpha.sigmoid()}
    return {name: gate for name, gate in every.items() if name in get_rule(rule).gates}


def _shares(x: Tensor) -> Tensor:
    """x / Σx for features that are never negative; a row of zeros stays zero.

    `sum_normalise` without its look at the values, for which a GPU would have to be waited for.
    """
    total = x.sum(-1, keepdim=True)
    return x / (total + (total == 0))


def correct(k: Tensor, q: Tensor, erase: float | Tensor) -> Tensor:
    """aᵀT₀ [..., Q, L] for φ(k) [..., L, D], φ(q) [..., Q, D] and ε [..., L]."""
    if not isinstance(erase, Tensor):
        return q @ k.mT
    if q.shape[-2] == 1:
        return corrected(k, q, erase)
    system = torch.tril(erase.unsqueeze(-1) * (k @ k.mT), -1)
    # aᵀT₀ = x  ⇔  x (I + system) = a
    return torch.linalg.solve_triangular(system, q @ k.mT, upper=False, left=False, unitriangular=True)


def faded(weights: Tensor, decay: float | Tensor, write: float | Tensor) -> Tensor:
    """c [..., Q, L] of o = Σ c_j v_j: η_j γ_L/γ_j times aᵀT₀, for coefficients [..., L]."""
    if isinstance(decay, Tensor):
        logs = decay.clamp_min(1e-30).log()
        weights = weights * (logs.sum(-1, keepdim=True) - logs.cumsum(-1)).exp().unsqueeze(-2)
    if isinstance(write, Tensor):
        return weights * write.unsqueeze(-2)
    return weights if write == 1 else weights * write


def latest(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """The value that each query's key was last bound to: [..., Q]."""
    order = torch.arange(1, keys.shape[-1] + 1, device=keys.device)
    last = ((queries.unsqueeze(-1) == keys.unsqueeze(-2)) * order).argmax(-1)
    return values.gather(-1, last)


def hot(index: Tensor, size: int) -> Tensor:
    """One-hots [..., S], float32."""
    return torch.zeros(*index.shape, size, device=index.device).scatter_(-1, index.unsqueeze(-1), 1.0)


def _initial(size: int, key_width: int, seed: int, gentle: bool) -> dict[str, Tensor]:
    """One model's parameters: N(0, 1) embeddings, linear maps U(±1/8) with biases.

    Where k·q goes into an exponential, W_K and W_Q begin as Xavier's, as the authors' softmax does: at S = 600 the
    others make softmax's scores ±7, one key takes all of the weight, and nothing is ever learned.
    """
    generator = torch.Generator().manual_seed(seed)
    width = int(1.1 * 2 * size)

    def uniform(*shape: int, bound: float = 1 / 8) -> Tensor:
        return (2 * torch.rand(shape, generator=generator) - 1) * bound

    def xavier(inputs: int) -> float:
        return math.sqrt(6 / (inputs + key_width))

    for_keys, for_queries = (xavier(width + size), xavier(width)) if gentle else (1 / 8, 1 / 8)
    return {
        "embed": torch.randn(size, width, generator=generator),
        "key": uniform(key_width, width, bound=for_keys),
        "key_value": uniform(size, key_width, bound=for_keys),  # W_K's columns for the one-hot value
        "key_bias": uniform(key_width),
        "query": uniform(key_width, width, bound=for_queries),
        "query_bias": uniform(key_width),
        "gate": uniform(2, width),  # β and α
        "gate_value": uniform(size, 2),
        "gate_bias": uniform(2) + torch.tensor([0.0, 4.0]),  # α begins near 1
    }
