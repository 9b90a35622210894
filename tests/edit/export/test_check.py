"""An export is loaded as other programs would load it, and asked for the facts that the editor says."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rebind.edit.export import (
    ExportCheck,
    compute_changes,
    count_said,
    export_gguf,
    export_peft,
    load_checkpoint,
    load_with_gguf,
    load_with_peft,
    save_model,
)
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.memory.low_rank import LowRank
from rebind.models.language_model import LanguageModel
from rebind.models.sites import memory_of, module_at, write_memory
from tests import model_types, tiny
from tests.edit.edited import make_edit
from tests.edit.writes import fold_edits
from tests.support import raises

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
    return SimpleNamespace(model=model, edits=[edit], changes=changes, count=len(facts))


@pytest.mark.parametrize("installed", [True, False])
def test_an_adapter_is_asked_on_a_fresh_base_model(installed, edited, tmp_path, monkeypatch):
    if not installed:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model, name = edited.model, edited.model.base_name
    adapter = export_peft(model.model, edited.changes, tmp_path / "adapter", base_name=name)
    assert count_said(load_with_peft(model, adapter.path), edited.edits) == edited.count


def test_a_gguf_adapter_is_asked_on_a_fresh_base_model(edited, tmp_path):
    adapter = export_gguf(edited.model.model, edited.changes, tmp_path / "adapter.gguf", base_name="tiny")
    assert count_said(load_with_gguf(edited.model, adapter.path), edited.edits) == edited.count


def test_a_checkpoint_is_loaded_and_asked(edited, tmp_path):
    model = edited.model
    saved = save_model(model.model, model.tokenizer, tmp_path / "out", "card")
    assert count_said(load_checkpoint(model, saved), edited.edits) == edited.count
    base = LanguageModel.load(model.base_name)
    saved = save_model(base.model, base.tokenizer, tmp_path / "base-again", "card")
    assert count_said(load_checkpoint(model, saved), edited.edits) == 0


def test_an_export_that_lost_facts_does_not_pass():
    assert ExportCheck(2, 2, 2).passed
    assert str(ExportCheck(2, 2, 2)) == "2 of 2 facts said"
    assert not ExportCheck(3, 1, 2).passed
    assert str(ExportCheck(3, 1, 2)) == "1 of 3 facts said, in the editor 2"


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_an_adapter_that_peft_does_not_load_is_an_error_of_ours(tmp_path):
    model_types.build("mamba2").save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    model = LanguageModel.load(tmp_path / "base")
    site = model.sites[0]
    changes = {site.name: LowRank(torch.ones(site.d_v, 1), torch.ones(1, site.d_k))}
    export_peft(model.model, changes, tmp_path / "adapter", base_name="tiny")
    with raises(InputError, "adapter_not_loadable"):
        load_with_peft(model, tmp_path / "adapter")
