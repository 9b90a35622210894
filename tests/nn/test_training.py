"""Runs: interrupted anywhere they give the same bytes, they learn, and errors say what is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebind.errors import InputError, NumericalError, StorageError, UnknownNameError
from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig, TrainingProgress, checkpoint, outputs, train
from rebind.nn.training.step import TrainingStep
from rebind.storage import JsonLines
from tests.nn.training_runs import TINY, Killed, config, corpus, kill, losses, outcome, saved_steps, text
from tests.support import raises

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {
    "shuffled": {},
    "carried": {"carry": True, "accumulate": 2},
    "hybrid": {"layers": ("performer-delta", "attention")},
    "ttt": {"layers": "ttt-linear", "carry": True, "model": {**TINY, "ttt_mini_batch": 5}},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Train each variant once, when a test first needs it; return its config and its files."""
    runs = {}

    def run(variant: str):
        if variant not in runs:
            folder = tmp_path_factory.mktemp(variant)
            settings = config(corpus(folder), **VARIANTS[variant], log_every=7)
            train(settings, folder / "run")
            runs[variant] = (replace(settings, log_every=1), outcome(folder / "run"))
        return runs[variant]

    return run


# Interrupted and resumed


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_anywhere_it_resumes_bit_for_bit(uninterrupted, tmp_path, variant):
    run, expected = uninterrupted(variant)
    for step in (2, 5, 7, 11):  # checkpoints are written after steps 5 and 10
        kill(run, tmp_path / "run", step)
    torch.manual_seed(123)  # the caller's generator plays no part
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize("phase", ["evaluating", "saving"])
def test_killed_between_steps(uninterrupted, tmp_path, phase):
    run, expected = uninterrupted("carried")

    def stop(name: str) -> None:
        if name == phase:
            raise Killed

    with pytest.raises(Killed):
        train(run, tmp_path / "run", progress=TrainingProgress(phase=stop))
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize(
    ("problem", "raised"), [(Killed(), Killed), (OSError(28, "No space left on device"), StorageError)]
)
def test_stopped_while_a_checkpoint_is_written(uninterrupted, tmp_path, monkeypatch, problem, raised):
    run, expected = uninterrupted("shuffled")
    kill(run, tmp_path / "run", 8)  # there is one checkpoint

    def stop(*_, **__):
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", stop)
        with pytest.raises(raised):
            train(run, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == ["step-00000005"]
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_killed_by_the_system(uninterrupted, tmp_path):
    run, expected = uninterrupted("shuffled")
    folder = tmp_path / "run"
    code = (
        "import sys, time, torch; torch.set_num_threads(1)\n"
        "from tests.nn.training_runs import config; from rebind.nn.training import train, TrainingProgress\n"
        "train(config(sys.argv[1]), sys.argv[2], progress=TrainingProgress(step=lambda update: time.sleep(0.05)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, run.data.source, str(folder)], cwd=ROOT)
    end = time.monotonic() + 60
    try:
        while not (folder / "log.jsonl").exists() or (folder / "log.jsonl").stat().st_size < 500:
            assert time.monotonic() < end, "the log did not grow"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / "result.json").exists()
    train(run, folder)
    assert outcome(folder) == expected


def test_a_finished_run_stays_as_it_is(uninterrupted, tmp_path):
    run, _ = uninterrupted("shuffled")
    result = train(run, tmp_path / "run")
    before = outcome(tmp_path / "run")
    again = train(run, tmp_path / "run", progress=TrainingProgress(step=lambda update: pytest.fail("it trained")))
    assert again == result
    assert (result.resumed_from, again.resumed_from) == (0, 12)
    assert outcome(tmp_path / "run") == before


def test_old_checkpoints_and_leftovers_are_removed(tmp_path):
    run = config(corpus(tmp_path), save_every=3, keep_checkpoints=2)
    kill(run, tmp_path / "run", 4)
    leftover = tmp_path / "run/checkpoints/.rebind-0123456789ab.tmp"
    leftover.mkdir()
    train(run, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == ["step-00000009", "step-00000012"]
    suffixes = {file.suffix for file in (tmp_path / "run/checkpoints").rglob("*.*") if file.is_file()}
    assert suffixes == {".json", ".py", ".safetensors"}, "there may be no pickle"


def test_when_to_evaluate_and_save_may_change(uninterrupted, tmp_path):
    run, expected = uninterrupted("carried")
    kill(run, tmp_path / "run", 6)
    train(replace(run, evaluate_every=1, save_every=3, log_every=4), tmp_path / "run")
    after = outcome(tmp_path / "run")
    same = [name for name in expected if name.endswith(".safetensors")] + ["result.json"]
    assert len(same) >= 4
    assert {name: after[name] for name in same} == {name: expected[name] for name in same}


# Learning


@pytest.mark.parametrize("changes", [{}, {"carry": True}, {"precision": "bfloat16"}], ids=["", "carried", "bfloat16"])
def test_the_loss_goes_down(tmp_path, changes):
    source = corpus(tmp_path, "abcdefgh" * 300)
    model = {**TINY, "dropout": 0.0}
    result = train(config(source, steps=40, evaluate_every=40, save_every=40, model=model, **changes), tmp_path / "run")
    assert losses(tmp_path / "run")[0] > 2.0  # log 9: nine tokens, equally likely
    assert result.summary["loss"] < 0.3
    assert result.summary["validation"]["sliding"]["perplexity"] < 2.0
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")


def test_pieces_of_a_batch_add_up_to_it(tmp_path):
    """For eight steps: rounding errors grow tenfold every two steps."""
    source, model = corpus(tmp_path), {**TINY, "dropout": 0.0}
    whole, *split = [
        losses(train(config(source, model=model, accumulate=n), tmp_path / f"{n}").folder) for n in (1, 2, 4)
    ]
    for one in split:
        torch.testing.assert_close(one[:8], whole[:8], rtol=1e-5, atol=0.0)


def test_transformers_reads_the_checkpoint(tmp_path):
    result = train(config(corpus(tmp_path), layers=("performer-delta", "attention")), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(result.checkpoint)
    ids = torch.tensor([tokenizer("the cat", add_special_tokens=False)["input_ids"]])
    assert tokenizer.decode(ids[0]) == "the cat"
    assert model(ids, labels=ids).loss < 2 * result.summary["loss"]
    assert model.config.architectures == ["RebindForCausalLM"]


def test_the_curve_is_titled_with_the_model_itself(tmp_path, monkeypatch):
    titles, draw = [], outputs.draw_curve
    monkeypatch.setattr(outputs, "draw_curve", lambda rows, title: titles.append(title) or draw(rows, title))
    result = train(config(corpus(tmp_path), layers=("delta", "attention")), tmp_path / "run")
    assert titles == [f"1 × delta, 1 × attention; {result.summary['parameters']:,} parameters"]


def test_the_model_can_be_compiled_and_one_process_shards_nothing(uninterrupted, tmp_path, monkeypatch):
    run, expected = uninterrupted("shuffled")
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    train(replace(run, compile=True, sharded=True), tmp_path / "run")
    assert len(compiled) == 1
    assert outcome(tmp_path / "run") == expected


# TensorBoard


class Writer:
    """The part of SummaryWriter that training uses."""

    created: ClassVar[list[Writer]] = []

    def __init__(self, log_dir, purge_step):
        self.log_dir, self.purge_step, self.scalars, self.is_closed = log_dir, purge_step, [], False
        Writer.created.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, step, value))

    def close(self):
        self.is_closed = True


def test_the_log_goes_to_tensorboard_too(uninterrupted, tmp_path, monkeypatch):
    run, expected = uninterrupted("shuffled")
    Writer.created.clear()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    run = replace(run, tensorboard=True)
    kill(run, tmp_path / "run", 7)
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected
    before, after = Writer.created
    assert before.is_closed
    assert after.is_closed
    assert (before.log_dir, before.purge_step, after.purge_step) == (str(tmp_path / "run/tensorboard"), 1, 6)
    logged = [(row["step"], row["loss"]) for row in JsonLines(tmp_path / "run/log.jsonl").read() if "loss" in row]
    shown = [(step, value) for tag, step, value in before.scalars if tag == "loss" and step < 6]
    assert shown + [(step, value) for tag, step, value in after.scalars if tag == "loss"] == logged
    tags = {tag for tag, _, _ in after.scalars}
    assert tags == {"loss", "validation", "norm", "learning_rate", "seconds", "tokens_per_second"}


def test_without_tensorboard_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with raises(InputError, "tensorboard_not_installed"):
        train(config(corpus(tmp_path), tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Errors


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint(uninterrupted, tmp_path, monkeypatch):
    run, expected = uninterrupted("shuffled")
    taken, right = [], TrainingStep.run

    def wrong(self, *arguments):
        loss, norm = right(self, *arguments)
        taken.append(loss)
        return loss * (float("nan") if len(taken) == 8 else 1.0), norm

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "run", wrong)
        with pytest.raises(NumericalError) as caught:
            train(replace(run, log_every=100), tmp_path / "run")
    assert caught.value.code == "loss_not_finite"
    assert "step 8" in caught.value.problem
    assert "step-00000005" in caught.value.problem
    assert saved_steps(tmp_path / "run") == ["step-00000005"]
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize("log_every", [1, 100])  # the loss is read at once, or a layer refuses its input before that
def test_a_learning_rate_that_is_too_high(tmp_path, log_every):
    optimizer = OptimizerConfig(learning_rate=1e30, warmup=0, clip_norm=1e30)
    with raises(NumericalError, "loss_not_finite"):
        train(config(corpus(tmp_path), optimizer=optimizer, log_every=log_every), tmp_path / "run")
    train(config(corpus(tmp_path)), tmp_path / "run")  # without a checkpoint, other settings may replace these


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"preset": "modern-10b"}, UnknownNameError, "unknown_preset"),
        ({"layers": "dleta"}, UnknownNameError, "unknown_layer_kind"),
        ({"model": {"hiden_size": 8}}, UnknownNameError, "unknown_model_field"),
        ({"model": {**TINY, "layer_kinds": "delta"}}, InputError, "invalid_layers"),
        ({"model": {**TINY, "num_attention_heads": 3}}, InputError, "indivisible_heads"),
        ({"model": {**TINY, "vocab_size": 4}}, InputError, "vocabulary_too_small"),
        ({"steps": 0}, InputError, "invalid_size"),
        ({"batch_size": 2.5}, InputError, "invalid_size"),
        ({"keep_checkpoints": True}, InputError, "invalid_size"),
        ({"evaluate_tokens": 1}, InputError, "invalid_evaluate_tokens"),
        ({"seed": 2**32}, InputError, "invalid_seed"),
        ({"batch_size": 6, "accumulate": 4}, InputError, "indivisible_batch"),
        ({"precision": "int8"}, UnknownNameError, "unknown_precision"),
        ({"layers": "attention", "carry": True}, InputError, "growing_state"),
        ({"device": "cuda:77"}, InputError, "unusable_device"),
        ({"length": 100_000}, InputError, "text_too_short"),
        ({"carry": True, "batch_size": 4_000}, InputError, "text_too_short"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, changes, error, code):
    with raises(error, code):
        train(config(corpus(tmp_path), **changes), tmp_path / "run", cache=tmp_path / "cache")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (OptimizerConfig, "learning_rate", 0.0),
        (OptimizerConfig, "learning_rate", float("nan")),
        (OptimizerConfig, "beta2", 1.5),
        (OptimizerConfig, "warmup", -1),
        (lambda **changes: DataConfig("x", **changes), "vocabulary", 100),
        (lambda **changes: DataConfig("x", **changes), "vocabulary", 2**31),
        (lambda **changes: DataConfig("x", **changes), "validation_fraction", 1.0),
        (lambda **changes: TrainConfig(DataConfig("x"), **changes), "seed", -1),
    ],
)
def test_invalid_numbers(settings, name, value):
    with raises(InputError, f"invalid_{name}"):
        settings(**{name: value})


