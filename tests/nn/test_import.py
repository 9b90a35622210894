"""Importing `rebind.nn` with and without transformers; docs/models.md and docs/train.md run."""

from __future__ import annotations

import os

import pytest
import torch

import rebind.nn
from rebind.nn import RebindConfig, RebindForCausalLM
from tests.fresh import failures
from tests.test_docs import ROOT, run_blocks

IMPORTS = "import sys, torch, torch._dynamo"  # most of the time that rebind.nn and transformers take
WITHOUT_TRANSFORMERS = """
sys.modules["transformers"] = None  # its import fails
import rebind.nn
rebind.nn.FastWeight(8, 2)(torch.zeros(1, 2, 8))
try:
    rebind.nn.RebindForCausalLM
except ModuleNotFoundError as problem:
    assert "pip install 'rebind[edit]'" in str(problem), problem
else:
    raise AssertionError("a model without transformers")
"""
WITH_TRANSFORMERS = """
import rebind.nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
small = {"vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
config = AutoConfig.for_model("rebind", num_hidden_layers=1, **small)
assert type(AutoModelForCausalLM.from_config(config)) is rebind.nn.RebindForCausalLM
assert type(AutoModel.from_config(config)) is rebind.nn.RebindModel
config = AutoConfig.for_model("rebind-seq2seq", encoder_layers=1, decoder_layers=1, **small)
assert type(AutoModelForSeq2SeqLM.from_config(config)) is rebind.nn.RebindForSeq2SeqLM
"""
AS_LM_EVAL = """
from transformers import AutoConfig, AutoModelForCausalLM
folder, imported = {folder!r}, {imported}
if imported:
    import rebind.nn
options = dict(trust_remote_code=not imported)  # what lm_eval passes on
assert AutoConfig.from_pretrained(folder, **options).model_type == "rebind"
model = AutoModelForCausalLM.from_pretrained(folder, **options)
assert "rebind" in sys.modules and type(model).__name__ == "RebindForCausalLM"
ids = torch.tensor([[1, 2, 3, 4]])
scores = torch.log_softmax(model(ids[:, :-1]).logits, -1).gather(-1, ids[:, 1:, None])
assert torch.isfinite(scores).all()
"""


def test_programs_that_know_only_the_auto_classes_read_a_saved_folder(tmp_path):
    """As `lm_eval --model hf` does, with `import rebind.nn` before it or with `trust_remote_code=True`.

    In the same processes, to import torch once: the package with transformers after it, and without transformers.
    """
    config = RebindConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    RebindForCausalLM(config).save_pretrained(tmp_path / "model")
    imported, trusted = (AS_LM_EVAL.format(folder=str(tmp_path / "model"), imported=one) for one in (True, False))
    programs = {
        "without transformers": WITHOUT_TRANSFORMERS,
        "with transformers": WITH_TRANSFORMERS,
        "lm_eval, after our import": imported,
        "lm_eval, with trust in remote code": trusted,
    }
    env = {**os.environ, "HF_HOME": str(tmp_path / "home")}  # where the module of the folder is copied to
    assert failures(IMPORTS, programs, cwd=ROOT, env=env) == []


def test_every_name_is_there():
    for name in rebind.nn.__all__:
        assert getattr(rebind.nn, name) is not None
    with pytest.raises(AttributeError):
        rebind.nn.RebindForEverything  # noqa: B018


def test_the_documents_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert run_blocks(ROOT / "docs" / "models.md") > 5
        assert run_blocks(ROOT / "docs" / "train.md") == 2


def test_the_page_for_people_from_elsewhere_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert run_blocks(ROOT / "docs" / "coming-from-fla.md") == 3
