"""The ledger: an append-only list of the edits of one model, from which any edit can be undone exactly.

- `edit`: an edit, one write per site
- `fold`: the weights of an edited model, the fold of edits over the base weights
- `ledger`: the ledger, in a folder or in memory
- `log`: the chained log in which a ledger stores its events, and the check that nothing in it was altered or lost
"""

from __future__ import annotations

from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Diff, Ledger
from rebind.edit.ledger.log import verify_folder

__all__ = ["Diff", "Edit", "Ledger", "verify_folder"]
