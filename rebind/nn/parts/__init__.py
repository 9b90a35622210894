"""The parts that layers and models are built of. They need torch alone.

- `state`: what a layer carries from token to token
- `feature_map`: φ as a module, with its normalizer
- `gates`: the gates of a rule, computed from the input
- `convolution`: a short causal convolution
- `dense`: projections, RMSNorm and MLPs, which treat every token by itself
- `loss`: the cross-entropy of a large vocabulary in little memory
- `padding`: tokens packed to the front of their rows
- `checks`: checks of arguments
"""

from __future__ import annotations

from rebind.nn.parts.convolution import ShortConvolution
from rebind.nn.parts.dense import RMSNorm
from rebind.nn.parts.feature_map import FeatureMap, Normalizer, get_normalizer
from rebind.nn.parts.gates import Gates
from rebind.nn.parts.state import State

__all__ = ["FeatureMap", "Gates", "Normalizer", "RMSNorm", "ShortConvolution", "State", "get_normalizer"]
