"""Multi-query associative recall (Zoology, Arora et al.): small models of `rebind.nn` layers, many of them at once.

A sequence lists pairs, then asks for every key again, at some distance; the answer is due at the key:

    tokens   k₁ v₁ k₂ v₂ 0 0 k₂ 0 0 0 k₁ 0
    answers  ·  ·  ·  ·  · · v₂ · · · v₁ ·

Keys come from the lower half of the vocabulary, values from the upper, 0 fills. The distances follow a power law.

`Recaller` is one model. `Stack` is many of them, with one rule and one width, in one forward pass: every model's
parameters are a row of one matrix θ [models, …], and one scan runs them all. `rebind.lab.recall_training` trains them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.lab.experiment import Config
from rebind.memory import get_rule
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.parts.norm import RMSNorm
from rebind.ops import scan, short_convolution
from rebind.ops.scan import coefficients

SOFTMAX = "softmax"
NORMALISERS = {  # how each rule's keys are scaled where it is at home; the rest of the layer is the same for all
    "sum": "l2",
    "mamba2": "plain",
    "longhorn": "plain",
    "delta": "l2",
    "gated_delta": "l2",
    SOFTMAX: "plain",
}
POWER = 0.01  # of the law of distances


@dataclass(frozen=True)
class Recall(Config):
    """The task, the models and how they are trained."""

    vocabulary: int = 8192
    trained: tuple[str, ...] = ("64x4", "128x8", "256x16", "256x32", "256x64")  # length x pairs, drawn evenly
    tested: tuple[str, ...] = ("64x4", "64x8", "64x16", "128x32", "256x64", "512x128", "1024x256")
    layers: int = 2
    heads: int = 2
    conv: int = 4  # tokens that the short convolution sees
    rates: tuple[float, ...] = (10**-2.5, 1e-2, 10**-1.5)
    decay: float = 0.1
    batch: int = 32
    steps: int = 2500  # at most; the rate falls to zero over them, as a cosine
    every: int = 250  # steps between evaluations
    sequences: int = 128  # of an evaluation


@dataclass(frozen=True)
class Questions:
    """Sequences, and what is asked in them."""

    tokens: Tensor  # [..., B, T]
    places: Tensor  # [..., B, P] where a key comes again
    answers: Tensor  # [..., B, P] its value


@dataclass(frozen=True)
class Task:
    """Sequences of `length` tokens that begin with `pairs` pairs."""

    length: int
    pairs: int
    vocabulary: int

    def __post_init__(self) -> None:
        if not 0 < 4 * self.pairs <= self.length:
            raise InputError(
                f"{self.pairs} pairs in {self.length} tokens, expected one pair or more and 4 tokens for each: write "
                f"a size as length x pairs, as in 64x4"
            )
        if self.pairs > self.vocabulary // 2 - 1:
            raise InputError(
                f"{self.pairs} pairs of a vocabulary of {self.vocabulary}, expected that half of it has more: raise "
                f"vocabulary"
            )

    @classmethod
    def parse(cls, size: str, vocabulary: int) -> Task:
        """From "64x4"."""
        length, _, pairs = size.partition("x")
        if not (length.isdecimal() and pairs.isdecimal()):
            raise InputError(f"size is {size!r}, expected length x pairs as in 64x4: write two whole numbers")
        return cls(int(length), int(pairs), vocabulary)

    def draw(self, count: int, generator: torch.Generator) -> Questions:
        device, half = generator.device, self.vocabulary // 2

        def distinct(choices: int) -> Tensor:
            noise = torch.rand(count, choices, generator=generator, device=device)
            return noise.argsort(-1)[:, : self.pairs]

        keys, values = distinct(half - 1) + 1, distinct(self.vocabulary - half) + half
        places = 2 * self.pairs + 2 * self._gaps(count, generator)
        tokens = torch.zeros(count, self.length, dtype=torch.long, device=device)
        tokens[:, : 2 * self.pairs] = torch.stack([keys, values], dim=-1).flatten(1)
        return Questions(tokens.scatter(-1, places, keys), places, values)

    def _gaps(self, count: int, generator: torch.Generator) -> Tensor:
        """A place of its own for each key [count, P], p(g) ∝ g^(a − 1): the largest of log p + Gumbel noise."""
        places = (self.length - 2 * self.pairs) // 2
        device = generator.device
        law = (POWER - 1) * torch.arange(1, places + 1, device=device).log()
        noise = torch.rand(count, places, generator=generator, device=device).clamp_min(1e-30)
        return (law - (-noise.log()).log()).argsort(-1, descending=True)[:, : self.pairs]


@dataclass(frozen=True)
class Model:
    """One model of a stack."""

    rate: float
    seed: int


class Recaller(nn.Module):
    """Embeddings, layers x + mix(norm(x)), and the embeddings again as the head. No MLPs, no positions."""

    def __init__(self, rule: str, width: int, config: Recall) -> None:
        super().__init__()
        if rule not in NORMALISERS:
            raise InputError(f"rule {rule!r} is unknown, expected one of {', '.join(NORMALISERS)}: choose one of these")
        self.embed = nn.Embedding(config.vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(config.layers))
        self.mixers = nn.ModuleList(
            FastWeight(
                width,
                config.heads,
                rule="sum" if rule == SOFTMAX else rule,
                normalise=NORMALISERS[rule],
                conv=config.conv,
            )
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary]."""
        x = self.embed(tokens)
        for norm, mix in zip(self.norms, self.mixers, strict=True):
            x = x + mix(norm(x))[0]
        out: Tensor = self.norm(x) @ self.embed.weight.mT
        return out


