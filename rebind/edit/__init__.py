"""Edit facts in a pretrained language model, in closed form, so that every edit can be undone exactly.

    from rebind.edit import Editor

    editor = Editor("smollm2")
    edit = editor.rewrite("The capital of {France} is", "Rome")
    editor.undo(edit.id)

- `editor`: the verbs
- `methods`, `settings`: the editing methods, and what they run with on a model
- `plan`, `guard`, `checks`: what an edit would cost, what an edited model must pass, and how it is asked
- `facts`: facts, conflicts between them, and files of them
- `learning`: facts in a text, sorted by what the model knows
- `moments`: the second moments of the keys that a model already uses, and the text they are computed from
- `targets`: the search for the hidden states that make a model say the targets
- `drafts`, `solve`: from facts to the writes of an edit
- `dense`: a memory beside the weights: from facts to its rows, and the files in which it travels
- `edited_model`: the fold of edits, in weights and dense memory
- `ledger`: the append-only list of edits, and the weights that they fold to
- `export`: checkpoints, delta files and PEFT adapters
- `progress`, `wording`: how an editor reports its work, and numbers as people read them
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

__all__ = [
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

_HOMES = {
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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
