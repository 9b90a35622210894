"""The synthetic retrieval of Schlag et al.: models that learn which keys to write, many of them in one stack.

A sequence binds keys to values; then one key is queried. Values are one-hot vectors; keys are learned embeddings e; the
memory is addressed by k = W_K [v; e] and q = W_Q e through a feature map φ, and gates are computed from [v; e].

The query comes after the last write, so the memory itself is never formed. With a_j = φ(k_j)·φ(q) the recurrence

    S_t = α_t (I − ε_t k_t k_tᵀ) S_{t−1} + η_t k_t v_tᵀ,    o = S_Lᵀ q

gives  o = Σ_j c_j v_j,  c_j = η_j (γ_L/γ_j) (aᵀT₀)_j,  T₀ = (I + tril(diag(ε) K Kᵀ, −1))⁻¹,  γ = cumprod(α):
one triangular system with L unknowns per query, whatever the rule, and none where ε = 0.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from rebind.lab.retrieval.task import Sequences
from rebind.lab.stacks import Lesson, Parameters
from rebind.memory import get_feature, get_rule
from rebind.memory.features import Dpfp, Favor, Feature

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
EPSILON = 1e-6  # added to the sum that a read is divided by


class Reader:
    """Models with one feature map and one rule; "tanh" is W ← tanh(W + v φ(k)ᵀ), "softmax" is attention."""

    def __init__(self, feature: str, rule: str, key_width: int, device: torch.device) -> None:
        kind, options = FEATURES[feature]
        self.feature: Feature = get_feature(kind, key_width, **options)
        for name, tensor in self.feature.state.items():  # once, and not at every step
            setattr(self.feature, name, tensor.to(device, torch.float32))
        self.softmax = feature == "softmax"
        self.rule = None if rule == "tanh" else get_rule(rule)

    def initial_parameters(self, size: int, seed: int) -> dict[str, Tensor]:
        """Draw the parameters of one model: N(0, 1) embeddings, and linear maps U(±1/8) with biases.

        If k·q goes into an exponential, W_K and W_Q have Xavier's initialization, as in the authors' softmax. With the
        uniform one, the scores of softmax are ±7 at S = 600, one key gets all of the weight, and nothing is learned.
        """
        generator = torch.Generator().manual_seed(seed)
        key_width, width = self.feature.dim, int(1.1 * 2 * size)
        key_bound = query_bound = 1 / 8
        if self.softmax or isinstance(self.feature, Favor):
            key_bound, query_bound = (math.sqrt(6 / (inputs + key_width)) for inputs in (width + size, width))

        def uniform(*shape: int, bound: float = 1 / 8) -> Tensor:
            return (2 * torch.rand(shape, generator=generator) - 1) * bound

        return {
            "embed": torch.randn(size, width, generator=generator),
            "key": uniform(key_width, width, bound=key_bound),
            "key_value": uniform(size, key_width, bound=key_bound),  # W_K's columns for the one-hot value
            "key_bias": uniform(key_width),
            "query": uniform(key_width, width, bound=query_bound),
            "query_bias": uniform(key_width),
            "gate": uniform(2, width),  # β and α
            "gate_value": uniform(size, 2),
            "gate_bias": uniform(2) + torch.tensor([0.0, 4.0]),  # α starts near 1
        }

    def loss(self, parameters: Parameters, lesson: Lesson) -> Tensor:
        """Return the mean of ½‖o − v‖² over the queries of each model: [models]."""
        sequences = Sequences(*lesson)
        read = self.read(parameters, sequences)
        error = (read - one_hot(sequences.targets, read.shape[-1])).square().sum(-1) / 2
        is_query = sequences.targets >= 0
        return (error * is_query).sum((1, 2)) / is_query.sum((1, 2))

    def read(self, p: Parameters, sequences: Sequences) -> Tensor:
        """Return what each query reads after the writes: [models, B, Q, S]."""
        keys, values, size = sequences.keys, sequences.values, p["embed"].shape[1]
        valid, hot = keys >= 0, None if values is None else (one_hot(keys, size), one_hot(values, size))
        k = _address(p, "key", keys, hot)
        q = _look_up(_project(p, "query"), sequences.queries)
        if self.rule is None:
            assert values is not None
            phi_k = self.feature(k) * valid.unsqueeze(-1)
            return self.feature(q) @ tanh_memory(phi_k, values, size).mT
        if self.softmax:
            scores = ((k @ q.mT).mT / math.sqrt(k.shape[-1])).masked_fill(~valid.unsqueeze(-2), -math.inf)
            weights = scores.softmax(-1)
        else:
            gates = self._gates(_address(p, "gate", keys, hot)) if self.rule.gates else {}
            weights = self._weights(k, q, valid, gates)
        return weights if hot is None else weights @ hot[1]

    def _gates(self, logits: Tensor) -> dict[str, float | Tensor]:
        """Return gates [models, B, L]: σ keeps β and α below 1; Longhorn's β has no upper bound."""
        assert self.rule is not None
        beta, alpha = logits.unbind(-1)
        beta = beta.clamp_max(20).exp() if self.rule.name == "longhorn" else beta.sigmoid()
        return {name: gate for name, gate in (("beta", beta), ("alpha", alpha.sigmoid())) if name in self.rule.gates}

    def _weights(self, k: Tensor, q: Tensor, valid: Tensor, gates: dict[str, float | Tensor]) -> Tensor:
        """Return c [models, B, Q, L]. Rules that correct use features that sum to one; the others divide by Σ c."""
        assert self.rule is not None
        if not self.rule.reads:
            products, epsilon = similarity(self.feature, k, q)
            factors = self.rule.coefficients(k, check_values=False, **gates)
            weights = faded(products * valid.unsqueeze(-2), factors.decay, factors.write)
            return weights / (weights.sum(-1, keepdim=True) + epsilon)
        phi_k, phi_q = self.feature.up_to_scale(k), self.feature.up_to_scale(q)
        k_sum, q_sum = (total + (total == 0) for total in (phi_k.sum(-1), phi_q.sum(-1)))
        # Dividing ε and c by the sums costs less than dividing the features. A rule depends on a key's length alone.
        lengths = torch.linalg.vector_norm(phi_k, dim=-1) / k_sum
        factors = self.rule.coefficients(lengths.unsqueeze(-1), check_values=False, **gates)
        weights = corrected(phi_k, phi_q, factors.erase * valid / k_sum.square())
        weights = weights * (valid / k_sum).unsqueeze(-2) / q_sum.unsqueeze(-1)
        return faded(weights, factors.decay, factors.write)