def test_other_settings_do_not_resume_a_run(tmp_path):
    run = config(corpus(tmp_path))
    kill(run, tmp_path / "run", 6)
    for changes in ({"optimizer": replace(run.optimizer, learning_rate=0.5)}, {"layers": "gated_delta"}, {"steps": 20}):
        with raises(InputError, "run_folder_differs"):
            train(replace(run, **changes), tmp_path / "run")
    assert train(replace(run, keep_checkpoints=5, log_every=3), tmp_path / "run").resumed_from == 5


def test_another_text_does_not_resume_a_run(tmp_path):
    run = config(corpus(tmp_path))
    kill(run, tmp_path / "run", 6)
    corpus(tmp_path, text(seed=1))
    with raises(InputError, "other_text"):
        train(run, tmp_path / "run")
    assert saved_steps(tmp_path / "run") == ["step-00000005"]


# Damaged and absurd


@pytest.mark.parametrize("name", ["model", "optimizer", "random"])
def test_a_checkpoint_with_a_flipped_bit_is_not_resumed(tmp_path, name):
    run = config(corpus(tmp_path), steps=6, save_every=2)
    kill(run, tmp_path / "run", 5)
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / f"{name}.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with raises(InputError, "checkpoint_damaged"):
        train(run, tmp_path / "run")


