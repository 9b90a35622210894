"""The ledger: an append-only list of the edits of one model, from which any edit can be undone exactly.

- `edit`: an edit, one write per site, and the fold of edits over the base weights
- `fold`: the weights of an edited model
- `ledger`: the ledger, in a folder or in memory
- `log`: the chained log in which a ledger stores its events
- `state`: what the events add up to
- `verify`: the check that nothing in a ledger was altered or lost
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebind.edit.ledger.edit import Edit, fold
    from rebind.edit.ledger.ledger import Diff, Ledger
    from rebind.edit.ledger.verify import verify_folder

__all__ = ["Diff", "Edit", "Ledger", "fold", "verify_folder"]

_HOMES = {"Edit": "edit", "fold": "edit", "Diff": "ledger", "Ledger": "ledger", "verify_folder": "verify"}


def __getattr__(name: str) -> Any:
    """Import torch only when it is needed: the command line reads the header of a ledger without it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
