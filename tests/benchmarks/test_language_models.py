"""The benchmarks of language models, at sizes that take seconds: rows that are complete, and what they claim."""

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
    """Presets of a size that is made in no time."""

    def made(name, kind=None, **changes):
        return preset("modern-10m", kind, **{**TINY, **changes})

    monkeypatch.setattr(training, "preset", made)
    monkeypatch.setattr(decoding, "preset", made)


# Quality


def language_words(folder: Path) -> list[str]:
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


class Here:
    """A worker's process, without one: a test has no time to start it."""

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


def test_quality_of_two_kinds_and_on_from_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(language.subprocess, "Popen", Here)
    words = [*language_words(tmp_path), "--kinds", "linear-sum", "attention", "--jobs", "2"]
    assert language.main(words) == 0
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
    assert language.main(words) == 0  # nothing is measured twice
    assert language.main([*words, "--rate", "1"]) == 1  # another run altogether
    assert "failed: attention: division by zero" in capsys.readouterr().err


def test_another_command_leaves_earlier_runs_alone(tmp_path, monkeypatch, capsys):
    """Other kinds of the same mark stay in --out; another mark has files of its own, and trains beside them."""
    monkeypatch.setattr(language.subprocess, "Popen", Here)
    words = language_words(tmp_path)
    assert language.main([*words, "--kinds", "attention"]) == 0
    assert language.main([*words, "--kinds", "linear-sum"]) == 0
    assert "attention" not in capsys.readouterr().out.partition("linear-sum, seed 0")[2], "it was not asked for"
    assert {row["kind"] for row in json.loads((tmp_path / "o.json").read_text())["rows"]} == {"attention", "linear-sum"}
    assert language.main([*words, "--kinds", "linear-sum"]) == 0, "nothing to do"
    assert len(json.loads((tmp_path / "o.json").read_text())["rows"]) == 2

    faster = [*words, "--kinds", "attention", "--rate", "0.1"]
    assert language.main(faster) == 0
    for command in (words, faster):
        name = f"attention-0-{language.mark(language.parse(command))}"
        assert (tmp_path / "work" / f"{name}.json").is_file()
        assert (tmp_path / "work" / name / "checkpoints").is_dir()
    monkeypatch.setattr(language, "run", lambda options, kind, seed, corpus: 1 / 0)
    assert language.main([*words, "--kinds", "attention"]) == 0, "it is still there"


def test_seconds_are_those_of_the_steps_whenever_they_were_made(tmp_path):
    options = language.parse(language_words(tmp_path))
    corpus = language.ready(options)
    first = language.run(options, "linear-sum", 0, corpus)
    (times,) = (tmp_path / "work").glob("linear-sum-0-*/times.jsonl")
    spent = sum(json.loads(line)["seconds"] for line in times.read_text().splitlines())
    again = language.run(options, "linear-sum", 0, corpus)  # trained already
    assert first.seconds == again.seconds == spent > 0


def test_the_mark_knows_the_precision_and_not_the_device(tmp_path):
    def told(*more: str) -> str:
        return language.mark(language.parse([*language_words(tmp_path), *more]))

    assert told() == told("--precision", "float32") == told("--device", "mps")
    assert told("--device", "cuda") == told("--device", "cuda:1") == told("--precision", "bfloat16")
    assert told("--device", "cuda") != told()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--length", "512"], r"valid.txt has \d+ tokens, expected more than 8192"),
        (["--valid-tokens", "127"], "--valid-tokens is 127, expected 128 or more"),
    ],
)
def test_too_little_text_is_said_before_training(tmp_path, monkeypatch, more, says):
    monkeypatch.setattr(language, "share", lambda options, words: 1 / 0)
    with pytest.raises(SystemExit, match=says):
        language.main([*language_words(tmp_path), "--valid-tokens", "100000", *more])


def test_kinds_that_nobody_knows(tmp_path, capsys):
    with pytest.raises(SystemExit):
        language.parse([*language_words(tmp_path), "--kinds", "dleta"])
    assert "invalid choice: 'dleta'" in capsys.readouterr().err


@pytest.mark.parametrize("kind", language.KINDS)
def test_all_kinds_have_attentions_parameters(tmp_path, kind):
    options = language.parse([*language_words(tmp_path), "--hidden", "128", "--intermediate", "512"])
    wanted = language.parameters_of(options, "attention", 512, 4_000)
    mine = language.parameters_of(options, kind, language.matched(options, kind, 4_000), 4_000)
    assert mine == pytest.approx(wanted, rel=0.005)


def test_what_is_read_is_read_in_every_way(tmp_path):
    """With as many tokens as the longest window, carrying is that window."""
    options = language.parse(language_words(tmp_path))
    corpus = language.ready(options)
    options.valid_tokens = 16 * options.length
    torch.manual_seed(0)
    model = RebindForCausalLM(preset("modern-10m", "delta", **TINY, vocab_size=len(corpus.tokenizer)))
    told = language.measure(options, model, corpus)
    assert told["carried"] == pytest.approx(told["by_length"]["16"], rel=1e-5)


def test_attention_is_left_out_where_memories_are_carried(tmp_path):
    assert "attention" in language.parse(language_words(tmp_path)).kinds
    assert "attention" not in language.parse([*language_words(tmp_path), "--carry"]).kinds


# Speed of training


def test_training_rows(tmp_path, small, capsys):
    out = tmp_path / "training.json"
    words = ["--device", "cpu", "--lengths", "32", "--tokens", "64", "--vocabulary", "50", "--out", str(out)]
    training.main([*words, "--kinds", "gated-delta", "--peers", "gpt2", "transformers", "fla-delta"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows][:2] == ["ours, gated-delta", "transformers, GPT-2"]
    for row in rows[:3]:
        assert row["problem"] is None
        assert row["batch"] == 2
        assert row["tokens_a_second"] == pytest.approx(64e3 / row["milliseconds"])
    if rows[3]["problem"] is not None:  # no fla, or none that runs here
        assert "failed" in capsys.readouterr().out


def test_the_fallback_is_the_same_function():
    torch.manual_seed(0)
    model = RebindForCausalLM(preset("modern-10m", "gated-delta", **TINY, vocab_size=50))
    ids = torch.randint(50, (2, 70))
    ours = model(ids).logits
    with training.peer("transformers").during():
        theirs = model(ids).logits
    assert not torch.equal(theirs, ours)  # another code it is
    torch.testing.assert_close(theirs, ours, rtol=0.0, atol=1e-5)


# Speed of decoding


def test_decoding_rows(tmp_path, small):
    out = tmp_path / "decoding.json"
    words = ["--device", "cpu", "--contexts", "8", "32", "--batch", "1", "3", "--steps", "2", "--vocabulary", "50"]
    decoding.main([*words, "--kinds", "delta", "attention", "--peers", "llama", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["problem"] for row in rows] == [None] * 12
    held = {(row["name"], row["context"], row["batch"]): row["cache_mib"] for row in rows}
    assert held["delta", 8, 3] == held["delta", 32, 3] == 3 * held["delta", 8, 1]
    assert held["attention", 32, 1] == pytest.approx(4 * held["attention", 8, 1], rel=0.02)
    assert held["llama", 32, 3] == 12 * held["llama", 8, 1]
