"""Runs of several processes: they learn what one process would, and resume exactly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rebind.errors import InputError
from rebind.nn.training import OptimizerConfig, train
from tests.nn.training_runs import TINY, config, corpus, kill, losses, outcome
from tests.support import raises

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {  # a larger learning rate would magnify the order of a sum
    "optimizer": OptimizerConfig(learning_rate=2e-3, warmup=3),
    "model": {**TINY, "dropout": 0.0},
}
VARIANTS = {
    "copies, then shards": {},
    "copies, carried": {"carry": True, "accumulate": 2},
    "shards": {"sharded": True, "accumulate": 2, "layers": ("performer-delta", "attention")},
    "shards, carried": {"sharded": True, "carry": True, "layers": ("gated_delta", "ttt-linear")},
}


def train_all(source: str, folder: Path) -> None:
    """Train every variant in one of two processes; all runs but one are killed on the way and resumed."""
    torch.set_num_threads(1)
    for name, changes in VARIANTS.items():
        run = config(source, **{**SETTINGS, **changes})
        kill(run, folder / name, 7)
        train(replace(run, sharded="shards" in name), folder / name)
    run = config(source, sharded=True)
    train(run, folder / "whole")
    kill(run, folder / "resumed", 8)
    train(run, folder / "resumed")


def train_in_two_processes(folder: Path) -> str:
    """Let two processes train every variant, and return their text."""
    source = corpus(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared["CUDA_VISIBLE_DEVICES"] = ""  # two processes, and perhaps one GPU
    code = "import sys, pathlib; from tests.nn import test_training_processes as tests; "
    code += "tests.train_all(sys.argv[1], pathlib.Path(sys.argv[2]))"
    command = [sys.executable, "-c", code, source, str(folder)]
    both = [subprocess.Popen(command, cwd=ROOT, env={**shared, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        assert [process.wait(timeout=300) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    return source


def test_two_processes_learn_what_one_does(tmp_path):
    """One test, because the processes take longer than everything that is asked about them."""
    source = train_in_two_processes(tmp_path)
    for name in VARIANTS:
        require_same_run(source, tmp_path, name)
    assert outcome(tmp_path / "resumed") == outcome(tmp_path / "whole"), "a sharded run resumes bit for bit"
    config_file = tmp_path / "whole/checkpoints/step-00000012/config.json"
    assert '"RebindForCausalLM"' in config_file.read_text()


def require_same_run(source: str, folder: Path, name: str) -> None:
    """Compare losses and weights of a variant with those of one process, which cannot resume the run of two."""
    run = config(source, **{**SETTINGS, **VARIANTS[name]})
    result = train(run, folder / f"{name}, one process")
    torch.testing.assert_close(losses(folder / name), losses(result.folder), rtol=1e-5, atol=0.0)  # float32
    with raises(InputError, "other_processes"):
        train(run, folder / name)
    weights = AutoModelForCausalLM.from_pretrained(folder / name / "checkpoints/step-00000012").state_dict()
    for key, weight in AutoModelForCausalLM.from_pretrained(result.checkpoint).state_dict().items():
        torch.testing.assert_close(
            weights[key], weight, rtol=0.0, atol=1e-3, msg=lambda text, key=key: f"{name}, {key}: {text}"
        )
