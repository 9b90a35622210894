"""The parts that layers and models are built of. They need torch alone.

- `feature_map`: φ as a module, with its normalizer
- `gates`: a short causal convolution of the input, the gates of a rule, and the gate of the output
- `dense`: projections, RMSNorm, MLPs, and the cross-entropy of a large vocabulary in little memory
- `experts`: an MLP of experts
- `padding`: tokens packed to the front of their rows
- `documents`: documents packed in one row
- `checks`: checks of arguments
"""

from __future__ import annotations

from rebind.nn.parts.feature_map import L2Normalizer, Normalizer, get_normalizer
from rebind.nn.parts.gates import OutputGate, SigmoidDecay, SoftplusDecay

__all__ = ["L2Normalizer", "Normalizer", "OutputGate", "SigmoidDecay", "SoftplusDecay", "get_normalizer"]
