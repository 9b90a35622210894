"""Where the weights of a model are, if they are not simply in its modules.

- `placement`: offloaded by accelerate, or sharded over processes
- `quantized`: matrices in a few bits, with the change of edits beside them
"""

from __future__ import annotations
