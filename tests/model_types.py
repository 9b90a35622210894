"""A tiny random model of every decoder-only language model in transformers, built from the default config of its type.

`LANGUAGE_MODELS` lists the types: all that `AutoModelForCausalLM` builds, without those in `OTHERS`. `SIZES` shrinks
every config, and `SPECIAL` has what a config needs beyond that. `python -m tests.model_types` prints which of them are
edited.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert reformer roberta
roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"""  # with a head for the next token
DECODERS = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr whisper
musicgen musicgen_melody"""  # of encoder-decoder models
MULTIMODAL = """emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize phi4_multimodal gemma4_assistant
gemma4_unified_assistant"""  # or drafts for another model
ALIASES = """gemma3 gemma3n gemma4 gemma4_unified gpt-sw3 llama4 qwen3_5 qwen3_5_moe qwen4_exp"""
OTHERS = {*ENCODERS.split(), *DECODERS.split(), *MULTIMODAL.split(), *ALIASES.split()}
LANGUAGE_MODELS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in OTHERS]
REFUSED = {  # with the code of the error
    "blt": "unknown_architecture",  # bytes in patches of varying length
    "cpmant": "other_tokens",  # puts 32 tokens of its own before every prompt
    "dbrx": "unknown_experts",
    "hrm_text": "several_stacks",  # runs two stacks of blocks several times
    "jetmoe": "unknown_experts",
}
EDITED = [kind for kind in LANGUAGE_MODELS if kind not in REFUSED]

SIZES: dict[str, Any] = {  # wide MLPs: in narrow ones random keys overlap, and an edit moves other tokens too
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dim_ff", "dff"), 224),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim", "o_lora_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "sliding_window": 16,
    # recurrent layers
    **dict.fromkeys(("mamba_n_heads", "mamba_dt_rank", "mamba_d_conv", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_d_state", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head",), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    # sparse attention
    **dict.fromkeys(("index_n_heads",), 2),
    "index_head_dim": 8,
    "index_topk": 64,
}
MIXED = {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 380, "num_kv_shared_layers": 0}
BYTES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 56, "vocab_size": 260}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": MIXED,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        **{part: {**BYTES, "num_hidden_layers": 1} for part in ("patcher_config", "encoder_config", "decoder_config")},
        "global_config": {**BYTES, "num_hidden_layers": LAYERS},
        "encoder_hash_byte_group_vocab": 8,
    },
    "cohere_compass_text": {
        **SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
    },
    "cpmant": {"dim_head": 8},
    "ctrl": {"n_positions": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {**SLIDING, **PER_LAYER, "laurel_rank": 4},
    "gemma4_text": {**SLIDING, **PER_LAYER, "global_head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 8},
    "granitemoehybrid": MIXED,
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4, "num_key_value_heads": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "mlp", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 20,
    },
    "qwen4_exp_text": {**INDEXER, "indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 4},
    "xlstm": {"autocast_kernel_dtype": "float32", "hidden_size": 64, "qk_dim_factor": 1.0},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2), "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2), "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
}


def build(kind: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Return a model of this type with seeded weights, biases and norms included; options override its config."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config_class: Any = CONFIG_MAPPING[kind]
    accepts = inspect.signature(config_class.__init__).parameters
    sizes = {name: value for name, value in SIZES.items() if name in accepts}
    if "kv_lora_rank" in accepts:  # latent attention: as many heads for keys as for queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    ids = {"vocab_size": 380, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = config_class(**{**ids, **sizes, **SPECIAL.get(kind, {}), **options})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        # The other implementations of experts do not take float64.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
        for name, parameter in model.named_parameters():
            randomize(name, parameter.data)
    return model.eval().requires_grad_(False)


def randomize(name: str, parameter: torch.Tensor) -> None:
    if parameter.ndim == 1:
        parameter.add_(0.1 * torch.randn_like(parameter))
    else:
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)


def main() -> None:
    """Print which families are edited, as the documents count them."""
    print(f"{len(EDITED)} of {len(LANGUAGE_MODELS)} families are edited: {', '.join(EDITED)}")
    print(f"{len(REFUSED)} are refused: {', '.join(f'{kind} ({code})' for kind, code in REFUSED.items())}")


if __name__ == "__main__":
    main()
