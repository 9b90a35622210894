"""Whole language models of transformers: their config and the links of their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rebind.errors import InputError
from rebind.nn.convert.layers import LayerPlan, norm_link, plan_layer
from rebind.nn.convert.links import Link, same
from rebind.nn.layers.attention import Attention
from rebind.nn.layers.latent import LatentAttention
from rebind.nn.lm.config import RebindConfig
from rebind.nn.parts.gates import SigmoidDecay

MLP = ("gate_proj", "up_proj", "down_proj")
LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, which configs do not name


def plan_model(model: Any) -> tuple[RebindConfig, list[Link]]:
    """Return the config and the links of our model that a causal language model of transformers is.

    That is Qwen3-Next, Qwen3.5 without images, OLMo Hybrid, Kimi Linear, Ling 3.0, and whatever has the same parts.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model, "lm_head"):
        problem = f"A {type(model).__name__} is no causal language model that rebind knows"
        raise InputError(problem, expected="one with model.layers and lm_head", code="unknown_model")
    plans = [plan_layer(_mixer(layer)) for layer in layers]
    norm = norm_link(model.model.norm)
    links = [
        same("model.embed_tokens.weight", "model.embed_tokens.weight"),
        norm("model.norm.weight", "model.norm.weight"),
    ]
    if not model.config.tie_word_embeddings:
        links.append(same("lm_head.weight", "lm_head.weight"))
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        prefix = f"model.layers.{index}."
        name = "linear_attn." if hasattr(layer, "linear_attn") else "self_attn."
        links += [link.inside(prefix + name, f"{prefix}mixer.") for link in plan.links]
        links += [link.inside(prefix, prefix) for link in (*_norms(layer, norm), *_mlp(layer.mlp))]
    return _config(model, plans), links


def _mixer(layer: Any) -> nn.Module:
    mixer: nn.Module = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
    return mixer


def _is_after(layer: Any) -> bool:
    """Whether the norms of a block are behind its parts, as in OLMo, not before them."""
    return hasattr(layer, "post_feedforward_layernorm")


def _norms(layer: Any, norm: Callable[[str, str], Link]) -> list[Link]:
    names = ("input_layernorm", "post_attention_layernorm")
    if _is_after(layer):
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    return [
        norm(f"{name}.weight", f"{own}.weight") for name, own in zip(names, ("mixer_norm", "mlp_norm"), strict=True)
    ]


def _mlp(mlp: Any) -> list[Link]:
    names = {f"{name}.weight": f"{name}.weight" for name in MLP}
    if hasattr(mlp, "experts"):
        shared = "shared_experts" if hasattr(mlp, "shared_experts") else "shared_expert"
        names = {
            "gate.weight": "router.weight",
            "experts.gate_up_proj": "gate_up",
            "experts.down_proj": "down",
            **{f"{shared}.{name}.weight": f"shared.{name}.weight" for name in MLP},
        }
        if hasattr(mlp, "shared_expert_gate"):
            names["shared_expert_gate.weight"] = "shared_gate.weight"
        if _is_sigmoid(mlp):
            names["gate.e_score_correction_bias"] = "correction"
    return [same(f"mlp.{theirs}", f"mlp.{ours}") for theirs, ours in names.items()]


def _is_sigmoid(mlp: Any) -> bool:
    """Whether experts are scored by a sigmoid and a correction, as in Kimi Linear and Ling 3.0."""
    return hasattr(mlp.gate, "e_score_correction_bias")


def _config(model: Any, plans: list[LayerPlan]) -> RebindConfig:
    config, layers = model.config, model.model.layers
    names = {Attention: "attention", LatentAttention: "latent"}
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(plans),
        "num_attention_heads": config.num_attention_heads,
        "norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "layer_kinds": [names.get(plan.kind, plan.arguments.get("rule")) for plan in plans],
        **{f"{name}_token_id": getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")},
    }
    if config.hidden_act not in ("silu", "swish"):
        raise InputError(f"The MLPs have {config.hidden_act!r}", expected="'silu'", code="unknown_model")
    groups = {kind: _common([plan.arguments for plan in plans if plan.kind is kind]) for kind in names}
    memories = _common([plan.arguments for plan in plans if plan.kind not in names])
    after = {_is_after(layer) for layer, plan in zip(layers, plans, strict=True) if plan.kind is Attention}
    fields |= _mlp_fields(config, [layer.mlp for layer in layers]) | _memory_fields(memories)
    fields |= _latent_fields(groups[LatentAttention])
    return RebindConfig(**fields, **_attention_fields(groups[Attention], after=True in after))


