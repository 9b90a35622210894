"""Targets kept between runs: used when whole, dropped when not, and nobody else's are touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from rebind.edit.targets.optimize import Found
from rebind.edit.targets.store import KeptTargets
from tests.support import Draw


def found(count: int, seed: int = 0) -> Found:
    draw = Draw(seed, torch.float32)
    return Found(draw.normal(count, 4), draw.normal(count, 4), draw.normal(count), torch.arange(count))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("targets-*"))


def test_what_was_stored_is_loaded(tmp_path):
    group = found(3)
    KeptTargets(tmp_path).store(["a", "b", "c"], group)
    rows = KeptTargets(tmp_path).load(["c", "x", "a"])
    assert set(rows) == {"a", "c"}
    for got, expected in zip(rows["c"], (group.hidden, group.before, group.loss, group.steps), strict=True):
        assert torch.equal(got, expected[2])


@pytest.mark.parametrize("damage", ["number", "name", "header", "cut", "old"])
def test_a_file_that_was_altered_is_dropped(tmp_path, damage):
    """A number changed on disk still makes a safetensors file: only its checksum tells."""
    KeptTargets(tmp_path).store(["a", "b"], found(2))
    KeptTargets(tmp_path).store(["c"], found(1, seed=1))
    (file,) = (one for one in files(tmp_path) if "a" in KeptTargets(tmp_path).load(["a"]) and _holds(one, "a"))
    data = bytearray(file.read_bytes())
    if damage == "number":
        data[-1] ^= 1
    elif damage == "name":
        data = data.replace(b'[\\"a\\"', b'[\\"z\\"')
    elif damage == "header":
        data[:8] = b"\xff" * 8
    elif damage == "cut":
        data = data[:-10]
    else:  # as an earlier version wrote it
        data = bytearray(save({"hidden": torch.zeros(2, 4)}, metadata={"digests": json.dumps(["a", "b"])}))
    file.write_bytes(bytes(data))
    kept = KeptTargets(tmp_path)
    assert set(kept.load(["a", "b", "c", "z"])) == {"c"}
    assert not file.exists()
    assert len(files(tmp_path)) == 1


def _holds(file: Path, name: str) -> bool:
    with safe_open(str(file), framework="pt") as stored:
        return name in json.loads(stored.metadata()["digests"])


def test_clearing_leaves_what_others_are_at_work_on(tmp_path):
    mine, other = KeptTargets(tmp_path), KeptTargets(tmp_path)
    mine.load(["a", "b"])
    mine.store(["a"], found(1))
    mine.store(["b"], found(1))
    other.load(["b", "c"])
    other.store(["b", "c"], found(2))
    (tmp_path / "targets-strange.safetensors").write_bytes(b"what is this")
    mine.clear()
    assert set(KeptTargets(tmp_path).load(["a", "b", "c"])) == {"b", "c"}
    other.clear()
    assert not files(tmp_path)


def test_without_a_folder_nothing_is_kept():
    kept = KeptTargets(None)
    kept.store(["a"], found(1))
    assert kept.load(["a"]) == {}
    kept.clear()
