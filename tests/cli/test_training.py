"""`rebind train` and `rebind generate`: where they write, and what they say meanwhile."""

from __future__ import annotations

import shlex

import pytest

from rebind.cli.ui.progress import Bars
from tests.nn.training_runs import TINY, corpus

SMALL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
SIZES = ["--length", "16", "--batch", "4", "--steps", "2", "--evaluate-tokens", "50"]
FAST = ["--tokenizer", "characters", "--layers", "delta", *SMALL, *SIZES]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_command_that_is_suggested_can_be_pasted(rebind, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    told = rebind("train", "--data", corpus(tmp_path), "--out", str(tmp_path / "my model"), *FAST).out
    (line,) = [line for line in told.splitlines() if line.startswith("ask it: ")]
    words = shlex.split(line.removeprefix("ask it: "))
    assert words == ["rebind", "generate", str(tmp_path / "my model"), "Once"]
    phases, phase = [], Bars.phase
    monkeypatch.setattr(Bars, "phase", lambda self, name: (phases.append(name), phase(self, name))[1])
    assert rebind(*words[1:], "Twice", "--tokens", "3").err == ""
    assert list(dict.fromkeys(phases)) == ["loading", "asking"]
    (tmp_path / "plain").touch()
    files = list((tmp_path / "my model").glob("checkpoints/*/*"))
    assert any(file.suffix == ".safetensors" for file in files)
    assert {file.stat().st_mode for file in files} == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_file_in_the_place_of_a_run(rebind, tmp_path, place):
    (tmp_path / "file").touch()
    ended = rebind("train", "--data", corpus(tmp_path), "--out", str(tmp_path / place), *FAST, code=2)
    assert ended.err == f"error: {tmp_path / 'file'} is a file, expected a folder: choose another folder\n"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": "weights"},
        {"config.json": '{"format": "rebind-eval-1", "data": {}, "model": {}, "method": "memit"}'},
        {"config.json": "no JSON"},
        {"config.json": "[1]"},
        {"thesis.tex": "years"},
        {"checkpoints/step-5/weights.pt": "another program's"},
    ],
)
def test_a_folder_of_something_else_stays_as_it_is(rebind, tmp_path, files):
    for name, text in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    ended = rebind("train", "--data", corpus(tmp_path), "--out", str(tmp_path / "run"), *FAST, code=2)
    assert ended.err == f"error: {tmp_path / 'run'} is there already and holds no training run: name another --out\n"
    there = {path.relative_to(tmp_path / "run").as_posix(): path for path in (tmp_path / "run").rglob("*")}
    assert {name: path.read_text() for name, path in there.items() if path.is_file()} == files
    assert not (tmp_path / "cache").exists(), "no work was done"
