"""Layers of transformers and flash-linear-attention, recognized by the names of their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rebind.errors import InputError
from rebind.nn.convert.links import (
    Link,
    copy_to_ours,
    copy_to_theirs,
    grouped,
    interleaved,
    joined,
    require_same_layers,
    same,
    shifted,
)
from rebind.nn.layers.attention import Attention, Rotary
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.layers.latent import LatentAttention
from rebind.nn.parts.feature_map import L2Normalizer
from rebind.nn.parts.gates import DecayGate, OutputGate, SigmoidDecay, SoftplusDecay

KEY_NORM_EPS = 1e-6  # of the L2 norm of keys and queries, in all of these layers


@dataclass(frozen=True)
class LayerPlan:
    """Our layer that another one is: its class, its arguments, and the links of its weights."""

    kind: type[FastWeight | Attention | LatentAttention]
    arguments: dict[str, Any]
    links: list[Link] = field(repr=False)

    def build(self) -> SequenceLayer[Any]:
        layer: SequenceLayer[Any] = self.kind(**self.arguments)
        return layer


def from_pretrained_layer(layer: nn.Module) -> SequenceLayer[Any]:
    """Return our layer with the weights of a layer of transformers or flash-linear-attention.

    Args:
        layer: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo Hybrid, fla), Kimi Delta Attention (Kimi Linear, GLM-5.3, Ling
            3.0, fla), DeltaNet (fla), attention (Qwen3-Next, Qwen3.5, OLMo Hybrid), or latent attention (Kimi Linear,
            Ling 3.0).

    Returns:
        A `FastWeight`, `Attention` or `LatentAttention` with the same output, dtype and device.
    """
    plan = plan_layer(layer)
    weight = next(layer.parameters())
    ours = plan.build().to(weight.device, weight.dtype)
    copy_to_ours(plan.links, layer, ours)
    return ours


def to_pretrained_layer(ours: SequenceLayer[Any], layer: nn.Module) -> None:
    """Copy the weights of our layer into a layer of transformers or flash-linear-attention of the same shape."""
    plan = plan_layer(layer)
    with torch.device("meta"):
        require_same_layers(ours, plan.build())
    copy_to_theirs(plan.links, ours, layer)


def plan_layer(layer: nn.Module) -> LayerPlan:
    """Return which layer of ours a layer of another library is."""
    parts = dict(layer.named_children())
    if "in_proj_qkvz" in parts or "in_proj_qkv" in parts or {"a_proj", "b_proj"} <= set(parts):
        return _gated_deltanet(layer)
    if "forget_gate" in parts or {"f_proj", "b_proj"} <= set(parts):
        return _kda(layer)
    if {"b_proj", "q_conv1d"} <= set(parts):
        return _deltanet(layer)
    if {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"} <= set(parts):
        return _attention(layer)
    if {"kv_a_proj_with_mqa", "kv_b_proj"} <= set(parts):
        return _latent_attention(layer)
    raise InputError(
        f"A {type(layer).__name__} is no layer that rebind knows",
        expected="Gated DeltaNet, Kimi Delta Attention, DeltaNet, latent attention, or attention with norms of queries "
        "and keys",
        advice="rebind.optimize runs it on rebind's operations as it is, if it calls a gated delta rule",
        code="unknown_layer",
    )


def _gated_deltanet(layer: Any) -> LayerPlan:
    keys, values = layer.key_dim, layer.value_dim
    key_heads = getattr(layer, "num_k_heads", None) or layer.num_heads
    heads, shared = layer.num_v_heads, layer.num_v_heads // key_heads
    gates = ("gates.beta.weight", "gates.decay.project.weight")
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next: everything that belongs to a key head together
        widths = [layer.head_k_dim, layer.head_k_dim, shared * layer.head_v_dim, shared * layer.head_v_dim]
        names = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight"]
        links = [
            grouped("in_proj_qkvz.weight", names, key_heads, widths),
            grouped("in_proj_ba.weight", gates, key_heads, [shared, shared]),
        ]
    elif hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        names = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
        links = [
            grouped("in_proj_qkv.weight", names, 1, [keys, keys, values]),
            same("in_proj_z.weight", "g_proj.weight"),
            same("in_proj_b.weight", gates[0]),
            same("in_proj_a.weight", gates[1]),
        ]
    else:  # OLMo Hybrid, fla
        links = [*_projections("q_proj", "k_proj", "v_proj"), same("b_proj.weight", gates[0])]
        links += [same("a_proj.weight", gates[1]), *(_projections("g_proj") if hasattr(layer, "g_proj") else [])]
    links += [same("A_log", "gates.decay.A_log"), same("dt_bias", "gates.decay.dt_bias")]
    arguments = {
        "rule": "gated_delta",
        "heads": heads,
        "key_heads": key_heads,
        "max_beta": 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0,
        "output_gate": OutputGate(_activation(layer)) if len(links[0].ours) == 4 or _has(links, "g_proj") else None,
    }
    return _fast_weight(layer, arguments, links, layer.head_k_dim, layer.head_v_dim)


def _kda(layer: Any) -> LayerPlan:
    heads = getattr(layer, "num_v_heads", layer.num_heads)
    d_k, d_v = getattr(layer, "head_k_dim", layer.head_dim), getattr(layer, "head_v_dim", layer.head_dim)
    if hasattr(layer, "forget_gate"):  # transformers
        gate, prefix = layer.forget_gate, "forget_gate."
        decay_names = ["f_a_proj", "f_b_proj"] if hasattr(gate, "f_a_proj") else ["f_proj"]
        output_names = ["g_a_proj", "g_b_proj"] if hasattr(layer, "g_a_proj") else ["g_proj"]
        bounded = getattr(gate, "safe_gate", True)
        lowest = getattr(gate, "safe_gate_lower_bound", getattr(gate, "lower_bound", None)) if bounded else None
    else:  # fla
        prefix, lowest = "", layer.lower_bound
        decay_names, output_names = ["f_proj.0", "f_proj.1"], ["g_proj.0", "g_proj.1"]
    decay_rank, decay_links = _ranked(layer, [prefix + name for name in decay_names], ("project", "expand"))
    output_rank, output_links = _ranked(layer, output_names, ("g_proj", "g_expand"))
    decay: DecayGate = SoftplusDecay(decay_rank) if lowest is None else SigmoidDecay(decay_rank, lowest)
    arguments = {
        "rule": "kda",
        "heads": heads,
        "key_heads": layer.num_heads,
        "decay": decay,
        "max_beta": 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0,
        "output_gate": OutputGate(_activation(layer), output_rank, bias=_has(output_links, "g_expand.bias")),
    }
    links = [*_projections("q_proj", "k_proj", "v_proj"), same("b_proj.weight", "gates.beta.weight")]
    links += [link.inside("", "gates.decay.") for link in decay_links] + output_links
    links += [same(f"{prefix}{name}", f"gates.decay.{name}") for name in ("A_log", "dt_bias")]
    return _fast_weight(layer, arguments, links, d_k, d_v)


def _ranked(layer: nn.Module, theirs: list[str], ours: tuple[str, str]) -> tuple[int | None, list[Link]]:
    """Return the rank and the links of one projection, or of two in a row, with their biases."""
    parts: list[Any] = [layer.get_submodule(name) for name in theirs]
    links = [same(f"{name}.weight", f"{own}.weight") for name, own in zip(theirs, ours, strict=False)]
    links += [
        same(f"{name}.bias", f"{own}.bias")
        for name, own, part in zip(theirs, ours, parts, strict=False)
        if part.bias is not None
    ]
    return parts[0].out_features if len(parts) == 2 else None, links


def _deltanet(layer: Any) -> LayerPlan:
    if (layer.qk_activation, layer.qk_norm) != ("silu", "l2"):
        problem = f"The DeltaNet has qk_activation={layer.qk_activation!r} and qk_norm={layer.qk_norm!r}"
        raise InputError(problem, expected="'silu' and 'l2'", code="unknown_layer")
    links = [*_projections("q_proj", "k_proj", "v_proj"), same("b_proj.weight", "gates.beta.weight")]
    links += _projections("g_proj") if layer.use_gate else []
    arguments = {
        "rule": "delta",
        "heads": layer.num_heads,
        "max_beta": 2.0 if layer.allow_neg_eigval else 1.0,
        "output_gate": OutputGate(_activation(layer)) if layer.use_gate else None,
    }
    return _fast_weight(layer, arguments, links, layer.head_k_dim, layer.head_v_dim)


def _fast_weight(layer: Any, arguments: dict[str, Any], links: list[Link], d_k: int, d_v: int) -> LayerPlan:
    """Add what these layers have in common: widths, a convolution, norms and the output projection."""
    keys, values = d_k * arguments.get("key_heads", arguments["heads"]), d_v * arguments["heads"]
    if hasattr(layer, "conv1d"):
        convolution, size = layer.conv1d, layer.conv1d.kernel_size[0]
        links = [*links, same("conv1d.weight", "conv.weight")]
        links += [same("conv1d.bias", "conv.bias")] if convolution.bias is not None else []
    elif hasattr(layer, "q_conv1d"):
        convolution, names, sizes = layer.q_conv1d, ("q_conv1d", "k_conv1d", "v_conv1d"), (keys, keys, values)
        size = convolution.weight.shape[-1]
        links = [*links, joined([f"{name}.weight" for name in names], "conv.weight", sizes)]
        if convolution.bias is not None:
            links += [joined([f"{name}.bias" for name in names], "conv.bias", sizes)]
    else:
        problem = f"The {type(layer).__name__} has no short convolution"
        raise InputError(problem, expected="a layer with use_short_conv=True", code="unknown_layer")
    norm = "o_norm" if hasattr(layer, "o_norm") else "norm"
    output = "o_proj" if hasattr(layer, "o_proj") else "out_proj"
    links += [same(f"{norm}.weight", "norm.weight"), same(f"{output}.weight", "o_proj.weight")]
    shared = {
        "dim": layer.hidden_size,
        "d_k": d_k,
        "d_v": d_v,
        "normalizer": L2Normalizer(KEY_NORM_EPS, d_k**-0.5),
        "conv_size": size,
        "conv_bias": convolution.bias is not None,
        "norm_eps": _norm_eps(getattr(layer, norm)),
    }
    return LayerPlan(FastWeight, {**shared, **arguments}, links)


def _attention(layer: Any) -> LayerPlan:
    config, width = layer.config, layer.head_dim
    if layer.q_proj.bias is not None:
        raise InputError("The projections of attention have biases", expected="none", code="unknown_layer")
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    gated = layer.q_proj.out_features == 2 * heads * width  # Qwen: a gate beside each head of queries
    of_head = layer.q_norm.weight.numel() == width
    links = [grouped("q_proj.weight", ("q_proj.weight", "g_proj.weight"), heads, [width, width])] if gated else []
    links += _projections(*([] if gated else ["q_proj"]), "k_proj", "v_proj", "o_proj")
    norm = norm_link(layer.q_norm)
    links += [norm("q_norm.weight", "q_norm.weight"), norm("k_norm.weight", "k_norm.weight")]
    arguments = {
        "dim": layer.q_proj.in_features,
        "heads": heads,
        "head_dim": width,
        "key_heads": key_heads,
        "rotary": rotary_of(config),
        "qk_norm": "head" if of_head else "all",
        "window": getattr(layer, "sliding_window", None),
        "output_gate": OutputGate("sigmoid") if gated else None,
        "norm_eps": _norm_eps(layer.q_norm),
    }
    return LayerPlan(Attention, arguments, links)


def _latent_attention(layer: Any) -> LayerPlan:
    if layer.kv_a_proj_with_mqa.bias is not None or layer.num_key_value_groups != 1:
        problem = "Latent attention has biases, or key heads that are shared"
        raise InputError(problem, expected="neither", code="unknown_layer")
    plain, shared, heads, rank = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.num_heads, layer.kv_lora_rank
    queries, query_rank = "q_proj.weight", None
    links = [same("kv_a_layernorm.weight", "kv_norm.weight"), same("kv_b_proj.weight", "kv_up.weight")]
    if getattr(layer, "q_a_proj", None) is not None:
        queries, query_rank = "q_b_proj.weight", layer.q_a_proj.out_features
        links += [same("q_a_proj.weight", "q_down.weight"), same("q_a_layernorm.weight", "q_norm.weight")]
    rotary = rotary_of(layer.config)
    if rotary is None:
        links += [same(queries, "q_proj.weight"), same("kv_a_proj_with_mqa.weight", "kv_down.weight")]
    else:
        links += [
            interleaved(queries, "q_proj.weight", heads, plain, shared),
            interleaved("kv_a_proj_with_mqa.weight", "kv_down.weight", 1, rank, shared),
        ]
    gated = hasattr(layer, "g_proj")
    arguments = {
        "dim": layer.hidden_size,
        "heads": heads,
        "rank": rank,
        "shared_dim": shared,
        "key_dim": plain,
        "d_v": layer.v_head_dim,
        "query_rank": query_rank,
        "rotary": rotary,
        "head_gate": gated,
        "norm_eps": _norm_eps(layer.kv_a_layernorm),
    }
    return LayerPlan(LatentAttention, arguments, [*links, *_projections("o_proj", *(["g_proj"] if gated else []))])


def rotary_of(config: Any) -> Rotary | None:
    """Return the rotary positions of a config of transformers."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_theta") is None:
        return None
    if rope.get("rope_type", "default") != "default":
        problem = f"Rotary positions of type {rope['rope_type']!r} are not supported"
        raise InputError(problem, expected="'default'", code="unknown_layer")
    return Rotary(float(rope["rope_theta"]), float(rope.get("partial_rotary_factor", 1.0)))


def norm_link(norm: nn.Module) -> Callable[[str, str], Link]:
    """Return the kind of link that a norm has. Some are stored as their distance from 1, and then begin with zeros."""
    fresh: Any = type(norm)(4)
    return shifted if bool((fresh.weight == 0).all()) else same


def _projections(*names: str) -> list[Link]:
    return [same(f"{name}.weight", f"{name}.weight") for name in names]


def _has(links: list[Link], name: str) -> bool:
    return any(ours.startswith(name) for link in links for ours in link.ours)


def _activation(layer: Any) -> str:
    norm = layer.o_norm if hasattr(layer, "o_norm") else layer.norm
    activation = str(getattr(norm, "activation", "silu"))
    return {"swish": "silu"}.get(activation, activation)


def _norm_eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
