"""A tiny random model of every family, built from its config: a few kilobytes with the shape of the real one.

`FAMILIES` maps a name to a builder, `EXPECTED` to what its sites should be. `tests.model_types` has every family of
transformers, mixtures of experts and recurrent ones included, in one shape each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rebind import nn

VOCAB, HIDDEN, INNER, LAYERS, HEADS = 96, 32, 56, 3, 4
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2_LIKE = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_inner": INNER, **IDS}
BLOOM_LIKE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, **IDS}
HF_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    **IDS,
}
LLAMA_LIKE = {**HF_LIKE, "num_key_value_heads": 2}
WIDE_HEADS = {**LLAMA_LIKE, "head_dim": 12}  # heads × head_dim is neither the hidden size nor the inner width
NEO_ATTENTION = [[["global", "local", "global"], 1]]


@dataclass(frozen=True)
class Family:
    config: str  # the class of its config in transformers, or in rebind.nn
    down: str  # the path of the down projection, {} standing for the layer
    options: dict[str, Any] = field(default_factory=dict)
    inner: int = INNER


def _gpt(config: str, down: str, **options: Any) -> Family:
    return Family(config, f"transformer.h.{{}}.{down}", {**GPT2_LIKE, "n_positions": 64, **options})


def _llama(config: str, base: dict[str, Any] = LLAMA_LIKE, down: str = "mlp.down_proj", **options: Any) -> Family:
    return Family(config, f"model.layers.{{}}.{down}", {**base, **options})


def _falcon(**options: Any) -> Family:
    shape = {**HF_LIKE, "ffn_hidden_size": INNER, **options}
    return Family("FalconConfig", "transformer.h.{}.mlp.dense_4h_to_h", shape)


def _own(*kinds: str) -> Family:
    shape = {key: HF_LIKE[key] for key in HF_LIKE if key != "max_position_embeddings"}
    return Family("RebindConfig", "model.layers.{}.mlp.down_proj", {**shape, "layer_kinds": list(kinds)})


EXPECTED: dict[str, Family] = {
    "gpt2": _gpt("GPT2Config", "mlp.c_proj"),
    "gpt-neo": Family(
        "GPTNeoConfig",
        "transformer.h.{}.mlp.c_proj",
        {**HF_LIKE, "num_layers": LAYERS, "num_heads": HEADS, "attention_types": NEO_ATTENTION, "window_size": 8},
    ),
    "gpt-j": _gpt("GPTJConfig", "mlp.fc_out", rotary_dim=4),
    "gpt-neox": Family("GPTNeoXConfig", "gpt_neox.layers.{}.mlp.dense_4h_to_h", HF_LIKE),
    "gpt-neox-sequential": Family(
        "GPTNeoXConfig", "gpt_neox.layers.{}.mlp.dense_4h_to_h", {**HF_LIKE, "use_parallel_residual": False}
    ),
    "opt": Family(
        "OPTConfig", "model.decoder.layers.{}.fc2", {**HF_LIKE, "ffn_dim": INNER, "word_embed_proj_dim": HIDDEN}
    ),
    "opt-post-norm": Family(  # OPT-350m: embeddings narrower than the model, norms after the residual
        "OPTConfig",
        "model.decoder.layers.{}.fc2",
        {**HF_LIKE, "ffn_dim": INNER, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom": Family("BloomConfig", "transformer.h.{}.mlp.dense_4h_to_h", BLOOM_LIKE, inner=4 * HIDDEN),  # fixed at 4
    "falcon": _falcon(),
    "falcon-new": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-sequential": _falcon(parallel_attn=False, multi_query=False, bias=True, alibi=True),
    "phi": _llama("PhiConfig", down="mlp.fc2"),
    "phi3": _llama("Phi3Config"),
    "llama": _llama("LlamaConfig"),
    "llama-bias": _llama("LlamaConfig", mlp_bias=True, attention_bias=True, tie_word_embeddings=True),
    "mistral": _llama("MistralConfig", WIDE_HEADS),
    "qwen2": _llama("Qwen2Config"),
    "qwen3": _llama("Qwen3Config", WIDE_HEADS),
    "gemma": _llama("GemmaConfig", WIDE_HEADS),
    "gemma2": _llama("Gemma2Config", WIDE_HEADS, query_pre_attn_scalar=12, sliding_window=16),
    "gemma3": _llama("Gemma3TextConfig", WIDE_HEADS, query_pre_attn_scalar=12, sliding_window=16),
    "smollm3": _llama("SmolLM3Config"),
    "olmo": _llama("OlmoConfig"),
    "olmo2": _llama("Olmo2Config"),
    "olmo3": _llama("Olmo3Config", sliding_window=16),
    "stablelm": _llama("StableLmConfig"),
    "stablelm-parallel": _llama("StableLmConfig", use_parallel_residual=True, qk_layernorm=True),
    "cohere": _llama("CohereConfig"),
    "cohere2": _llama("Cohere2Config", sliding_window=16),
    "gpt-bigcode": _gpt("GPTBigCodeConfig", "mlp.c_proj"),
    "starcoder2": _llama("Starcoder2Config", down="mlp.c_proj"),
    "mpt": Family(
        "MptConfig",
        "transformer.blocks.{}.ffn.down_proj",
        {"vocab_size": VOCAB, "d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64, **IDS},
        inner=4 * HIDDEN,  # fixed
    ),
    "llama4": _llama(
        "Llama4TextConfig",
        {**LLAMA_LIKE, "head_dim": 8},
        down="feed_forward.down_proj",
        intermediate_size_mlp=INNER,
        moe_layers=[],
        num_local_experts=2,
        attention_chunk_size=16,
    ),
    "granite": _llama("GraniteConfig", residual_multiplier=0.22, embedding_multiplier=2.0),
    "glm4": _llama("Glm4Config", WIDE_HEADS),
    "modernbert-decoder": _llama("ModernBertDecoderConfig", HF_LIKE, down="mlp.Wo", cls_token_id=1, sep_token_id=2),
    "exaone4": _llama("Exaone4Config", sliding_window=16),
    "rebind-attention": _own("attention"),
    "rebind-linear-sum": _own("linear-sum"),
    "rebind-gated_delta": _own("gated_delta"),
    "rebind-ttt-linear": _own("ttt-linear"),
    "rebind-mixed": _own("delta", "attention", "delta"),
}


def build(family: Family, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a model of the family with seeded weights; options override its config.

    transformers starts biases at zero and norms at one, where mistakes about them do not show: here all are random.
    """
    home: Any = transformers if hasattr(transformers, family.config) else nn
    config = getattr(home, family.config)(**{**family.options, **options})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # importing GPT-BigCode's module calls torch.jit.script
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval().requires_grad_(False)


def _builders(table: dict[str, Family]) -> dict[str, Callable[..., PreTrainedModel]]:
    return {
        name: lambda seed=0, family=family, **options: build(family, seed, **options) for name, family in table.items()
    }


FAMILIES = _builders(EXPECTED)


def tokens(rows: int = 2, length: int = 7, seed: int = 0) -> torch.Tensor:
    """Return token ids [rows, length], none of them special."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
