"""The synthetic retrieval of Schlag et al.: models that learn which keys to write, many of them at once.

A sequence binds keys to values; then one key is asked for. Values are one-hots; keys are learned embeddings e; the
memory is addressed by k = W_K [v; e] and q = W_Q e through a feature φ, and gates come from [v; e].

A query comes after the last write, so no state is ever formed. With a_i = φ(k_i)·φ(q), the recurrence

    S_t = α_t (I − ε_t k_t k_tᵀ) S_{t−1} + η_t k_t v_tᵀ,    o = S_Lᵀ q

reads  o = Σ_j c_j v_j,  c_j = η_j (γ_L/γ_j) (T₀ᵀ a)_j,  T₀ = (I + tril(diag(ε) K Kᵀ, −1))⁻¹,  γ = cumprod(α):
one triangular system of L unknowns a query, whatever the rule, and none where ε = 0.

Models of one size train together: every parameter has a leading axis [models], and sequences are [models, batch, L].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError
from rebind.lab.experiment import Config
from rebind.memory import Feature, get_feature, get_rule, sum_normalise

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

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Keys and values, [count, L] each."""
        device = generator.device
        if self.replacement:
            both = torch.randint(self.size, (2, count, self.length), generator=generator, device=device)
        else:
            both = torch.rand(2, count, self.size, generator=generator, device=device).argsort(-1)[..., : self.length]
        return both[0], both[1]


@dataclass(frozen=True)
class Model:
    """One model of a stack."""

    rule: str
    seed: int


@dataclass(frozen=True)
class Trained:
    loss: float  # at the end, on sequences of the task's length
    short: float  # the same on sequences of length S, as the public evaluation of setting 2 had them
    steps: int
    losses: list[float]  # at every evaluation


class Stack:
    """Models with one task and one feature. Parameters are float32, [models, …]."""

    def __init__(
        self, models: Sequence[Model], task: Task, feature: str, config: Training, device: torch.device
    ) -> None:
        if feature not in FEATURES:
            raise InputError(
                f"feature {feature!r} is unknown, expected one of {', '.join(FEATURES)}: choose one of these"
            )
        self.models, self.task, self.softmax = list(models), task, feature == "softmax"
        name, options = FEATURES[feature]
        self.feature: Feature = get_feature(name, config.key_width, **options)
        drawn = [_initial(task.size, config.key_width, model.seed) for model in models]
        self.parameters = {
            part: torch.stack([one[part] for one in drawn]).to(device).requires_grad_() for part in drawn[0]
        }

    def keep(self, rows: Sequence[int]) -> None:
        """Only these models go on."""
        self.models = [self.models[row] for row in rows]
        self.parameters = {name: p.detach()[list(rows)].requires_grad_() for name, p in self.parameters.items()}

    def read(self, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        """What is read for queries [models, B, Q] after keys and values [models, B, L]: [models, B, Q, S]."""
        p = self.parameters
        k = _rows(p["embed"] @ p["key"].mT, keys) + _rows(p["key_value"], values) + p["key_bias"][:, None, None]
        q = _rows(p["embed"] @ p["query"].mT, queries) + p["query_bias"][:, None, None]
        if self.softmax:
            weights = torch.softmax(q @ k.mT / math.sqrt(k.shape[-1]), dim=-1)
            return _scatter(weights, values, self.task.size)
        gates = _rows(p["embed"] @ p["gate"].mT, keys) + _rows(p["gate_value"], values) + p["gate_bias"][:, None, None]
        reads = []
        for first, count, rule in self._groups():
            some = slice(first, first + count)
            reads.append(self._read_by(rule, k[some], q[some], values[some], gates[some]))
        return torch.cat(reads)

    def _read_by(self, rule: str, k: Tensor, q: Tensor, values: Tensor, logits: Tensor) -> Tensor:
        if rule == "tanh":
            return self._squashed(self.feature(k), self.feature(q), values)
        found = get_rule(rule)
        corrects = found.reads
        phi_k, phi_q = (self._phi(x, corrects) for x in (k, q))
        coefficients = found.coefficients(phi_k, values=False, **_gates(rule, logits))
        weights = read_weights(phi_k, phi_q, coefficients.decay, coefficients.erase, coefficients.write)
        if not corrects:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)
        return _scatter(weights, values, self.task.size)

    def _phi(self, x: Tensor, normalised: bool) -> Tensor:
        """Rules that correct take features that sum to one; the others divide by what a value of 1 would return."""
        return sum_normalise(self.feature.up_to_scale(x)) if normalised else self.feature(x)

    def _squashed(self, phi_k: Tensor, phi_q: Tensor, values: Tensor) -> Tensor:
        """W ← tanh(W + v φ(k)ᵀ), which has no closed read."""
        memory = phi_k.new_zeros(*phi_k.shape[:2], self.task.size, phi_k.shape[-1])
        hot = functional.one_hot(values, self.task.size).to(phi_k)
        for t in range(values.shape[-1]):
            memory = torch.tanh(memory + hot[:, :, t, :, None] * phi_k[:, :, t, None, :])
        return phi_q @ memory.mT

    def _groups(self) -> list[tuple[int, int, str]]:
        """Neighbours with one rule: where they begin, how many, which."""
        groups: list[tuple[int, int, str]] = []
        for row, model in enumerate(self.models):
            if groups and groups[-1][2] == model.rule:
                groups[-1] = (groups[-1][0], groups[-1][1] + 1, model.rule)
            else:
                groups.append((row, 1, model.rule))
        return groups


