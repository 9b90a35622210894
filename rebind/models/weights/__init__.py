"""Weights that are not simply tensors in their modules, and the digest of all weights.

- `placement`: offloaded by accelerate, or sharded over processes
- `quantized`: matrices in a few bits; the change that edits make is stored beside them
- `fingerprint`: a digest of all weights
"""

from __future__ import annotations
