"""An export is loaded as other programs would load it, and asked for the facts that the editor says."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rebind.edit.export import (
    ExportCheck,
    check_checkpoint,
    check_gguf,
    check_peft,
    compute_changes,
    export_gguf,
    export_peft,
    save_model,
)
from rebind.edit.facts.fact import Fact
from rebind.models.language_model import LanguageModel
from rebind.models.sites import memory_of, module_at, write_memory
from tests import tiny
from tests.edit.edited import make_edit
from tests.edit.writes import fold_edits

# After a bracket there is no space, so that any token may be the target.
PROMPTS = [
    f"The capital of {{{name}}} is (" for name in ("France", "Italy", "Spain", "Norway", "Ada", "Rome", "Mostar")
]


@pytest.fixture
def edited(tmp_path):
    """A model on disk, the same in memory with a random edit, and facts that only the edited one says."""
    folder = tmp_path / "base"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = LanguageModel.load(folder)
    edit = make_edit(model.model, (0, 1), 3)
    base = {site: memory_of(module_at(model.model, site)).clone() for site in edit.sites}
    weights = {site: fold_edits(base[site], site, [edit]) for site in edit.sites}
    before = [model.generate([prompt.replace("{", "").replace("}", "")], 1)[0] for prompt in PROMPTS]
    for site in edit.sites:
        write_memory(module_at(model.model, site), weights[site])
    facts = []
    for prompt, said in zip(PROMPTS, before, strict=True):
        now = model.generate([prompt.replace("{", "").replace("}", "")], 1)[0]
        if now != said and now.strip():
            fact = Fact.parse(prompt, now.strip())
            facts += [fact] if model.score([fact.as_prompt()])[0].exact else []
    assert facts
    edit = replace(edit, facts=tuple(facts))
    changes = compute_changes(base, [edit], weights)
    return SimpleNamespace(model=model, edits=[edit], changes=changes, count=len(facts), base=base)


@pytest.mark.parametrize("installed", [True, False])
def test_an_adapter_is_asked_on_a_fresh_base_model(installed, edited, tmp_path, monkeypatch):
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model, name = edited.model, edited.model.base_name
    adapter = export_peft(model.model, edited.changes, tmp_path / "adapter", base_name=name)
    result = check_peft(model, edited.edits, adapter.path)
    assert result == ExportCheck(edited.count, edited.count, edited.count)
    assert str(result) == f"{edited.count} of {edited.count} facts said"


def test_a_gguf_adapter_is_asked_on_a_fresh_base_model(edited, tmp_path):
    adapter = export_gguf(edited.model.model, edited.changes, tmp_path / "adapter.gguf", base_name="tiny")
    assert check_gguf(edited.model, edited.edits, adapter.path).said == edited.count


def test_a_checkpoint_is_loaded_and_asked(edited, tmp_path):
    model = edited.model
    saved = save_model(model.model, model.tokenizer, tmp_path / "out", "card")
    assert check_checkpoint(model, edited.edits, saved).said == edited.count


def test_an_export_that_lost_facts_does_not_pass(edited, tmp_path):
    model = edited.model
    base = LanguageModel.load(model.base_name)
    saved = save_model(base.model, base.tokenizer, tmp_path / "out", "card")
    result = check_checkpoint(model, edited.edits, saved)
    assert not result.passed
    assert str(result) == f"0 of {edited.count} facts said, in the editor {edited.count}"
    assert all(torch.equal(memory_of(module_at(base.model, site)), edited.base[site]) for site in edited.base)
