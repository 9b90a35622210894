"""Write the edits of a model for other programs.

- `change`: the change of each site, exactly low-rank, and the delta file that holds it alone
- `adapter`: the change as a LoRA adapter, for peft and vLLM
- `gguf_adapter`: the same for llama.cpp
- `checkpoint`: the edited model, for transformers
- `model_card`: the README.md of adapters and checkpoints
- `check`: load an export and ask it for its facts

An export is written completely or not at all, and replaces only an earlier export of its kind.
"""

from __future__ import annotations

from rebind.edit.export.adapter import AdapterExport, export_peft
from rebind.edit.export.change import apply_delta, compute_changes, load_delta, save_delta, warn_of_dense_facts
from rebind.edit.export.check import (
    ExportCheck,
    ask_facts,
    count_said,
    load_checkpoint,
    load_with_gguf,
    load_with_memory,
    load_with_peft,
)
from rebind.edit.export.checkpoint import choose_dtype, save_model
from rebind.edit.export.gguf_adapter import export_gguf
from rebind.edit.export.model_card import model_card

__all__ = [
    "AdapterExport",
    "ExportCheck",
    "apply_delta",
    "ask_facts",
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
    "save_delta",
    "save_model",
    "warn_of_dense_facts",
]