class Stack:
    """Recallers with one rule and one width."""

    def __init__(
        self, models: Sequence[Model], rule: str, width: int, config: Recall, device: torch.device | None = None
    ) -> None:
        self.models, self.rule, self.config = list(models), rule, config
        made = {model.seed: _seeded(rule, width, config, model.seed) for model in models}
        shapes = {name: tuple(p.shape) for name, p in next(iter(made.values())).named_parameters()}
        self._shapes = shapes
        rows = [torch.cat([p.detach().flatten() for p in made[model.seed].parameters()]) for model in models]
        self.theta = torch.stack(rows).to(device).requires_grad_()

    def keep(self, rows: Sequence[int]) -> None:
        """Only these models go on."""
        self.models = [self.models[row] for row in rows]
        self.theta = self.theta.detach()[list(rows)].requires_grad_()

    def logits(self, asked: Questions) -> Tensor:
        """[models, B, P, vocabulary], of tokens [models, B, T] and places [models, B, P]."""
        count, vocabulary = len(self.models), self.config.vocabulary
        parts = self.theta.split([math.prod(shape) for shape in self._shapes.values()], dim=1)
        p = {name: part.unflatten(1, shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}
        table = p["embed.weight"]  # [models, vocabulary, d]
        offset = vocabulary * torch.arange(count, device=table.device)[:, None, None]
        x = functional.embedding(asked.tokens + offset, table.flatten(0, 1))
        for layer in range(self.config.layers):
            normed = _rms(x, p[f"norms.{layer}.weight"])
            x = x + self._mix(normed, _under(f"mixers.{layer}.", p))
        x = x.gather(2, asked.places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
        return _linear(_rms(x, p["norm.weight"]), table)

    def _mix(self, x: Tensor, p: dict[str, Tensor]) -> Tensor:
        """What `FastWeight` makes of x [models, B, T, d]."""
        mixed = _linear(x, torch.cat([p["q_proj.weight"], p["k_proj.weight"], p["v_proj.weight"]], dim=1))
        mixed = _convolve(mixed, p["conv.weight"])
        both, v = mixed.flatten(0, 1).unflatten(-1, (3, self.config.heads, -1)).split([2, 1], dim=2)
        if NORMALISERS[self.rule] == "l2":
            both = functional.normalize(both, dim=-1)
        (q, k), v = both.unbind(2), v.squeeze(2)  # [models · B, T, H, D]
        if self.rule == SOFTMAX:
            q, k, v = (one.transpose(1, 2) for one in (q, k, v))
            read = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            gates = {name: gate.flatten(0, 1) for name, gate in self._gates(x, p).items()}
            log_decay, erase, write = coefficients(get_rule(self.rule), k, v, dict(gates))
            read, _ = scan(q, k, v, log_decay=log_decay, erase=erase, write=write)
        normed = _rms(read.unflatten(0, x.shape[:2]), p["norm.weight"])
        return _linear(normed.flatten(-2), p["o_proj.weight"])

    def _gates(self, x: Tensor, p: dict[str, Tensor]) -> dict[str, Tensor]:
        """What `rebind.nn.parts.gates.Gates` makes of x: [models, B, T, H] each."""
        found = {}
        if "gates.beta.weight" in p:
            found["beta"] = torch.sigmoid(_linear(x, p["gates.beta.weight"]))
        if "gates.decay.project.weight" in p:
            raw = _linear(x, p["gates.decay.project.weight"])
            dt = functional.softplus(raw + p["gates.decay.dt_bias"][:, None, None])
            alpha = (-p["gates.decay.A_log"].exp()[:, None, None] * dt).double().exp()
            found |= {"alpha": alpha, "dt": dt}
        return {name: found[name] for name in get_rule(self.rule).gates}


def parameters(rule: str, width: int, config: Recall) -> int:
    """How many numbers one model learns."""
    with torch.device("meta"):
        return sum(p.numel() for p in Recaller(rule, width, config).parameters())


def state(rule: str, width: int, config: Recall) -> int:
    """How many numbers a layer carries from token to token; attention at the longest tested sequence."""
    if rule == SOFTMAX:
        longest = max(Task.parse(size, config.vocabulary).length for size in config.tested)
        return longest * Attention(width, config.heads, rope_theta=None).state_size
    mixer = Recaller(rule, width, replace(config, vocabulary=2)).mixers[0]
    assert isinstance(mixer, FastWeight)
    return mixer.state_size


def _seeded(rule: str, width: int, config: Recall, seed: int) -> Recaller:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recaller(rule, width, config)


def _under(prefix: str, p: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in p.items() if name.startswith(prefix)}


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [models, …, d] by each model's weight [models, out, d]."""
    return (x.flatten(1, -2) @ weight.mT).unflatten(1, x.shape[1:-1])


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of x [models, …, d] by each model's weight [models, d]."""
    shape = (len(weight), *(1,) * (x.ndim - 2), weight.shape[-1])
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6) * weight.view(shape)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """What each model's `ShortConvolution` makes of x [models, B, T, C], by its weight [models, C, size]."""
    size, length = weight.shape[-1], x.shape[2]
    if x.is_cuda:  # a kernel a model passes over memory a fifth as often
        window = x.new_zeros(x.shape[1], size - 1, x.shape[-1])
        return torch.stack([short_convolution(one, its, window) for one, its in zip(x, weight, strict=True)])
    padded = functional.pad(x, (0, 0, size - 1, 0))
    kernels = weight[:, None, None].unbind(-1)
    mixed = sum((padded[:, :, at : at + length] * kernel for at, kernel in enumerate(kernels)), start=x.new_zeros(()))
    return functional.silu(mixed)
