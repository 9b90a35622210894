"""Write the edits of a model for other programs.

- `low_rank_change`: the change of each site, exactly low-rank
- `delta`: the change alone, as safetensors
- `checkpoint`: the edited model, for transformers
- `peft`: the change as a LoRA adapter, for peft
- `model_card`: the README.md of both

A folder is written completely or not at all, and replaces only an earlier export of its kind.
"""

from __future__ import annotations

from rebind.edit.export.checkpoint import CHECKPOINT, save_model
from rebind.edit.export.delta import apply_delta, delta_file, load_delta, save_delta
from rebind.edit.export.low_rank_change import compute_changes
from rebind.edit.export.model_card import model_card
from rebind.edit.export.peft import ADAPTER, AdapterExport, export_peft

__all__ = [
    "ADAPTER",
    "CHECKPOINT",
    "AdapterExport",
    "apply_delta",
    "compute_changes",
    "delta_file",
    "export_peft",
    "load_delta",
    "model_card",
    "save_delta",
    "save_model",
]
