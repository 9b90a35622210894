"""Sequence layers with a memory that is rewritten at every token, and language models made of them.

- `layers`: fast weights, ridge regression, test-time training, attention, Hopfield retrieval
- `parts`: what layers and models are built of
- `convert`: layers and models of transformers and fla as ours, and back
- `lm`: language models, and decoding with CUDA graphs
- `seq2seq`: an encoder-decoder for translation
- `training`: training runs

`layers` and `parts` need torch alone. The models need transformers; where it is installed, importing `rebind.nn` is
enough for `AutoModelForCausalLM.from_pretrained` and `AutoModelForSeq2SeqLM.from_pretrained` to know them.
"""

from __future__ import annotations

from rebind.nn.convert import from_pretrained_layer, to_pretrained_layer
from rebind.nn.layers import (
    Attention,
    CrossAttention,
    CrossFastWeight,
    FastWeight,
    HopfieldLayer,
    LatentAttention,
    MesaLayer,
    Rotary,
    SequenceLayer,
    State,
    TTTLayer,
)
from rebind.nn.parts import L2Normalizer, Normalizer, OutputGate, SigmoidDecay, SoftplusDecay, get_normalizer

try:
    from rebind.nn.lm import (
        PRESETS,
        RebindCache,
        RebindConfig,
        RebindForCausalLM,
        RebindModel,
        preset,
        recorded_decoding,
    )
    from rebind.nn.seq2seq import RebindForSeq2SeqLM, RebindSeq2SeqCache, RebindSeq2SeqConfig
except ModuleNotFoundError as problem:
    if problem.name != "transformers":
        raise

__all__ = [
    "PRESETS",
    "Attention",
    "CrossAttention",
    "CrossFastWeight",
    "FastWeight",
    "HopfieldLayer",
    "L2Normalizer",
    "LatentAttention",
    "MesaLayer",
    "Normalizer",
    "OutputGate",
    "RebindCache",
    "RebindConfig",
    "RebindForCausalLM",
    "RebindForSeq2SeqLM",
    "RebindModel",
    "RebindSeq2SeqCache",
    "RebindSeq2SeqConfig",
    "Rotary",
    "SequenceLayer",
    "SigmoidDecay",
    "SoftplusDecay",
    "State",
    "TTTLayer",
    "from_pretrained_layer",
    "get_normalizer",
    "preset",
    "recorded_decoding",
    "to_pretrained_layer",
]


def __getattr__(name: str) -> object:
    if name in __all__:  # only models can be missing
        raise ModuleNotFoundError(f"{name} needs transformers: pip install 'rebind[edit]'", name="transformers")
    raise AttributeError(f"module 'rebind.nn' has no attribute {name!r}")
