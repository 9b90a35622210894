"""The scan one chunk of tokens at a time, in plain torch: the backend of CPUs, and of every device without kernels.

- `backend`: the chunk form and its backward pass, with their derivation.
- `decay`: decays between the tokens of a chunk, one per token or one per key channel.
- `layout`: the order in which chunks of all sequences are processed.
- `plain`: the same form in operations that autograd follows, for transforms and for gradients of gradients.
"""

from __future__ import annotations

from rebind.ops.chunked.backend import CHUNKED, Chunked

__all__ = ["CHUNKED", "Chunked"]