def similarity(feature: Feature, k: Tensor, q: Tensor) -> tuple[Tensor, float | Tensor]:
    """Return φ(q)·φ(k_j) [..., Q, L] up to a factor per query, and 1e-6 divided by that factor."""
    if isinstance(feature, Favor):
        return _favor_similarity(feature, k, q)
    if isinstance(feature, Dpfp) and q.shape[-2] == 1:
        # With p = relu [k, −k] ∘ relu [q, −q] it is Σ_j Σ_i p_i p_{i−j}: one query needs no wide features.
        p = functional.relu(torch.cat([k, -k], dim=-1)) * functional.relu(torch.cat([q, -q], dim=-1))
        identity = torch.eye(2 * feature.dim, dtype=p.dtype, device=p.device)
        shifts = torch.stack([identity.roll(shift, dims=1) for shift in range(1, feature.nu + 1)]).sum(0)
        return (p * (p @ shifts)).sum(-1).unsqueeze(-2), EPSILON
    return (feature(k) @ feature(q).mT).mT, EPSILON


def _favor_similarity(feature: Favor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return FAVOR+'s products over their largest factor: at d = 64 they can be e^100, too large for float32.

    The features are exp(±P x/d^¼ − ‖x‖²/2√d). With exponents a_r of the query and b_jr of the keys the largest
    a_r + b_jr is the largest a_r + B_r, B_r = max_j b_jr, so in

        Σ_r e^{a_r + B_r − shift} e^{b_jr − B_r}

    no factor is above 1, one product is 1, and what underflows is below 1e-37 beside it.
    """
    projection = torch.cat([feature.projection, -feature.projection]).to(k) * feature.dim**-0.25
    weights = torch.cat([projection, projection.new_full((len(projection), 1), -(feature.dim**-0.5) / 2)], dim=-1)
    a, b = (torch.cat([x, x.square().sum(-1, keepdim=True)], dim=-1) @ weights.mT for x in (q, k))
    largest = b.detach().amax(-2, keepdim=True)
    a = a + largest
    shift = a.detach().amax(-1, keepdim=True)
    products = ((b - largest).exp() @ (a - shift).exp().mT).mT / feature.width
    return products, EPSILON * (-shift).clamp(-60.0, 80.0).exp()  # beyond the bounds 1e-6 is nothing, or everything


def corrected(k: Tensor, q: Tensor, erase: float | Tensor) -> Tensor:
    """Return aᵀT₀ [..., Q, L] for φ(k) [..., L, D], φ(q) [..., Q, D] and ε [..., L]."""
    if not isinstance(erase, Tensor):
        return (k @ q.mT).mT
    if q.shape[-2] == 1 and _has_kernels(k):
        from rebind.lab.retrieval.kernels import Corrected

        flat = (x.flatten(0, len(k.shape) - 3).contiguous() for x in (k, q.squeeze(-2), erase))
        weights: Tensor = Corrected.apply(*flat)  # type: ignore[no-untyped-call]
        return weights.view_as(erase).unsqueeze(-2)
    system = erase.unsqueeze(-1) * (k @ k.mT)
    # aᵀT₀ = x  ⇔  x (I + tril(system, −1)) = a
    return torch.linalg.solve_triangular(system, q @ k.mT, upper=False, left=False, unitriangular=True)


def tanh_memory(phi_k: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the memory [..., S, D] after W ← tanh(W + v φ(k)ᵀ), for φ(k) [..., L, D] and the rows [..., L] of v."""
    if _has_kernels(phi_k):
        from rebind.lab.retrieval.kernels import TanhMemory

        flat = phi_k.flatten(0, -3).contiguous(), values.flatten(0, -2).contiguous()
        return TanhMemory.apply(*flat, size).unflatten(0, phi_k.shape[:-2])  # type: ignore[no-untyped-call]
    memory = phi_k.new_zeros(*phi_k.shape[:-2], size, phi_k.shape[-1])
    for key, row in zip(phi_k.unbind(-2), one_hot(values, size).to(phi_k).unbind(-2), strict=True):
        memory = torch.tanh(memory + row.unsqueeze(-1) * key.unsqueeze(-2))
    return memory


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and find_spec("triton") is not None


def faded(weights: Tensor, decay: float | Tensor, write: float | Tensor) -> Tensor:
    """Return c [..., Q, L]: η_j γ_L/γ_j times the weights, for coefficients [..., L]."""
    if isinstance(decay, Tensor):
        logs = decay.clamp_min(1e-30).log()
        weights = weights * (logs.sum(-1, keepdim=True) - logs.cumsum(-1)).exp().unsqueeze(-2)
    return weights * (write.unsqueeze(-2) if isinstance(write, Tensor) else write)


def one_hot(index: Tensor, size: int) -> Tensor:
    """Return one-hot vectors [..., S] in float32; zeros for padding."""
    zeros = torch.zeros(*index.shape, size, device=index.device)
    return zeros.scatter_(-1, index.clamp_min(0).unsqueeze(-1), (index >= 0).float().unsqueeze(-1))


def _project(p: Parameters, name: str) -> Tensor:
    """Return W e + b for every embedding: [models, S, D]."""
    return torch.baddbmm(p[f"{name}_bias"].unsqueeze(1), p["embed"], p[name].mT)


def _address(p: Parameters, name: str, keys: Tensor, hot: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return W [v; e] + b for keys [models, B, L], with keys and values as one-hot vectors too: [models, B, L, D].

    On a GPU the gradient of an index that occurs twice is summed in any order, so keys that may do so are looked up
    with a product. Otherwise each key occurs once, and the value is the position.
    """
    table, value_table = _project(p, name), p[f"{name}_value"]
    if hot is None:
        return _look_up(table, keys) + value_table[:, None, : keys.shape[-1]]
    by_key, by_value = (vectors.flatten(1, 2) for vectors in hot)
    return torch.baddbmm(by_key @ table, by_value, value_table).unflatten(1, keys.shape[1:])


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return rows of each model's table; within a sequence no row may occur twice if gradients are wanted."""
    tables = table.unsqueeze(1).expand(-1, index.shape[1], -1, -1)
    return tables.gather(2, index.clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, table.shape[-1]))
