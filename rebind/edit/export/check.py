"""Check an export: load it as another program would, and score every fact."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rebind.edit.dense.attach import attach
from rebind.edit.dense.files import MEMORY_FOLDER
from rebind.edit.export.adapter import read_peft
from rebind.edit.export.change import apply_delta
from rebind.edit.export.gguf_adapter import read_gguf
from rebind.edit.ledger.edit import Edit
from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.locate import first_line
from rebind.models.scoring import FactScore


@dataclass(frozen=True)
class ExportCheck:
    """How many facts a loaded export says, and how many the editor says."""

    facts: int
    said: int
    said_in_editor: int

    @property
    def passed(self) -> bool:
        return self.said >= self.said_in_editor

    def __str__(self) -> str:
        editor = "" if self.said == self.said_in_editor == self.facts else f", in the editor {self.said_in_editor}"
        return f"{self.said} of {self.facts} facts said{editor}"


def score_facts(model: LanguageModel, edits: Sequence[Edit]) -> list[FactScore]:
    """Score every fact after its bare prompt."""
    return model.score([fact.as_prompt() for edit in edits for fact in edit.facts])


def count_said(model: LanguageModel, edits: Sequence[Edit]) -> int:
    """Return how many facts the model answers with the whole target."""
    return sum(score.exact for score in score_facts(model, edits))


def load_checkpoint(edited: LanguageModel, folder: Path) -> LanguageModel:
    """Load a checkpoint, as a second model in memory, with its dense memory."""
    exported = LanguageModel.load(folder, device=edited.device)
    if (folder / MEMORY_FOLDER).exists():
        attach(exported.model, folder / MEMORY_FOLDER)
    return exported


def load_with_peft(edited: LanguageModel, folder: Path) -> LanguageModel:
    """Load the base model again and apply an adapter, with peft or, if it is not installed, by adding B A."""
    base = _load_base(edited)
    if importlib.util.find_spec("peft") is None:
        apply_delta(base.model, read_peft(folder))
    else:
        from peft import PeftModel

        try:
            PeftModel.from_pretrained(base.model, str(folder))  # changes the modules of the base model in place
        except ValueError as problem:  # for example, peft adapts no projection of a Mamba block
            raise InputError(
                f"peft does not load the adapter {folder} ({first_line(problem)})",
                advice="Export a checkpoint, or a delta file",
                code="adapter_not_loadable",
            ) from problem
    return base


def load_with_gguf(edited: LanguageModel, file: Path) -> LanguageModel:
    """Load the base model again and add the change that llama.cpp would compute from a GGUF adapter."""
    base = _load_base(edited)
    apply_delta(base.model, read_gguf(file, base.model, [site.name for site in base.sites]))
    return base


def load_with_memory(edited: LanguageModel, folder: Path) -> LanguageModel:
    """Load the base model again and attach a dense memory."""
    base = _load_base(edited)
    attach(base.model, folder)
    return base


def _load_base(edited: LanguageModel) -> LanguageModel:
    base = LanguageModel.load(edited.base_name, edited.tokenizer, dtype=edited.dtype, device=edited.device)
    base.trunk  # noqa: B018 - locates the sites now, before an adapter wraps them
    return base
