"""Layers whose memory is rewritten at every token, and language models made of them.

The layers need torch alone. The models need transformers, and importing one registers it with the Auto classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rebind.nn.attention import Attention, AttentionState
from rebind.nn.cross import CrossFastWeight
from rebind.nn.fast_weight import FastWeight, FastWeightState
from rebind.nn.hopfield import HopfieldLayer
from rebind.nn.layer import SequenceLayer
from rebind.nn.normalise import Normaliser, get_normaliser
from rebind.nn.seq2seq_attention import CrossAttention, CrossAttentionState
from rebind.nn.states import Empty, State
from rebind.nn.ttt import TTTLayer, TTTState

if TYPE_CHECKING:
    from rebind.nn.cache import RebindCache
    from rebind.nn.config import RebindConfig
    from rebind.nn.decoding import recorded_decoding
    from rebind.nn.models import RebindForCausalLM, RebindModel
    from rebind.nn.presets import PRESETS, preset
    from rebind.nn.seq2seq import RebindForSeq2SeqLM
    from rebind.nn.seq2seq_cache import RebindSeq2SeqCache
    from rebind.nn.seq2seq_config import RebindSeq2SeqConfig

__all__ = [
    "PRESETS",
    "Attention",
    "AttentionState",
    "CrossAttention",
    "CrossAttentionState",
    "CrossFastWeight",
    "Empty",
    "FastWeight",
    "FastWeightState",
    "HopfieldLayer",
    "Normaliser",
    "RebindCache",
    "RebindConfig",
    "RebindForCausalLM",
    "RebindForSeq2SeqLM",
    "RebindModel",
    "RebindSeq2SeqCache",
    "RebindSeq2SeqConfig",
    "SequenceLayer",
    "State",
    "TTTLayer",
    "TTTState",
    "get_normaliser",
    "preset",
    "recorded_decoding",
]

_MODELS = {
    "PRESETS": "presets",
    "RebindCache": "cache",
    "RebindConfig": "config",
    "RebindForCausalLM": "models",
    "RebindForSeq2SeqLM": "seq2seq",
    "RebindModel": "models",
    "RebindSeq2SeqCache": "seq2seq_cache",
    "RebindSeq2SeqConfig": "seq2seq_config",
    "preset": "presets",
    "recorded_decoding": "decoding",
}


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module 'rebind.nn' has no attribute {name!r}")
    try:
        import_module("rebind.nn.models")  # which registers them, as does the next
        import_module("rebind.nn.seq2seq")
        return getattr(import_module(f"rebind.nn.{_MODELS[name]}"), name)
    except ModuleNotFoundError as problem:
        if problem.name != "transformers":
            raise
        raise ImportError(f"{name} needs transformers: pip install 'rebind[edit]'") from problem


def __dir__() -> list[str]:
    return __all__