def _gates(rule: str, logits: Tensor) -> dict[str, Any]:
    """Gates [models, B, L] of logits [models, B, L, 2]: σ keeps β and α below 1; Longhorn's β has no upper bound."""
    beta, alpha = logits.unbind(-1)
    every = {"beta": beta.clamp_max(20).exp() if rule == "longhorn" else beta.sigmoid(), "alpha": alpha.sigmoid()}
    return {name: gate for name, gate in every.items() if name in get_rule(rule).gates}


def read_weights(k: Tensor, q: Tensor, decay: float | Tensor, erase: float | Tensor, write: float | Tensor) -> Tensor:
    """c [..., Q, L] of o = Σ c_j v_j, for φ(k) [..., L, D], φ(q) [..., Q, D] and coefficients [..., L]."""
    weights = q @ k.mT
    if isinstance(erase, Tensor):
        system = torch.tril(erase.unsqueeze(-1) * (k @ k.mT), -1)
        # aᵀT₀ = x  ⇔  x (I + system) = a
        weights = torch.linalg.solve_triangular(system, weights, upper=False, left=False, unitriangular=True)
    if isinstance(decay, Tensor):
        logs = decay.clamp_min(1e-30).log()
        weights = weights * (logs.sum(-1, keepdim=True) - logs.cumsum(-1)).exp().unsqueeze(-2)
    return weights * (write.unsqueeze(-2) if isinstance(write, Tensor) else write)


def train(models: Sequence[Model], task: Task, feature: str, config: Training, device: torch.device) -> list[Trained]:
    """Train every model until it is solved, no longer improves or has had its steps."""
    stack = Stack(models, task, feature, config, device)
    adam = _Adam(stack, config.rate)
    draws = {m.seed: torch.Generator(device=device).manual_seed(m.seed + 1) for m in models}
    ended: dict[Model, Trained] = {}
    losses: dict[Model, list[float]] = {model: [] for model in models}
    for step in range(1, config.steps + 1):
        loss = _training_loss(stack, draws, config)
        adam.step(_gradients(loss, stack))
        if step % config.every and step != config.steps:
            continue
        now = _evaluate(stack, task, config)
        for model, value in zip(stack.models, now, strict=True):
            losses[model].append(value)
        over = [row for row, model in enumerate(stack.models) if step == config.steps or _over(losses[model], config)]
        if over:
            short = _evaluate(stack, Task(task.size, task.size, task.replacement), config)
            for row in over:
                model = stack.models[row]
                ended[model] = Trained(now[row], short[row], step, losses[model])
            rest = [row for row in range(len(stack.models)) if row not in over]
            if not rest:
                break
            stack.keep(rest)
            adam.keep(rest)
    return [ended[model] for model in models]


def _gradients(loss: Tensor, stack: Stack) -> tuple[Tensor, ...]:
    """Zero for what a rule does not use: sums have no gates."""
    return torch.autograd.grad(loss, list(stack.parameters.values()), allow_unused=True, materialize_grads=True)


def _over(losses: Sequence[float], config: Training) -> bool:
    best = min(range(len(losses)), key=lambda index: losses[index])
    return losses[-1] <= SOLVED or len(losses) - 1 - best >= config.patience


