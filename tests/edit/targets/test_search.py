"""Search results are stored, used again by the next attempt, and nobody else's are touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rebind.edit.targets import TargetSearch, TargetStates, TargetStore
from rebind.edit.targets import search as search_module
from tests import tiny
from tests.edit.targets.test_optimize import FACTS, LAYER, SETTINGS, WORD_PARTS, family_targets, family_trunk
from tests.families import FAMILIES
from tests.support import Draw, assert_close


def targets(count: int, seed: int = 0) -> TargetStates:
    draw = Draw(seed, torch.float32)
    return TargetStates(draw.normal(count, 4), draw.normal(count, 4), draw.normal(count), torch.arange(count))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("targets-*"))


# The store


def test_stored_targets_are_loaded(tmp_path):
    group = targets(3)
    TargetStore(tmp_path).save(["a", "b", "c"], group)
    rows = TargetStore(tmp_path).load(["c", "x", "a"])
    assert set(rows) == {"a", "c"}
    for got, expected in zip(rows["c"].tensors(), group.tensors(), strict=True):
        assert torch.equal(got, expected[2:])


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_damaged_files_are_removed(tmp_path, content):
    TargetStore(tmp_path).save(["a", "b"], targets(2))
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-10] if content is None else content)
    TargetStore(tmp_path).save(["c"], targets(1, seed=1))
    assert set(TargetStore(tmp_path).load(["a", "b", "c"])) == {"c"}
    assert not file.exists()


def test_clearing_leaves_the_targets_of_other_processes(tmp_path):
    ours, theirs = TargetStore(tmp_path), TargetStore(tmp_path)
    ours.load(["a", "b"])
    ours.save(["a"], targets(1))
    ours.save(["b"], targets(1))
    theirs.load(["b", "c"])
    theirs.save(["b", "c"], targets(2))
    (tmp_path / "targets-strange.safetensors").write_bytes(b"what is this")
    ours.clear()
    assert set(TargetStore(tmp_path).load(["a", "b", "c"])) == {"b", "c"}
    theirs.clear()
    assert not files(tmp_path)


# The search


def find(folder: Path | None, facts: Any = FACTS, **changes: Any) -> tuple[TargetStates, list[int]]:
    """Search on the tiny Llama; also return how many facts were finished after each step."""
    options = {"layer": LAYER, "settings": SETTINGS, "fingerprint": "model", **changes}
    search, steps = TargetSearch(family_trunk("llama"), options["fingerprint"], WORD_PARTS), list[int]()
    result = search.find(
        options["layer"], facts, options["settings"], TargetStore(folder), lambda step, *_: steps.append(step)
    )
    return result, steps


def test_an_interrupted_search_resumes(tmp_path):
    def interrupt(step: int, *_: Any) -> None:
        if step == SETTINGS.steps - 1:
            raise KeyboardInterrupt

    search = TargetSearch(family_trunk("llama"), "model", WORD_PARTS)
    with pytest.raises(KeyboardInterrupt):
        search.find(LAYER, FACTS, SETTINGS, TargetStore(tmp_path), interrupt)
    assert len(files(tmp_path)) == 1
    result, steps = find(tmp_path)
    assert steps
    for got, expected in zip(result.tensors(), family_targets("llama").tensors(), strict=True):
        assert_close(got.double(), expected.double(), 1e-8)
    again, steps = find(tmp_path, FACTS[::-1])
    assert not steps, "everything is stored by now"
    assert torch.equal(again.states, result.states.flip(0))


@pytest.mark.parametrize("changes", [{"fingerprint": "other"}, {"layer": 0}, {"settings": replace(SETTINGS, steps=2)}])
def test_stored_targets_serve_only_the_same_search(tmp_path, changes):
    find(tmp_path)
    assert find(tmp_path, **changes)[1], "a search was necessary"


@pytest.mark.parametrize(("gib", "dtype"), [(80, torch.bfloat16), (1e-6, torch.float32)])
def test_the_size_of_a_gpu_decides_the_dtype_of_the_search(monkeypatch, tmp_path, gib, dtype):
    """Simulated, with no memory free, which does not matter; and targets of one dtype do not serve the other."""
    trunk = tiny.trunk(FAMILIES["llama"](seed=2))
    search = TargetSearch(trunk, "model")
    assert search.dtype == torch.float32
    monkeypatch.setattr(search_module, "can_record", lambda _: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, int(gib * 2**30)))
    assert search.dtype == dtype
    search.find(LAYER, FACTS[:1], SETTINGS, TargetStore(tmp_path))
    monkeypatch.undo()
    steps: list[int] = []
    search.find(LAYER, FACTS[:1], SETTINGS, TargetStore(tmp_path), lambda step, *_: steps.append(step))
    assert bool(steps) == (dtype != torch.float32)


def test_targets_that_nobody_continued_for_a_week_are_removed(tmp_path):
    TargetStore(tmp_path).save(["a"], targets(1))
    TargetStore(tmp_path).save(["b"], targets(1, seed=1))
    (old,) = (file for file in tmp_path.iterdir() if b'\\"a\\"' in file.read_bytes())
    os.utime(old, (0, 0))
    assert set(TargetStore(tmp_path).load(["a"])) == {"a"}
    assert not TargetStore(tmp_path).load(["c"])
    assert not old.exists()
    assert set(TargetStore(tmp_path).load(["b"])) == {"b"}
