"""`rebind train` and `rebind generate`, as they are called."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.nn.training import loop
from tests.nn.training_runs import TINY, corpus

SMALL = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
SIZES = ["--length", "16", "--batch", "4", "--steps", "6", "--save-every", "3", "--evaluate-tokens", "50"]
FAST = ["--tokenizer", "characters", *SIZES]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "cache"))
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def rebind(*words: str, code: int = 0):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == code, f"{result.exit_code}: {result.stdout}\n{result.stderr}\n{result.exception!r}"
    return result


def train(tmp_path, *words: str, code: int = 0):
    layers = [] if "--layers" in words else ["--layers", "delta"]
    given = [*FAST, *SMALL, *layers, *words]
    return rebind("train", "--data", corpus(tmp_path), "--out", str(tmp_path / "run"), *given, code=code)


def test_train_and_generate(tmp_path):
    told = json.loads(train(tmp_path, "--json").stdout)
    assert told["summary"]["steps"] == 6
    assert told["summary"]["layers"] == ["delta", "delta"]
    assert set(told["summary"]["validation"]) == {"sliding", "carried"}
    assert len(list((tmp_path / "cache/tokens").glob("tokens-*"))) == 1  # for all runs on this text
    run = str(tmp_path / "run")
    said = json.loads(rebind("generate", run, "the ", "a ", "--tokens", "9", "--json").stdout)
    assert said["checkpoint"] == told["checkpoint"]
    assert [answer["prompt"] for answer in said["answers"]] == ["the ", "a "]
    alone = json.loads(rebind("generate", run, "a ", "--tokens", "9", "--json").stdout)
    assert alone["answers"] == said["answers"][1:]  # the seed is each prompt's own
    greedy = [rebind("generate", run, "the ", "--greedy", "--seed", seed, "-q").stdout for seed in "12"]
    assert greedy[0] == greedy[1]


def test_it_says_what_came_of_it_and_goes_on(tmp_path, monkeypatch):
    real, calls = loop.Run._step, []

    def stopped(self, step):
        calls.append(step)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, step)

    monkeypatch.setattr(loop.Run, "_step", stopped)
    assert "run the same command again to go on" in train(tmp_path, code=130).stderr
    out = train(tmp_path).stdout
    assert calls == [0, 1, 2, 3, 4, 3, 4, 5]  # on from the checkpoint after three steps
    assert "perplexity" in out
    assert "rebind generate" in out
    assert "already finished" not in out
    assert train(tmp_path).stdout.startswith("already finished: ")
    assert json.loads(train(tmp_path, "--json").stdout)["began"] == 6
    assert train(tmp_path, "-q").stdout.strip() == str(tmp_path / "run")
    assert train(tmp_path, "--evaluate-every", "2", "--save-every", "1").stdout.startswith("already finished: ")
    err = train(tmp_path, "--steps", "8", code=2).stderr
    assert "has a finished run of another config (steps is 8, was 6), and steps decides the rate of every step" in err


def test_kinds_may_have_underscores(tmp_path):
    assert (
        json.loads(train(tmp_path, "--layers", "gated_delta", "--json").stdout)["summary"]["layers"]
        == ["gated_delta"] * 2
    )


def test_fields_that_are_named_are_ours(tmp_path):
    err = train(tmp_path, "--set", "foo=1", code=2).stderr
    assert "hidden_size" in err
    assert not any(name in err for name in ("id2label", "return_dict", "chunk_size_feed_forward"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--layers", "dleta"], 2, "did you mean 'delta'"),
        (["--layers", "delta,delta,attention"], 2, "names 3 layers"),
        (["--layers", "sum"], 2, "'sum' is a rule and no kind of layer, expected a kind that is built on it: choose"),
        (["--layers", "delta,sum"], 2, "performer-sum, dpfp-sum"),
        (["--layers", "linear"], 2, "unknown layer kind 'linear'"),
        (["--layers", "delta", "--set", "layer_kinds=attention"], 2, "expected one of them: leave layer_kinds out"),
        (["--set", "foo=1"], 2, "expected one of bos_token_id, conv_size, dpfp_nu"),
        (["--set", "dropout"], 2, "expected field=value"),
        (["--set", "dropuot=0.1"], 2, "did you mean 'dropout'"),
        (["--steps", "0"], 2, "steps is 0"),
        (["--data", "nowhere.txt"], 2, "nowhere.txt cannot be read"),
        (["--device", "abacus"], 2, "device 'abacus' cannot be used here"),
        (["--set", "dropout=much"], 2, "dropout is 'much'"),
        (["--rate", "1e30", "--clip", "1e30", "--warmup", "0"], 3, "expected finite numbers"),
    ],
)
def test_errors_are_one_line(tmp_path, words, code, says):
    err = train(tmp_path, *words, code=code).stderr.strip()
    assert err.startswith("error: ")
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["--data", "nowhere.txt"], ["--length", "100000"], ["--carry", "--layers", "attention"]]
)
def test_what_is_refused_leaves_no_folder(tmp_path, words):
    train(tmp_path, *words, code=2)
    assert not (tmp_path / "run").exists()


def test_a_folder_of_yours_stays(tmp_path):
    (tmp_path / "run").mkdir()
    train(tmp_path, "--data", "nowhere.txt", code=2)
    assert (tmp_path / "run").is_dir()


def test_tensorboard_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install 'rebind[tensorboard]'" in train(tmp_path, "--tensorboard", code=2).stderr


def test_one_process_trains_with_sharded_too(tmp_path):
    assert json.loads(train(tmp_path, "--sharded", "--json").stdout)["summary"]["steps"] == 6
    assert "start several with torchrun" in train(tmp_path, "--sharded").stdout


def test_out_of_memory_speaks_of_this_command(tmp_path, monkeypatch):
    def full(self, step):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop.Run, "_step", full)
    err = train(tmp_path, code=3).stderr
    assert "a smaller batch" in err
    assert "edit" not in err


def test_generate_wants_a_run(tmp_path):
    assert "has no checkpoint" in rebind("generate", str(tmp_path), "the", code=2).stderr
    assert "nowhere is not a folder" in rebind("generate", str(tmp_path / "nowhere"), "the", code=2).stderr


def test_generate_sends_other_models_to_ask(tmp_path):
    folder = tmp_path / "llama"
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=9, **shape)).save_pretrained(folder)
    err = rebind("generate", str(folder), "the", code=2).stderr
    assert f"{folder} holds a model of type 'llama', expected one that `rebind train` made" in err
    assert f"`rebind ask -m {folder}`" in err
    assert len(err.strip().splitlines()) == 1


def test_ask_takes_a_run(tmp_path):
    train(tmp_path)
    run = str(tmp_path / "run")
    asked = json.loads(rebind("ask", "the cat", "-m", run, "--tokens", "9", "--json").stdout)
    said = json.loads(rebind("generate", run, "the cat", "--greedy", "--tokens", "9", "--json").stdout)
    assert asked["model"] == "run"
    assert asked["answers"][0]["base"]["says"] == said["answers"][0]["text"]
