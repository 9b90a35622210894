"""Runs: killed and resumed they are bit for bit the same, they learn, and what goes wrong is said."""

from __future__ import annotations

import json
import shutil
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
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from rebind.errors import InputError, NumericalError, StorageError, UnknownNameError
from rebind.nn.training import (
    DataConfig,
    OptimizerConfig,
    Progress,
    TrainConfig,
    checkpoint,
    tokenizers,
    train,
    updates,
)
from rebind.nn.training.load import load
from tests.nn.training_runs import TINY, Killed, config, corpus, killed, losses_of, outcome, text

ROOT = Path(__file__).resolve().parents[2]
WAYS = {
    "shuffled": {},
    "carried": {"carry": True, "accumulate": 2},
    "hybrid": {"layers": ("performer-delta", "attention")},
    "ttt": {"layers": "ttt-linear", "carry": True, "model": {**TINY, "ttt_mini_batch": 5}},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Each way's run that nobody interrupted, made when first asked for."""
    made = {}

    def run(way: str):
        if way not in made:
            folder = tmp_path_factory.mktemp(way)
            made[way] = config(corpus(folder), **WAYS[way], log_every=7)
            train(made[way], folder / "run")
            made[way] = (replace(made[way], log_every=1), outcome(folder / "run"))
        return made[way]

    return run


# Killed and resumed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [[2, 7], [5, 11]])
def test_killed_anywhere_it_goes_on_bit_for_bit(whole, tmp_path, way, steps):
    run, expected = whole(way)
    for step in steps:
        killed(run, tmp_path / "run", step)
    torch.manual_seed(123)  # nothing of the caller's generator gets in
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize("phase", ["evaluating", "saving"])
def test_killed_between_steps(whole, tmp_path, phase):
    run, expected = whole("carried")

    def tell(name: str) -> None:
        if name == phase:
            raise Killed

    with pytest.raises(Killed):
        train(run, tmp_path / "run", progress=Progress(phase=tell))
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_killed_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    run, expected = whole("shuffled")
    killed(run, tmp_path / "run", 8)  # one checkpoint is there
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_digest", lambda file: (_ for _ in ()).throw(Killed))
        patched.setattr(checkpoint, "_damage", lambda path: None)
        with pytest.raises(Killed):
            train(run, tmp_path / "run")
    assert [path.name for path in checkpoint.steps(tmp_path / "run/checkpoints")] == ["step-00000005"]
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_a_full_disk_leaves_the_checkpoint_before(whole, tmp_path, monkeypatch):
    run, expected = whole("shuffled")
    killed(run, tmp_path / "run", 8)

    def full(*given, **named):
        raise SafetensorError("No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", full)
        with pytest.raises(StorageError, match="No space left"):
            train(run, tmp_path / "run")
    assert [path.name for path in checkpoint.steps(tmp_path / "run/checkpoints")] == ["step-00000005"]
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_killed_by_the_system(whole, tmp_path):
    run, expected = whole("shuffled")
    place = tmp_path / "run"
    code = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from tests.nn.training_runs import config; from rebind.nn.training import train, Progress; import time\n"
        "train(config(sys.argv[1]), sys.argv[2], progress=Progress(step=lambda update: time.sleep(0.05)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, run.data.source, str(place)], cwd=ROOT)
    try:
        _wait_for(lambda: (place / "log.jsonl").exists() and len((place / "log.jsonl").read_bytes()) > 500)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (place / "result.json").exists()
    train(run, place)
    assert outcome(place) == expected


def test_a_finished_run_is_left_alone(whole, tmp_path):
    run, _ = whole("shuffled")
    result = train(run, tmp_path / "run")
    before = outcome(tmp_path / "run")
    again = train(run, tmp_path / "run", progress=Progress(step=lambda update: pytest.fail("it trained")))
    assert again == result
    assert outcome(tmp_path / "run") == before


def test_a_damaged_checkpoint_gives_way_to_the_one_before(whole, tmp_path):
    run, expected = whole("carried")
    killed(run, tmp_path / "run", 11)
    file = tmp_path / "run/checkpoints/step-00000010/optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.warns(checkpoint.CheckpointWarning, match="optimizer.safetensors is not what was written"):
        train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


def test_the_oldest_checkpoints_go(tmp_path):
    train(config(corpus(tmp_path), save_every=3, keep=2), tmp_path / "run")
    kept = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert sorted(kept) == ["step-00000009", "step-00000012"]
    assert {file.suffix for file in (tmp_path / "run/checkpoints").rglob("*.*") if file.is_file()} == {
        ".json",
        ".safetensors",  # and no pickle
    }


def test_what_a_killed_run_was_writing_goes(tmp_path):
    run = config(corpus(tmp_path), steps=3, save_every=3)
    train(run, tmp_path / "run")
    left = tmp_path / "run/checkpoints/.step-00000002.0123456789ab.tmp"
    left.mkdir()
    train(run, tmp_path / "run")
    assert not left.exists()


def test_a_reader_beside_a_run_takes_what_is_there(tmp_path, monkeypatch):
    """The checkpoint that it was about to read is gone, and a newer one in its place."""
    run = tmp_path / "run"
    train(config(corpus(tmp_path), steps=6, save_every=3, keep=2), run)
    older, newer = sorted((run / "checkpoints").iterdir())
    aside = tmp_path / "aside"
    newer.rename(aside)
    read = tokenizers.read_tokenizer

    def late(path):
        if aside.exists():
            aside.rename(newer)
            shutil.rmtree(older)
        return read(path)

    monkeypatch.setattr(tokenizers, "read_tokenizer", late)
    assert load(run).folder == newer


def test_a_reader_puts_nothing_aside(tmp_path):
    train(config(corpus(tmp_path), steps=6, save_every=3, keep=2), tmp_path / "run")
    older, newer = sorted((tmp_path / "run/checkpoints").iterdir())
    (newer / "model.safetensors").write_bytes(b"")
    with pytest.warns(checkpoint.CheckpointWarning, match="the one before it is taken"):
        assert load(tmp_path / "run").folder == older
    assert newer.is_dir()


# Learning


@pytest.mark.parametrize("changes", [{}, {"carry": True}, {"precision": "bfloat16"}], ids=["", "carried", "bfloat16"])
def test_the_loss_goes_down(tmp_path, changes):
    source = corpus(tmp_path, "abcdefgh" * 300)
    model = {**TINY, "dropout": 0.0}
    result = train(config(source, steps=40, evaluate_every=40, save_every=40, model=model, **changes), tmp_path / "run")
    first = json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[0])["loss"]
    assert first > 2.0  # log 9: nine tokens, equally likely
    assert result.summary["loss"] < 0.3
    assert result.summary["validation"]["sliding"]["perplexity"] < 2.0  # of 9
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")


