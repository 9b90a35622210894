"""Write the edits of a model for other programs.

- `change`: the change of each site, exactly low-rank, and the delta file that holds it alone
- `folders`: the edited model, for transformers, and the change as a LoRA adapter, for peft
- `model_card`: the README.md of both

A folder is written completely or not at all, and replaces only an earlier export of its kind.
"""

from __future__ import annotations

from rebind.edit.export.change import apply_delta, compute_changes, load_delta, save_delta
from rebind.edit.export.folders import AdapterExport, export_peft, save_model
from rebind.edit.export.model_card import model_card

__all__ = [
    "AdapterExport",
    "apply_delta",
    "compute_changes",
    "export_peft",
    "load_delta",
    "model_card",
    "save_delta",
    "save_model",
]
