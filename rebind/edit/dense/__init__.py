"""A dense memory beside the weights: facts as rows that are read at one layer, by a softmax with an empty slot.

A fact is a few keys (whitened hidden states at its subject, one per framing) and one value δ, which is added to the
hidden state wherever the subject is mentioned. No weight changes, and rows do not change one another, so there is no
wall at the width of a matrix, and undoing an edit removes its rows and nothing else (docs/dense.md).

- `subjects`: facts about one subject, which share their keys and therefore one δ
- `draft`: from facts to the rows of an edit
- `thresholds`: how near a state must come to a key to read its row
- `rows`: the rows of an edit, and which rows the active edits leave
- `fold`: the memory after some edits, brought up to date as edits come and go; `snapshot` stores it with the ledger
- `layers`: the dense memory of an editor's model, always the fold of some edits
- `hook`: the read, on the output of a block
- `files`: a memory as a folder
- `attach`: a stored memory on a plain transformers model
- `consolidate`: facts that move from the memory into the weights
"""

from __future__ import annotations

from rebind.edit.dense.attach import AttachedMemory, attach
from rebind.edit.dense.files import StoredMemory, load_memory, save_memory

__all__ = ["AttachedMemory", "StoredMemory", "attach", "load_memory", "save_memory"]
