"""The parts that layers and models are built of. They need torch alone.

- `feature_map`: φ as a module, with its normalizer
- `gates`: a short causal convolution of the input, and the gates of a rule
- `dense`: projections, RMSNorm, MLPs, and the cross-entropy of a large vocabulary in little memory
- `padding`: tokens packed to the front of their rows
- `checks`: checks of arguments
"""

from __future__ import annotations

from rebind.nn.parts.feature_map import Normalizer, get_normalizer

__all__ = ["Normalizer", "get_normalizer"]