def _mlp_fields(config: Any, mlps: list[Any]) -> dict[str, Any]:
    kinds = ["experts" if hasattr(mlp, "experts") else "swiglu" for mlp in mlps]
    fields: dict[str, Any] = {"mlp": kinds[0] if len(set(kinds)) == 1 else kinds}
    if "swiglu" in kinds:
        fields["intermediate_size"] = config.intermediate_size
    if "experts" not in kinds:
        return fields
    sparse = mlps[kinds.index("experts")]
    count, width = sparse.experts.gate_up_proj.shape[:2]
    shared = sparse.shared_experts if hasattr(sparse, "shared_experts") else sparse.shared_expert
    fields |= {
        "num_experts": count,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": width // 2,
        "shared_expert_intermediate_size": shared.down_proj.in_features,
        "shared_expert_gate": hasattr(sparse, "shared_expert_gate"),
        "norm_topk_prob": getattr(config, "norm_topk_prob", True),
    }
    if _is_sigmoid(sparse):
        names = {"router_groups": "n_group", "router_groups_per_tok": "topk_group"}
        fields |= {ours: getattr(config, theirs) for ours, theirs in names.items()}
        fields |= {"router": "sigmoid", "router_scale": config.routed_scaling_factor}
    return fields


def _common(arguments: list[dict[str, Any]]) -> dict[str, Any]:
    if any(other != arguments[0] for other in arguments[1:]):
        problem = "Layers of one kind differ in their options"
        raise InputError(problem, advice="rebind.optimize runs the model as it is", code="unknown_model")
    return arguments[0] if arguments else {}


def _memory_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    if not arguments:
        return {}
    decay, gate = arguments.get("decay"), arguments["output_gate"]
    fields = {
        "memory_heads": arguments["heads"],
        "read_norm_eps": arguments["norm_eps"],
        "query_scale": arguments["normalizer"].query_scale,
        "key_norm_eps": arguments["normalizer"].eps,
        "output_gate": "none" if gate is None else gate.activation,
        **{name: arguments.get(name) for name in ("key_heads", "d_k", "d_v", "conv_size", "conv_bias", "max_beta")},
    }
    if gate is not None:
        fields |= {"output_gate_rank": gate.rank, "output_gate_bias": gate.bias}
    if decay is not None:
        fields |= {"decay_gate": decay.name, "decay_rank": decay.rank}
    return fields | ({"lowest_decay": decay.lowest} if isinstance(decay, SigmoidDecay) else {})


def _attention_fields(arguments: dict[str, Any], *, after: bool) -> dict[str, Any]:
    if not arguments:
        return {}
    rotary, gate = arguments["rotary"], arguments["output_gate"]
    return {
        "num_key_value_heads": arguments["key_heads"],
        "head_dim": arguments["head_dim"],
        "qk_norm": arguments["qk_norm"],
        "sliding_window": arguments["window"],
        "rope_theta": None if rotary is None else rotary.theta,
        "rotary_fraction": 1.0 if rotary is None else rotary.fraction,
        "attention_gate": "none" if gate is None else gate.activation,
        "attention_norm": "after" if after else "before",
    }


def _latent_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    if not arguments:
        return {}
    if arguments["norm_eps"] != LATENT_NORM_EPS:
        problem = f"The norms of latent attention have ε = {arguments['norm_eps']:g}"
        raise InputError(problem, expected=f"{LATENT_NORM_EPS:g}", code="unknown_model")
    names = {"rank": "rank", "shared_dim": "shared_dim", "key_dim": "key_dim", "d_v": "value_dim"}
    names |= {"query_rank": "query_rank", "head_gate": "gate"}
    rotary = arguments["rotary"]
    return {
        "rope_theta": None if rotary is None else rotary.theta,
        **{f"latent_{ours}": arguments[name] for name, ours in names.items()},
    }