def _training_loss(stack: Stack, draws: dict[int, torch.Generator], config: Training) -> Tensor:
    """½‖o − v‖² of one query a sequence, the mean over a batch, summed over models. Each seed has its own sequences."""
    batches = {}
    for seed in dict.fromkeys(model.seed for model in stack.models):
        keys, values = stack.task.draw(config.batch, draws[seed])
        place = torch.randint(stack.task.length, (config.batch, 1), generator=draws[seed], device=keys.device)
        query = keys.gather(-1, place)
        batches[seed] = keys, values, query, _latest(keys, values, query)
    keys, values, query, wanted = (
        torch.stack([batches[model.seed][part] for model in stack.models]) for part in range(4)
    )
    return _loss(stack.read(keys, values, query), wanted).mean((1, 2)).sum()


@torch.no_grad()
def _evaluate(stack: Stack, task: Task, config: Training) -> list[float]:
    """The loss of every distinct key of fresh sequences, the same at every evaluation of a seed."""
    device = next(iter(stack.parameters.values())).device
    drawn = {}
    for seed in dict.fromkeys(model.seed for model in stack.models):
        keys, values = task.draw(config.tested, torch.Generator(device=device).manual_seed(10_000 + seed))
        every = torch.arange(task.size, device=device).expand(config.tested, -1)
        present = (every.unsqueeze(-1) == keys.unsqueeze(-2)).any(-1)
        drawn[seed] = keys, values, every, _latest(keys, values, every), present
    keys, values, every, wanted, present = (
        torch.stack([drawn[model.seed][part] for model in stack.models]) for part in range(5)
    )
    loss = _loss(stack.read(keys, values, every), wanted) * present
    return (loss.sum((1, 2)) / present.sum((1, 2))).tolist()


def _latest(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """The value that each query's key was last bound to: [B, Q]."""
    order = torch.arange(1, keys.shape[-1] + 1, device=keys.device)
    last = ((queries.unsqueeze(-1) == keys.unsqueeze(-2)) * order).argmax(-1)
    return values.gather(-1, last)


def _loss(read: Tensor, wanted: Tensor) -> Tensor:
    return 0.5 * (read - functional.one_hot(wanted, read.shape[-1])).square().sum(-1)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of each model's table [models, S, D] at index [models, B, L]: [models, B, L, D]."""
    flat = index.flatten(1).unsqueeze(-1).expand(-1, -1, table.shape[-1])
    return table.gather(1, flat).unflatten(1, index.shape[1:])


def _scatter(weights: Tensor, values: Tensor, size: int) -> Tensor:
    """Σ_j c_j v_j for one-hot values: [models, B, Q, S]."""
    zeros = weights.new_zeros(*weights.shape[:-1], size)
    return zeros.scatter_add(-1, values.unsqueeze(-2).expand_as(weights), weights)


def _initial(size: int, key_width: int, seed: int) -> dict[str, Tensor]:
    """One model's parameters: N(0, 1) embeddings, linear maps U(±1/8) with biases."""
    generator = torch.Generator().manual_seed(seed)
    width = int(1.1 * 2 * size)

    def uniform(*shape: int) -> Tensor:
        return (2 * torch.rand(shape, generator=generator) - 1) / 8

    return {
        "embed": torch.randn(size, width, generator=generator),
        "key": uniform(key_width, width),
        "key_value": uniform(size, key_width),  # W_K's columns for the one-hot value
        "key_bias": uniform(key_width),
        "query": uniform(key_width, width),
        "query_bias": uniform(key_width),
        "gate": uniform(2, width),  # β and α
        "gate_value": uniform(size, 2),
        "gate_bias": uniform(2) + torch.tensor([0.0, 4.0]),  # α begins near 1
    }


class _Adam:
    """Adam over a stack whose models may leave."""

    def __init__(self, stack: Stack, rate: float) -> None:
        self.stack, self.rate, self.count = stack, rate, 0
        self.first = [torch.zeros_like(p) for p in stack.parameters.values()]
        self.second = [torch.zeros_like(p) for p in stack.parameters.values()]

    def keep(self, rows: Sequence[int]) -> None:
        self.first = [one[list(rows)] for one in self.first]
        self.second = [one[list(rows)] for one in self.second]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        self.count += 1
        size = self.rate * math.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        small = 1e-8 * math.sqrt(1 - 0.999**self.count)
        torch._foreach_lerp_(self.first, list(gradients), 0.1)
        torch._foreach_mul_(self.second, 0.999)
        torch._foreach_addcmul_(self.second, list(gradients), list(gradients), 0.001)
        root = torch._foreach_sqrt(self.second)
        torch._foreach_add_(root, small)
        torch._foreach_addcdiv_(list(self.stack.parameters.values()), self.first, root, -size)
