"""`rebind train` and `rebind generate`: where they write, and what they print and suggest."""

from __future__ import annotations

import shlex
import time

import pytest

from rebind.storage import cache_dir
from tests.nn.training_runs import TINY, corpus

SMALL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
SIZES = ["--length", "16", "--batch", "4", "--steps", "2", "--evaluate-tokens", "50"]
FAST = ["--tokenizer", "characters", "--layers", "delta", *SMALL, *SIZES]


def test_a_model_is_trained_and_asked(rebind, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ("train", "--data", corpus(tmp_path), "--out", tmp_path / "my model", *FAST)
    shown = rebind(*words).out
    (line,) = [line for line in shown.splitlines() if line.startswith("generate: ")]
    suggested = shlex.split(line.removeprefix("generate: "))
    assert suggested == ["rebind", "generate", str(tmp_path / "my model"), "Once"]
    asked = rebind(*suggested[1:], "Twice", "--tokens", "3", json=True).document
    assert [answer["prompt"] for answer in asked["answers"]] == ["Once", "Twice"]
    assert "already complete" in rebind(*words).out


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_place_of_a_run(fails, tmp_path, place):
    (tmp_path / "file").touch()
    fails("train", "--data", corpus(tmp_path), "--out", tmp_path / place, *FAST)


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": "weights"},
        {"config.json": "no JSON"},
        {"thesis.tex": "years"},
    ],
)
def test_a_folder_of_something_else_stays_as_it_is(fails, tmp_path, files):
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    assert fails("train", "--data", corpus(tmp_path), "--out", tmp_path / "run", *FAST).code == "not_a_run_folder"
    assert {path.name: path.read_text() for path in (tmp_path / "run").iterdir()} == files
    assert not cache_dir().exists(), "no work was done"


def test_a_tokenizer_that_cannot_be_found_is_reported_at_once(fails, tmp_path):
    start = time.monotonic()
    fails("train", "--data", corpus(tmp_path), "--out", tmp_path / "run", "--tokenizer", "nonesuch", *SMALL, *SIZES)
    assert time.monotonic() - start < 10
