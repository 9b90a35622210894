"""Language models of sequence layers, for transformers. Importing this package registers them with the Auto classes.

- `config`: the config, the kinds of layer that it can name, and presets
- `model`: the models
- `cache`: the states of all layers, as `generate` carries them
- `decoding`: tokens decoded as replays of a CUDA graph
"""

from __future__ import annotations

from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.config import KINDS, PRESETS, RebindConfig, preset
from rebind.nn.lm.decoding import recorded_decoding
from rebind.nn.lm.model import RebindForCausalLM, RebindModel

__all__ = [
    "KINDS",
    "PRESETS",
    "RebindCache",
    "RebindConfig",
    "RebindForCausalLM",
    "RebindModel",
    "preset",
    "recorded_decoding",
]
