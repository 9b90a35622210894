"""Small models of `rebind.nn` layers for multi-query recall, many of them computed at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.lab.mqar.task import NORMALIZERS, SOFTMAX, Recall
from rebind.lab.stacks import Lesson, Parameters
from rebind.memory.rules import Gate, get_rule
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.parts.dense import RMSNorm
from rebind.ops import scan, short_convolution
from rebind.ops.scan import scan_arguments


class Recaller(nn.Module):
    """The parameters of one model: embeddings, which are the output layer too, and layers x + mix(norm(x)).

    There are no MLPs and no positions.
    """

    def __init__(self, settings: Recall, rule: str, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(settings.vocabulary, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(settings.layers))
        layer_rule, normalizer = "sum" if rule == SOFTMAX else rule, NORMALIZERS[rule]
        self.mixers = nn.ModuleList(
            FastWeight(width, settings.heads, rule=layer_rule, normalizer=normalizer, conv_size=settings.conv)
            for _ in range(settings.layers)
        )
        self.norm = RMSNorm(width)


class RecallerStack:
    """What `Recaller`s compute, many of them at once: parameters are [models, ...], tokens [models, B, T]."""

    def __init__(self, settings: Recall, rule: str) -> None:
        self.rule, self.layers, self.heads = rule, settings.layers, settings.heads

    def loss(self, p: Parameters, lesson: Lesson) -> Tensor:
        """Return the mean cross-entropy of each model's answers: [models]."""
        tokens, places, answers = lesson
        logits = self.logits(p, tokens, places)
        losses = functional.cross_entropy(logits.flatten(0, -2), answers.flatten(), reduction="none")
        return losses.view_as(answers).mean((1, 2))

    def logits(self, p: Parameters, tokens: Tensor, places: Tensor) -> Tensor:
        """Return logits [models, B, P, vocabulary] at the places [models, B, P]."""
        table = p["embed.weight"]  # [models, vocabulary, d]
        offset = table.shape[1] * torch.arange(len(table), device=table.device)[:, None, None]
        x = functional.embedding(tokens + offset, table.flatten(0, 1))
        for layer in range(self.layers):
            prefix = f"mixers.{layer}."
            mixer = {name.removeprefix(prefix): part for name, part in p.items() if name.startswith(prefix)}
            x = x + self._mix(_rms_norm(x, p[f"norms.{layer}.weight"]), mixer)
        x = x.gather(2, places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
        return _linear(_rms_norm(x, p["norm.weight"]), table)

    def _mix(self, x: Tensor, p: Parameters) -> Tensor:
        """Return what `FastWeight` makes of x [models, B, T, d]; with softmax, attention between its projections."""
        mixed = _linear(x, torch.cat([p["q_proj.weight"], p["k_proj.weight"], p["v_proj.weight"]], dim=1))
        channels = mixed.movedim(0, 2).flatten(2)  # every model's side by side: [B, T, models · 3d]
        window = x.new_zeros(len(channels), p["conv.weight"].shape[-1] - 1, channels.shape[-1])
        convolved = short_convolution(channels, p["conv.weight"].flatten(0, 1), window)
        mixed = convolved.unflatten(2, (len(x), -1)).movedim(2, 0).flatten(0, 1)
        both, v = mixed.unflatten(-1, (3, self.heads, -1)).split([2, 1], dim=2)
        if NORMALIZERS[self.rule] == "l2":
            both = functional.normalize(both, dim=-1)
        (q, k), v = both.unbind(2), v.squeeze(2)  # [models · B, T, heads, d_k]
        if self.rule == SOFTMAX:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            read = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            gates, log_alpha = self._gates(x, p)
            read, _ = scan(**scan_arguments(self.rule, q, k, v, gates, log_decay=log_alpha, check=False))
        normed = _rms_norm(read.unflatten(0, x.shape[:2]), p["norm.weight"])
        return _linear(normed.flatten(-2), p["o_proj.weight"])

    def _gates(self, x: Tensor, p: Parameters) -> tuple[dict[str, Gate], Tensor | None]:
        """Return what `rebind.nn.parts.gates.Gates` makes of x: gates and ln α, [models · B, T, heads (, width)]."""
        gates: dict[str, Gate] = {}
        if "gates.beta.weight" in p:
            gates["beta"] = torch.sigmoid(_linear(x, p["gates.beta.weight"])).flatten(0, 1)
        for name in p:
            if name.startswith("gates.others."):
                rate = torch.sigmoid(_linear(x, p[name])).flatten(0, 1)
                gates[name.split(".")[2]] = rate.unflatten(-1, (self.heads, -1))
        if "gates.decay.project.weight" not in p:
            return gates, None
        projected = _linear(x, p["gates.decay.project.weight"])
        dt = functional.softplus(projected + p["gates.decay.dt_bias"][:, None, None])
        rate = p["gates.decay.A_log"].exp()[:, None, None]
        if "alpha" in get_rule(self.rule).channels:
            dt, rate = dt.unflatten(-1, (self.heads, -1)), rate.unsqueeze(-1)
        if "dt" in get_rule(self.rule).gates:
            gates["dt"] = dt.flatten(0, 1)
        return gates, (dt * -rate).flatten(0, 1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [models, ..., d] by the weight [models, out, d] of each model."""
    return (x.flatten(1, -2) @ weight.mT).unflatten(1, x.shape[1:-1])


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return RMSNorm of x [models, ..., d] with the weight [models, d] of each model."""
    shape = (len(weight), *(1,) * (x.ndim - 2), weight.shape[-1])
    return functional.rms_norm(x, x.shape[-1:], eps=1e-6) * weight.view(shape)
