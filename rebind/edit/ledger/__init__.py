"""The ledger: an append-only list of the edits of one model, from which any edit can be undone exactly.

- `edit`: an edit, one write per site, and the fold of edits over the base weights
- `fold`: the weights of an edited model
- `ledger`: the ledger, in a folder or in memory
- `log`: the chained log in which a ledger stores its events
- `state`: what the events add up to
- `verify`: the check that nothing in a ledger was altered or lost
"""

from __future__ import annotations

from rebind.edit.ledger.edit import Edit, fold
from rebind.edit.ledger.ledger import Diff, Ledger
from rebind.edit.ledger.verify import verify_folder

__all__ = ["Diff", "Edit", "Ledger", "fold", "verify_folder"]
