"""Several processes: the results of one process, one writer, and a process that is killed.

`work` has what commands share, `sequences` what is split over processes, and `shards` models that they share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rebind.storage import JsonLines
from tests import tiny
from tests.evals.runs import contents
from tests.nn.training_runs import corpus, losses
from tests.parallel.forked import run_jobs

TOLERANCE = 1e-9  # of float64 results: the order of sums differs, and so does the padding in a batch
SHARED = {"in_one_process": 1, "commands": 2, "messages": 4, "killed": 2, "resumed": 2, "refused": 2}
SEQUENCES = {"one": 1, "two": 2, "four": 4}
SHARDS = {"fsdp": 2, "tensor_parallel": 2}
MODULES = {"work": SHARED, "sequences": SEQUENCES, "shards": SHARDS}
TRAINED = {"one sequence": "two", "shards": "two", "rows and segments": "four"}  # and the job that did it


def test_several_processes(tmp_path):
    """One test, because starting the processes takes longer than everything that is asked about them."""
    tiny.llama(max_position_embeddings=128).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    corpus(tmp_path)
    facts = [{"prompt": f"The capital of {{{place}}} is", "target": "Rome"} for place in ("France", "Spain", "Norway")]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    jobs = {f"{module}.{job}": count for module, counts in MODULES.items() for job, count in counts.items()}
    codes = run_jobs(jobs, tmp_path)
    for job, count in {**SHARED, **SEQUENCES, **SHARDS}.items():
        if job not in ("killed", "refused"):
            assert codes[job] == [0] * count, f"{job}: {errors(tmp_path / job)}"
    require_same_edits(tmp_path)
    require_same_moments(tmp_path)
    require_same_runs(tmp_path)
    require_nothing_lost(tmp_path, codes)
    require_same_training(tmp_path)


def require_same_training(folder: Path) -> None:
    """Runs with every sequence in two processes learn what one process does."""
    for name, job in TRAINED.items():
        one, several = folder / "one" / name, folder / job / name
        torch.testing.assert_close(losses(several), losses(one), rtol=1e-5, atol=0.0)  # float32
        checkpoint = "checkpoints/step-00000006"
        weights = AutoModelForCausalLM.from_pretrained(several / checkpoint).state_dict()
        for key, weight in AutoModelForCausalLM.from_pretrained(one / checkpoint).state_dict().items():
            torch.testing.assert_close(weights[key], weight, rtol=0.0, atol=1e-4)


def errors(folder: Path) -> str:
    return "\n".join(file.read_text()[-2_000:] for file in sorted(folder.glob("err-*")))


def require_same_edits(folder: Path) -> None:
    """The edits of two processes are those of one, and both processes hold the same model."""
    one = load_file(folder / "in_one_process/edit-0")
    first, second = (load_file(folder / f"commands/edit-{rank}") for rank in (0, 1))
    assert one.keys() == first.keys() == second.keys()
    for name, expected in one.items():
        assert torch.equal(first[name], second[name]), f"{name} differs between processes"
        torch.testing.assert_close(
            first[name], expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
    logs = [(folder / job / "ledger/log.jsonl").read_text().splitlines() for job in ("in_one_process", "commands")]
    assert len(logs[0]) == len(logs[1])


def require_same_moments(folder: Path) -> None:
    """Moments read by four processes, of which one has nothing to read, are those of one process."""
    one = load_file(folder / "in_one_process/moments-0")
    for rank in range(4):
        for name, moment in load_file(folder / f"messages/moments-{rank}").items():
            torch.testing.assert_close(moment, one[name], rtol=1e-12, atol=1e-14)


def require_same_runs(folder: Path) -> None:
    """Evaluations, experiments, traces and layer searches give the files and numbers of one process."""
    one, two = (contents(folder / job / "single") for job in ("in_one_process", "commands"))
    assert one == two, "edits that are made alone do not depend on who makes them"
    for name in ("records.jsonl", "edits.jsonl", "drift.jsonl"):
        require_close(*(JsonLines(folder / job / "sequential" / name).read() for job in ("in_one_process", "commands")))
    one, two = (folder / job / "lab/points.jsonl" for job in ("in_one_process", "commands"))
    assert one.read_bytes() == two.read_bytes()
    one, two = (json.loads((folder / job / "results.json").read_text()) for job in ("in_one_process", "commands"))
    torch.testing.assert_close(torch.tensor(two["effects"][0]), torch.tensor(one["effects"][0]), rtol=0, atol=TOLERANCE)
    assert [one["rows"], one["layers"]["layers"]] == [two["rows"], two["layers"]["layers"]]


def require_close(one: Any, two: Any) -> None:
    """Expect the same values, and numbers that are equal to the precision of a float32 model."""
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        require_close(list(one.values()), list(two.values()))
    elif isinstance(one, list):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            require_close(first, second)
    else:
        assert one == (pytest.approx(two, rel=1e-4, abs=2e-6) if isinstance(one, float) else two)  # six decimals


def require_nothing_lost(folder: Path, codes: dict[str, list[int]]) -> None:
    """A process that is killed ends the command with one line; the targets of the other are used again."""
    assert codes["killed"] == [3, -9]
    lines = [line for rank in (0, 1) for line in (folder / f"killed/err-{rank}").read_text().splitlines()]
    assert len(lines) == 1, lines
    assert "process" in lines[0]
    assert (folder / "resumed/out-0").read_text() == "e0001\n"
    assert (folder / "resumed/out-1").read_text() == ""
    assert codes["refused"] == [2, 2]
    assert [len((folder / f"refused/err-{rank}").read_text().splitlines()) for rank in (0, 1)] == [1, 0]
