"""Export the edits of a model to other programs.

- `change`: the exact low-rank change of each site, and the delta file that stores it
- `adapter`: the change as a LoRA adapter, for peft and vLLM
- `gguf_adapter`: the change as a LoRA adapter for llama.cpp
- `checkpoint`: the edited model, for transformers
- `model_card`: the README.md of adapters and checkpoints
- `check`: load an export and score its facts

An export is written completely or not at all, and replaces only an earlier export of its kind.
"""

from __future__ import annotations

from rebind.edit.dense.files import MEMORY_FOLDER
from rebind.edit.export.adapter import AdapterExport, export_peft
from rebind.edit.export.change import (
    apply_delta,
    compute_changes,
    load_delta,
    require_changed_weights,
    require_dense_facts,
    save_delta,
    warn_of_dense_facts,
)
from rebind.edit.export.check import (
    ExportCheck,
    count_said,
    load_checkpoint,
    load_with_gguf,
    load_with_memory,
    load_with_peft,
    score_facts,
)
from rebind.edit.export.checkpoint import choose_dtype, save_model
from rebind.edit.export.gguf_adapter import export_gguf
from rebind.edit.export.model_card import model_card

__all__ = [
    "MEMORY_FOLDER",
    "AdapterExport",
    "ExportCheck",
    "apply_delta",
    "choose_dtype",
    "compute_changes",
    "count_said",
    "export_gguf",
    "export_peft",
    "load_checkpoint",
    "load_delta",
    "load_with_gguf",
    "load_with_memory",
    "load_with_peft",
    "model_card",
    "require_changed_weights",
    "require_dense_facts",
    "save_delta",
    "save_model",
    "score_facts",
    "warn_of_dense_facts",
]
