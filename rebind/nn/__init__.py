"""Layers whose memory is rewritten at every token, and language models made of them.

The layers need torch alone. The models need transformers, and importing one registers it with the Auto classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rebind.nn.layers.attention import Attention, AttentionState
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.cross import CrossFastWeight
from rebind.nn.layers.fast_weight import FastWeight, FastWeightState
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.ttt import TTTLayer, TTTState
from rebind.nn.parts.normalizers import Normaliser, get_normaliser
from rebind.nn.parts.state import Empty, State
from rebind.nn.seq2seq.attention import CrossAttention, CrossAttentionState

if TYPE_CHECKING:
    from rebind.nn.lm.cache import RebindCache
    from rebind.nn.lm.config import RebindConfig
    from rebind.nn.lm.decoding import recorded_decoding
    from rebind.nn.lm.model import RebindForCausalLM, RebindModel
    from rebind.nn.lm.presets import PRESETS, preset
    from rebind.nn.seq2seq.cache import RebindSeq2SeqCache
    from rebind.nn.seq2seq.config import RebindSeq2SeqConfig
    from rebind.nn.seq2seq.model import RebindForSeq2SeqLM

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
    "PRESETS": "lm.presets",
    "RebindCache": "lm.cache",
    "RebindConfig": "lm.config",
    "RebindForCausalLM": "lm.model",
    "RebindForSeq2SeqLM": "seq2seq.model",
    "RebindModel": "lm.model",
    "RebindSeq2SeqCache": "seq2seq.cache",
    "RebindSeq2SeqConfig": "seq2seq.config",
    "preset": "lm.presets",
    "recorded_decoding": "lm.decoding",
}


def __getattr__(name: str) -> Any:
    if name not in _MODELS:
        raise AttributeError(f"module 'rebind.nn' has no attribute {name!r}")
    try:
        import_module("rebind.nn.lm.model")  # which registers them, as does the next
        import_module("rebind.nn.seq2seq.model")
        return getattr(import_module(f"rebind.nn.{_MODELS[name]}"), name)
    except ModuleNotFoundError as problem:
        if problem.name != "transformers":
            raise
        raise ImportError(f"{name} needs transformers: pip install 'rebind[edit]'") from problem


def __dir__() -> list[str]:
    return __all__