def test_pieces_of_a_batch_add_up_to_it(tmp_path):
    """For eight updates: what is rounding at first is ten times as much two updates later."""
    source, model = corpus(tmp_path), {**TINY, "dropout": 0.0}
    losses = [losses_of(train(config(source, model=model, accumulate=n), tmp_path / str(n)).folder) for n in (1, 2, 4)]
    torch.testing.assert_close(losses[1][:8], losses[0][:8], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(losses[2][:8], losses[0][:8], rtol=1e-5, atol=0.0)


def test_it_is_a_model_of_transformers(tmp_path):
    result = train(config(corpus(tmp_path), layers=("performer-delta", "attention")), tmp_path / "run")
    theirs = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    ours, ids = load(tmp_path / "run"), torch.arange(12)[None]
    assert torch.equal(theirs(ids).logits, ours.model(ids).logits)
    assert ours.generate("the ", max_new_tokens=8, do_sample=False) == ours.generate("the ", max_new_tokens=8, top_k=1)
    assert isinstance(ours.generate("", max_new_tokens=3, do_sample=False), str)


def test_the_model_can_be_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    train(config(corpus(tmp_path), compile=True), tmp_path / "run")
    assert len(compiled) == 1


# One process


def test_one_process_has_nothing_to_shard(whole, tmp_path):
    run, expected = whole("carried")
    train(replace(run, sharded=True), tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


# TensorBoard


class Drawn:
    """torch's SummaryWriter, as far as it is used."""

    made: ClassVar[list[Drawn]] = []

    def __init__(self, log_dir, purge_step):
        self.log_dir, self.purge_step, self.scalars, self.closed = log_dir, purge_step, [], False
        Drawn.made.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, step, value))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_the_log_is_drawn_by_tensorboard_too(whole, tmp_path, monkeypatch):
    run, expected = whole("shuffled")
    Drawn.made.clear()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Drawn))
    run = replace(run, tensorboard=True)
    killed(run, tmp_path / "run", 7)
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected
    before, after = Drawn.made
    assert before.closed
    assert after.closed
    assert (before.log_dir, before.purge_step, after.purge_step) == (str(tmp_path / "run/tensorboard"), 1, 6)
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    told = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    drawn = [(step, value) for tag, step, value in before.scalars[:] if tag == "loss/training" and step < 6]
    drawn += [(step, value) for tag, step, value in after.scalars if tag == "loss/training"]
    assert drawn == told
    tags = {tag for tag, _, _ in after.scalars}
    assert tags == {"loss/training", "loss/held", "gradient/norm", "optimizer/rate", "speed/tokens_a_second"}


