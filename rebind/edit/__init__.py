"""Edit facts in a pretrained language model, in closed form, so that every edit can be undone exactly.

    from rebind.edit import Editor

    editor = Editor("smollm2")
    edit = editor.rewrite("The capital of {France} is", "Rome")
    editor.undo(edit.id)

- `editor`: the verbs
- `methods`, `settings`: the editing methods, and what they run with on a model
- `plan`: what an edit would cost
- `guard`, `checks`, `outcome`: the bounds of an edited model, the run of its checks, and what an edit did
- `answers`: what a model says freely about facts
- `facts`: facts, conflicts between them, and reading them from files
- `learning`: facts in a text, sorted by what the model knows
- `moments`: the second moments of the keys that a model already uses, and the text they are computed from
- `targets`: the search for the hidden states that make a model say the targets
- `drafts`, `solve`: from facts to the writes of an edit
- `dense`: a memory beside the weights: its rows, and its files
- `edited_model`: a model that equals the fold of edits, in weights and dense memory
- `ledger`: the append-only list of edits, and the weights that they fold to
- `export`: checkpoints, delta files and PEFT adapters
- `progress`, `wording`: progress reports, and formatting of numbers
- `outline`: the sizes of a model, for `plan`
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebind.edit.dense import attach
    from rebind.edit.editor import Editor
    from rebind.edit.facts import Fact, read_facts
    from rebind.edit.guard import Guard
    from rebind.edit.ledger import Edit, Ledger
    from rebind.edit.methods import METHODS
    from rebind.edit.moments import Texts
    from rebind.edit.progress import Progress
    from rebind.edit.targets import TargetSettings

DEFAULT_METHOD = "dense"  # docs/editing-results.md has the comparison that decided it

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "Edit",
    "Editor",
    "Fact",
    "Guard",
    "Ledger",
    "Progress",
    "TargetSettings",
    "Texts",
    "attach",
    "read_facts",
]

_MODULES = {
    "METHODS": "methods",
    "Edit": "ledger",
    "Editor": "editor",
    "Fact": "facts",
    "Guard": "guard",
    "Ledger": "ledger",
    "Progress": "progress",
    "TargetSettings": "targets",
    "Texts": "moments",
    "attach": "dense",
    "read_facts": "facts",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: facts and ledgers can be read without loading transformers."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
