"""Sequences that are split over processes: outputs, gradients and training runs of one process."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rebind.errors import InputError
from tests.nn.training_runs import config, corpus, losses
from tests.parallel.forked import run_jobs
from tests.support import raises

RUNS = {"one sequence": "two", "shards": "two", "rows and segments": "four"}


def test_a_split_sequence_is_the_whole_sequence(tmp_path):
    """One test, because starting the processes takes longer than everything that they check."""
    corpus(tmp_path)
    codes = run_jobs("tests.parallel.sequences", {"one": 1, "two": 2, "four": 4}, tmp_path)
    errors = "\n".join(file.read_text()[-2_000:] for file in sorted(tmp_path.glob("*/err-*")))
    assert codes == {"one": [0], "two": [0, 0], "four": [0] * 4}, errors
    for name, job in RUNS.items():
        one, several = tmp_path / "one" / name, tmp_path / job / name
        torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0.0)  # float32
        checkpoint = "checkpoints/step-00000006"
        weights = AutoModelForCausalLM.from_pretrained(several / checkpoint).state_dict()
        for key, weight in AutoModelForCausalLM.from_pretrained(one / checkpoint).state_dict().items():
            torch.testing.assert_close(weights[key], weight, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("changes", [{"length": 15}, {"carry": True}, {"compile": True}])
def test_what_cannot_be_split_is_refused(tmp_path, changes):
    with raises(InputError, "invalid_context_parallel"):
        config(corpus(tmp_path), context_parallel=2, **changes)


def test_processes_must_be_a_multiple(tmp_path):
    run = config(corpus(tmp_path), context_parallel=2)
    assert run.sequences_at_once(4) == 2
    with raises(InputError, "indivisible_processes"):
        run.sequences_at_once(1)