def test_tensorboard_that_is_not_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'rebind\[tensorboard\]'"):
        train(config(corpus(tmp_path), tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# What goes wrong


def test_a_loss_that_is_no_number_stops_and_leaves_the_last_good_checkpoint(whole, tmp_path, monkeypatch):
    run, expected = whole("shuffled")
    calls = []
    right = updates.Updates._loss

    def wrong(self, inputs, targets, cache):
        calls.append(len(calls))
        return right(self, inputs, targets, cache) * (float("nan") if calls[-1] == 7 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(updates.Updates, "_loss", wrong)
        with pytest.raises(NumericalError, match=r"at step 8 the loss is nan.*last good checkpoint is .*step-00000005"):
            train(replace(run, log_every=100), tmp_path / "run")
    assert [path.name for path in checkpoint.steps(tmp_path / "run/checkpoints")] == ["step-00000005"]
    train(run, tmp_path / "run")
    assert outcome(tmp_path / "run") == expected


@pytest.mark.parametrize("log_every", [1, 100])  # the loss is seen at once, or a layer refuses what came of it
def test_a_rate_too_high_says_so(tmp_path, log_every):
    optimizer = OptimizerConfig(rate=1e30, warmup=0, clip=1e30)
    run = config(corpus(tmp_path), optimizer=optimizer, log_every=log_every)
    with pytest.raises(NumericalError, match="lower rate.*no checkpoint was written yet"):
        train(run, tmp_path / "run")
    train(config(corpus(tmp_path)), tmp_path / "run")  # nothing was kept, so another config may begin


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"preset": "modern-10b"}, UnknownNameError, "unknown preset 'modern-10b'"),
        ({"layers": "dleta"}, UnknownNameError, "did you mean 'delta'"),
        ({"layers": ("delta", "delta", "attention")}, InputError, "names 3 layers"),
        ({"model": {"hiden_size": 8}}, UnknownNameError, "did you mean 'hidden_size'"),
        ({"model": {**TINY, "num_attention_heads": 3}}, InputError, "expected a multiple"),
        ({"model": {**TINY, "vocab_size": 4}}, InputError, "the model has 4 tokens and the tokenizer"),
        ({"steps": 0}, InputError, "steps is 0"),
        ({"batch": 2.5}, InputError, "batch is 2.5"),
        ({"batch": 6, "accumulate": 4}, InputError, "expected a multiple"),
        ({"precision": "int8"}, UnknownNameError, "unknown precision"),
        ({"layers": "attention", "carry": True}, InputError, "grows without end"),
        ({"device": "cuda:77"}, InputError, "device 'cuda:77' cannot be used here"),
        ({"device": "toaster"}, InputError, "device 'toaster' cannot be used here"),
        ({"length": 100_000}, InputError, r"expected at least 100,001 for one segment"),
        ({"carry": True, "batch": 4_000}, InputError, r"for 4000 segments of 16"),
    ],
)
def test_a_bad_config_is_refused(tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        train(config(corpus(tmp_path), **changes), tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OptimizerConfig(rate=0.0), "rate is 0.0"),
        (lambda: OptimizerConfig(rate=float("nan")), "rate is nan"),
        (lambda: OptimizerConfig(beta2=1.5), "beta2 is 1.5"),
        (lambda: OptimizerConfig(warmup=-1), "warmup is -1"),
        (lambda: DataConfig("x", vocabulary=100), "vocabulary is 100"),
        (lambda: DataConfig("x", held=1.0), "held is 1.0"),
        (lambda: TrainConfig(DataConfig("x"), keep=True), "keep is True"),
        (lambda: TrainConfig(DataConfig("x"), evaluate_tokens=1), "evaluate_tokens is 1"),
        (lambda: TrainConfig(DataConfig("x"), seed=2**63), "seed is 9223372036854775808"),
        (lambda: TrainConfig(DataConfig("x"), seed=-1), "seed is -1"),
    ],
)
def test_bad_numbers_are_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_another_config_is_refused(tmp_path):
    run = config(corpus(tmp_path))
    killed(run, tmp_path / "run", 6)
    changed = replace(run, optimizer=replace(run.optimizer, rate=0.5), layers="gated_delta")
    with pytest.raises(InputError, match=r"layers is 'gated_delta', was 'delta'; optimizer.rate is 0.5, was 0.01"):
        train(changed, tmp_path / "run")
    with pytest.raises(InputError, match=r"steps is 20, was 12\), and steps decides the rate of every step.*to go on"):
        train(replace(run, steps=20), tmp_path / "run")
    result = train(replace(run, keep=5, log_every=3), tmp_path / "run")
    assert (result.began, result.summary["steps"]) == (5, 12)
    with pytest.raises(InputError, match=r"has a finished run of another config \(steps is 20, .*: train into another"):
        train(replace(run, steps=20), tmp_path / "run")


