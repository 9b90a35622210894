"""The benchmarks of language models at tiny sizes: complete rows, and what they claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decoding, language, training
from rebind.nn import RebindForCausalLM, preset
from tests.nn.training_runs import text

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture
def small(monkeypatch):
    """Replace the presets by tiny ones."""

    def build(name, kind=None, **changes):
        return preset("modern-10m", kind, **{**TINY, **changes})

    monkeypatch.setattr(training, "preset", build)
    monkeypatch.setattr(decoding, "preset", build)


# Quality


def language_arguments(folder: Path) -> list[str]:
    (folder / "train.txt").write_text(text(900))
    (folder / "valid.txt").write_text(text(900, seed=1))
    sizes = {
        "length": 8,
        "batch": 4,
        "steps": 3,
        "warmup": 1,
        "hidden": 16,
        "heads": 2,
        "layers": 2,
        "intermediate": 32,
    }
    limits = {"vocabulary": 300, "seeds": 1, "valid-tokens": 512, "device": "cpu"}
    files = ["--data", str(folder / "train.txt"), "--valid", str(folder / "valid.txt"), "--out", str(folder / "o.json")]
    files += ["--work", str(folder / "work")]
    return [*files, *(word for name, value in {**sizes, **limits}.items() for word in (f"--{name}", str(value)))]


class SameProcess:
    """Runs a worker in this process, in place of a new one."""

    def __init__(self, command, stdout, stderr, env):
        assert command[1:3] == ["-m", "benchmarks.language"]
        self.returncode = 0
        try:
            language.main(command[3:])
        except Exception as problem:
            stdout.write(str(problem).encode())
            self.returncode = 1

    def poll(self):
        return self.returncode


def test_quality_of_two_kinds_which_are_not_measured_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language.subprocess, "Popen", SameProcess)
    arguments = [*language_arguments(tmp_path), "--kinds", "linear-sum", "attention", "--jobs", "2"]
    assert language.main(arguments) == 0
    assert "linear-sum, seed 0" in capsys.readouterr().out
    rows = {row["kind"]: row for row in json.loads((tmp_path / "o.json").read_text())["rows"]}
    assert set(rows) == {"linear-sum", "attention"}
    assert rows["attention"]["carried"] is None
    assert rows["linear-sum"]["state"] == 2 * 2 * 8 * 8
    for row in rows.values():
        assert 1 < row["perplexity"] < 400
        assert row["perplexity"] == row["by_length"]["1"]
        assert len(row["by_position"]) == 16
    assert max(row["parameters"] for row in rows.values()) < 1.02 * min(row["parameters"] for row in rows.values())

    monkeypatch.setattr(language, "run", lambda options, kind, seed, corpus: 1 / 0)
    assert language.main(arguments) == 0  # nothing is measured twice
    assert language.main([*arguments, "--rate", "1"]) == 1  # another run altogether
    assert "failed: attention: division by zero" in capsys.readouterr().err


def test_another_command_leaves_earlier_runs_alone(tmp_path, monkeypatch, capsys):
    """Other kinds with the same mark stay in --out; another mark has files of its own."""
    monkeypatch.setattr(language.subprocess, "Popen", SameProcess)
    arguments = language_arguments(tmp_path)
    assert language.main([*arguments, "--kinds", "attention"]) == 0
    assert language.main([*arguments, "--kinds", "linear-sum"]) == 0
    assert "attention" not in capsys.readouterr().out.partition("linear-sum, seed 0")[2], "it was not requested"
    assert {row["kind"] for row in json.loads((tmp_path / "o.json").read_text())["rows"]} == {"attention", "linear-sum"}
    assert language.main([*arguments, "--kinds", "linear-sum"]) == 0, "nothing to do"
    assert len(json.loads((tmp_path / "o.json").read_text())["rows"]) == 2

    faster = [*arguments, "--kinds", "attention", "--rate", "0.1"]
    assert language.main(faster) == 0
    for command in (arguments, faster):
        name = f"attention-0-{language.mark_of(language.parse(command))}"
        assert (tmp_path / "work" / f"{name}.json").is_file()
        assert (tmp_path / "work" / name / "checkpoints").is_dir()
    monkeypatch.setattr(language, "run", lambda options, kind, seed, corpus: 1 / 0)
    assert language.main([*arguments, "--kinds", "attention"]) == 0, "it is still there"


def test_seconds_are_those_of_the_steps_even_of_an_earlier_run(tmp_path):
    options = language.parse(language_arguments(tmp_path))
    corpus = language.prepare_corpus(options)
    first = language.run(options, "linear-sum", 0, corpus)
    (times,) = (tmp_path / "work").glob("linear-sum-0-*/times.jsonl")
    seconds = sum(json.loads(line)["seconds"] for line in times.read_text().splitlines())
    again = language.run(options, "linear-sum", 0, corpus)  # trained already
    assert first.seconds == again.seconds == seconds > 0


def test_the_mark_depends_on_the_precision_and_not_on_the_device(tmp_path):
    def mark(*more: str) -> str:
        return language.mark_of(language.parse([*language_arguments(tmp_path), *more]))

    assert mark() == mark("--precision", "float32") == mark("--device", "mps")
    assert mark("--device", "cuda") == mark("--device", "cuda:1") == mark("--precision", "bfloat16")
    assert mark("--device", "cuda") != mark()


@pytest.mark.parametrize("more", [["--length", "512"], ["--valid-tokens", "127"]])
def test_too_little_text_is_reported_before_training(tmp_path, monkeypatch, more):
    monkeypatch.setattr(language, "run_processes", lambda options, arguments: 1 / 0)
    with pytest.raises(SystemExit):
        language.main([*language_arguments(tmp_path), "--valid-tokens", "100000", *more])


def test_unknown_kinds_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        language.parse([*language_arguments(tmp_path), "--kinds", "dleta"])
    assert "invalid choice: 'dleta'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", language.KINDS)
def test_all_kinds_have_attentions_parameters(tmp_path, kind):
    options = language.parse([*language_arguments(tmp_path), "--hidden", "128", "--intermediate", "512"])
    expected = language.count_parameters(options, "attention", 512, 4_000)
    count = language.count_parameters(options, kind, language.matching_width(options, kind, 4_000), 4_000)
    assert count == pytest.approx(expected, rel=0.005)


def test_carrying_over_one_window_is_that_window(tmp_path):
    options = language.parse(language_arguments(tmp_path))
    corpus = language.prepare_corpus(options)
    options.valid_tokens = 16 * options.length
    torch.manual_seed(0)
    model = RebindForCausalLM(preset("modern-10m", "delta", **TINY, vocab_size=len(corpus.tokenizer)))
    measurements = language.measure(options, model, corpus)
    assert measurements["carried"] == pytest.approx(measurements["by_length"]["16"], rel=1e-5)


def test_attention_is_left_out_if_memories_are_carried(tmp_path):
    assert "attention" in language.parse(language_arguments(tmp_path)).kinds
    assert "attention" not in language.parse([*language_arguments(tmp_path), "--carry"]).kinds


# Speed of training


def test_training_rows(tmp_path, small, capsys):
    out = tmp_path / "training.json"
    arguments = ["--device", "cpu", "--lengths", "32", "--tokens", "64", "--vocabulary", "50", "--out", str(out)]
    training.main([*arguments, "--kinds", "gated_delta", "--peers", "gpt2", "transformers", "fla-delta"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows][:2] == ["ours, gated_delta", "transformers, GPT-2"]
    for row in rows[:3]:
        assert row["problem"] is None
        assert row["batch"] == 2
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["milliseconds"])
    if rows[3]["problem"] is not None:  # no fla, or none that runs here
        assert "failed" in capsys.readouterr().out


def test_the_scan_of_transformers_is_the_same_function():
    torch.manual_seed(0)
    model = RebindForCausalLM(preset("modern-10m", "gated_delta", **TINY, vocab_size=50))
    ids = torch.randint(50, (2, 70))
    ours = model(ids).logits
    with training.peer("transformers").context():
        theirs = model(ids).logits
    assert not torch.equal(theirs, ours)  # it is other code
    torch.testing.assert_close(theirs, ours, rtol=0.0, atol=1e-5)


# Speed of decoding


def test_decoding_rows(tmp_path, small):
    out = tmp_path / "decoding.json"
    arguments = ["--device", "cpu", "--contexts", "8", "32", "--batch", "1", "3", "--steps", "2", "--vocabulary", "50"]
    decoding.main([*arguments, "--kinds", "delta", "attention", "--peers", "llama", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["problem"] for row in rows] == [None] * 12
    sizes = {(row["name"], row["context"], row["batch"]): row["cache_mib"] for row in rows}
    assert sizes["delta", 8, 3] == sizes["delta", 32, 3] == 3 * sizes["delta", 8, 1]
    assert sizes["attention", 32, 1] == pytest.approx(4 * sizes["attention", 8, 1], rel=0.02)
    assert sizes["llama", 32, 3] == 12 * sizes["llama", 8, 1]
