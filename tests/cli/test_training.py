"""`rebind train` and `rebind generate`: where they write, and what they print and suggest."""

from __future__ import annotations

import shlex
import time

import pytest
import torch

from rebind.nn.training.step import TrainingStep
from rebind.storage import cache_dir
from tests.nn.training_runs import TINY, corpus

SMALL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
SIZES = ["--length", "16", "--batch-size", "4", "--steps", "2", "--evaluate-tokens", "50"]
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


def test_an_interrupted_run_resumes(rebind, tmp_path, monkeypatch):
    words = ("train", "--data", corpus(tmp_path), "--out", tmp_path / "run", *FAST, "--steps", "6", "--save-every", "3")
    taken, take_step = [], TrainingStep.run

    def interrupted(self, *arguments):
        taken.append(arguments)
        if len(taken) == 5:
            raise KeyboardInterrupt
        return take_step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "run", interrupted)
    rebind(*words, code=130)
    document = rebind(*words, json=True).document
    assert (document["resumed_from"], len(taken)) == (3, 5 + 3)
    assert set(document["summary"]["validation"]) == {"sliding", "carried"}
    assert rebind(*words, json=True).document["resumed_from"] == 6
    assert rebind(*words, "-q").out.strip() == str(tmp_path / "run")
    assert len(list((cache_dir() / "tokens").glob("tokens-*"))) == 1  # for all runs on this text


def test_each_prompt_is_continued_by_itself(rebind, tmp_path):
    run = tmp_path / "run"
    rebind("train", "--data", corpus(tmp_path), "--out", run, *FAST)
    both = rebind("generate", run, "the ", "", "--tokens", "9", json=True).document["answers"]
    assert rebind("generate", run, "", "--tokens", "9", json=True).document["answers"] == both[1:]
    greedy = [rebind("generate", run, "the cat", "--greedy", "--seed", seed, json=True).document for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    asked = rebind("ask", "the cat", "-m", run, "--tokens", "100", json=True).document
    assert asked["answers"][0]["base"]["says"] == greedy[0]["answers"][0]["text"]


@pytest.mark.parametrize(
    ("words", "exit_code", "code"),
    [
        (["--layers", "dleta"], 2, "unknown_layer_kind"),
        (["--layers", "delta,delta,attention"], 2, "pattern_does_not_fit"),
        (["--set", "foo=1"], 2, "unknown_model_field"),
        (["--set", "dropout"], 2, "invalid_field"),
        (["--steps", "0"], 2, "invalid_size"),
        (["--data", "nowhere.txt"], 2, "unreadable_text"),
        (["--length", "100000"], 2, "text_too_short"),
        (["--carry", "--layers", "attention"], 2, "growing_state"),
        (["--device", "abacus"], 2, "unusable_device"),
        (["--learning-rate", "1e30", "--clip-norm", "1e30", "--warmup", "0", "--steps", "9"], 3, "loss_not_finite"),
    ],
)
def test_errors(fails, tmp_path, words, exit_code, code):
    error = fails("train", "--data", corpus(tmp_path), "--out", tmp_path / "run", *FAST, *words, code=exit_code)
    assert error.code == code
    assert (tmp_path / "run").exists() == (exit_code == 3), "what is refused leaves no folder"


def test_out_of_memory(fails, tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainingStep, "run", fail)
    error = fails("train", "--data", corpus(tmp_path), "--out", tmp_path / "run", *FAST, code=3)
    assert "batch" in error.err
    assert "edit" not in error.err


def test_generate_needs_a_run(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    fails("generate", tmp_path / "empty", "the")
    fails("generate", tmp_path / "nowhere", "the")


@pytest.mark.parametrize(("place", "exit_code"), [("file", 2), ("file/run", 3)])
def test_a_file_in_the_place_of_a_run(fails, tmp_path, place, exit_code):
    (tmp_path / "file").touch()
    fails("train", "--data", corpus(tmp_path), "--out", tmp_path / place, *FAST, code=exit_code)


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