@pytest.mark.parametrize("way", ["shuffled", "carried"])
def test_when_it_is_measured_and_saved_may_change(whole, tmp_path, way):
    run, expected = whole(way)
    killed(run, tmp_path / "run", 6)
    train(replace(run, evaluate_every=1, save_every=3, log_every=4), tmp_path / "run")
    found = outcome(tmp_path / "run")
    weights = {name for name in expected if name.endswith(".safetensors")}
    assert len(weights) >= 3
    assert {name: found[name] for name in weights} == {name: expected[name] for name in weights}
    assert found["result.json"] == expected["result.json"]
    losses = [
        [row for row in map(json.loads, one["log.jsonl"].splitlines()) if "loss" in row] for one in (found, expected)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("content", "says"),
    [(text(seed=1) + "xyz", "the tokenizer is not the one of checkpoint"), (text(seed=1), "the corpus is not the one")],
)
def test_another_corpus_is_refused(tmp_path, content, says):
    run = config(corpus(tmp_path))
    killed(run, tmp_path / "run", 6)
    corpus(tmp_path, content)
    with pytest.raises(InputError, match=says):
        train(run, tmp_path / "run")
    assert [path.name for path in checkpoint.steps(tmp_path / "run/checkpoints")] == ["step-00000005"]


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path):
    result = train(config(corpus(tmp_path)), tmp_path / "run")
    other = train(config(corpus(tmp_path), tokenizer="bpe"), tmp_path / "other")
    moved = shutil.copytree(result.checkpoint, tmp_path / "moved")
    shutil.copy(other.checkpoint / "tokenizer.json", moved / "tokenizer.json")
    with pytest.raises(InputError, match="is not the one the model was trained with"):
        load(moved)
    with pytest.raises(InputError, match="no checkpoint"):
        load(tmp_path / "nothing")


def test_one_run_a_folder(tmp_path):
    run, seen = config(corpus(tmp_path)), []

    def meanwhile(update) -> None:
        with pytest.raises(InputError, match="another process trains into"):
            train(run, tmp_path / "run")
        seen.append(update.step)

    train(run, tmp_path / "run", progress=Progress(step=meanwhile))
    assert seen == list(range(1, 13))


def test_what_a_kill_left_before_the_config_was_there_is_gone_on_with(tmp_path):
    for name in ("tokens", ".a1b2c3d4.tmp"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in (".lock", ".config.json.0a1b2c3d4e5f.tmp"):
        (tmp_path / "run" / name).touch()
    assert train(config(corpus(tmp_path)), tmp_path / "run").summary["steps"] == 12


def test_a_log_that_lost_lines_is_refused(tmp_path):
    run = config(corpus(tmp_path))
    killed(run, tmp_path / "run", 6)
    (tmp_path / "run/log.jsonl").write_text("")
    with pytest.raises(InputError, match="its checkpoint expected"):
        train(run, tmp_path / "run")


def _wait_for(ready, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
