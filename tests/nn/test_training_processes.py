"""Runs of several processes: what one would have learned, killed and resumed too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rebind.errors import InputError
from rebind.nn.training import OptimizerConfig, train
from rebind.nn.training.load import load
from tests.nn.training_runs import TINY, config, corpus, losses_of, outcome

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"optimizer": OptimizerConfig(rate=2e-3, warmup=3)}  # a larger rate makes much of the order of a sum
PROCESSES = {
    "shuffled": {**SLOW},
    "carried": {**SLOW, "carry": True, "accumulate": 2},
    "sharded": {**SLOW, "sharded": True, "accumulate": 2},
    "sharded, carried": {**SLOW, "sharded": True, "carry": True, "layers": ("gated_delta", "ttt-linear")},
    "sharded, hybrid": {**SLOW, "sharded": True, "layers": ("performer-delta", "attention")},
}
WORKER = """
import sys, torch
from dataclasses import replace
from torch import distributed
torch.set_num_threads(1)
from rebind.nn.training import train
from tests.nn.test_training_processes import PROCESSES
from tests.nn.training_runs import TINY, config, killed
distributed.init_process_group("gloo")
for name, changes in PROCESSES.items():
    run = config(sys.argv[1], model={**TINY, "dropout": 0.0}, **changes)
    killed(run, sys.argv[2] + "/" + name, 7)
    train(run, sys.argv[2] + "/" + name)
run = config(sys.argv[1], model={**TINY, "dropout": 0.1}, sharded=True)
train(run, sys.argv[2] + "/whole")
killed(run, sys.argv[2] + "/resumed", 8)
train(run, sys.argv[2] + "/resumed")
run = config(sys.argv[1], model={**TINY, "dropout": 0.0}, **PROCESSES["shuffled"])
killed(run, sys.argv[2] + "/changed", 8)
train(replace(run, sharded=True), sys.argv[2] + "/changed")
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes trained, each run killed on its way, and the text."""
    folder = tmp_path_factory.mktemp("two")
    source = corpus(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, source, str(folder)]
    both = [subprocess.Popen(command, cwd=ROOT, env={**shared, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        ends = [process.wait(timeout=300) for process in both]
    finally:
        for process in both:
            process.kill()
    assert ends == [0, 0]
    return folder, source


@pytest.mark.parametrize("name", PROCESSES)
def test_two_processes_have_the_loss_of_one(two, tmp_path, name):
    folder, source = two
    run = config(source, model={**TINY, "dropout": 0.0}, **PROCESSES[name])
    result = train(run, tmp_path / "one")
    # float32: the mean is taken in another order
    torch.testing.assert_close(losses_of(folder / name), losses_of(result.folder), rtol=1e-5, atol=0.0)
    with pytest.raises(InputError, match="1 processes, and checkpoint .* was written by 2"):
        train(run, folder / name)
    kept = load(folder / name).model.state_dict()  # whole, in one process
    for key, weight in load(tmp_path / "one").model.state_dict().items():
        torch.testing.assert_close(kept[key], weight, rtol=0.0, atol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def test_shards_go_on_bit_for_bit(two):
    folder, _ = two
    assert outcome(folder / "resumed") == outcome(folder / "whole")
    config_file = folder / "whole/checkpoints/step-00000012/config.json"
    assert json.loads(config_file.read_text())["architectures"] == ["RebindForCausalLM"]


def test_a_run_may_be_sharded_on_its_way(two):
    folder, _ = two
    torch.testing.assert_close(losses_of(folder / "changed"), losses_of(folder / "shuffled"), rtol=1e-5, atol=0.0)
