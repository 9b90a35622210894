"""The ledger: an append-only list of the edits of one model, from which any edit can be undone exactly.

- `edit`: an edit, one write per site; `tensors`: its tensors on disk
- `fold`: the weights of an edited model, the fold of edits over the base weights; `partial_folds`: where a fold resumes
- `ledger`: the ledger, in a folder or in memory; `creation`: how one begins
- `log`: the chained log in which a ledger stores its events, and the state that they add up to
- `table`, `edits`: what is known of edits without reading them, and sequences of edits that are read when needed
- `verify`: the check that nothing was altered or lost
- `compact`: old edits, squashed
- `snapshots`, `state_file`: what is stored only to save time
"""

from __future__ import annotations

from rebind.edit.ledger.compact import Compaction
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Diff, Ledger
from rebind.edit.ledger.verify import verify_folder

__all__ = ["Compaction", "Diff", "Edit", "Ledger", "verify_folder"]
