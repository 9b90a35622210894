"""Layers and models of transformers and flash-linear-attention as those of rebind, and back.

- `links`: which weights of theirs are which of ours, in both directions
- `layers`: Gated DeltaNet, Kimi Delta Attention, DeltaNet and attention, recognized by the names of their parts
- `models`: the config and the links of a whole language model
"""

from __future__ import annotations

from rebind.nn.convert.layers import from_pretrained_layer, to_pretrained_layer

__all__ = ["from_pretrained_layer", "to_pretrained_layer"]