def test_a_result_that_was_altered_is_measured_again(tmp_path):
    run = config(corpus(tmp_path), steps=2)
    summary = train(run, tmp_path / "run").summary
    file = tmp_path / "run" / "result.json"
    file.write_text(file.read_text().replace('"steps": 2', '"steps": 3'))
    assert train(run, tmp_path / "run").summary == summary


def test_checkpoints_are_not_looked_for_behind_a_link(tmp_path):
    run = config(corpus(tmp_path), steps=2)
    train(run, tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with raises(StorageError, "symbolic_link"):
        train(run, tmp_path / "run")


@pytest.mark.parametrize("size", [{"hidden_size": 2**20}, {"intermediate_size": 2**24, "num_hidden_layers": 1_000}])
def test_a_model_larger_than_the_machine_is_refused_before_it_is_built(tmp_path, size):
    with raises(InputError, "model_too_large"):
        train(config(corpus(tmp_path), model={**TINY, **size}), tmp_path / "run")


@pytest.mark.parametrize("pieces", [1, 10**11])
def test_a_batch_larger_than_the_machine_is_refused_before_it_is_cut(tmp_path, pieces):
    with raises(InputError, "batch_too_large"):
        train(config(corpus(tmp_path), batch_size=10**11, accumulate=pieces), tmp_path / "run")


def test_no_code_of_a_tokenizers_folder_is_run_or_offered_to_be(tmp_path, monkeypatch):
    def answer(*_):
        raise AssertionError("nobody is asked")

    monkeypatch.setattr("builtins.input", answer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.py").write_text("raise SystemExit('ran')")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with raises(InputError, "needs_code"):
        train(config(corpus(tmp_path), tokenizer=str(folder)), tmp_path / "run")
