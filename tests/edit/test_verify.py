"""Whatever was altered, damaged or lost in a ledger is told, and never used."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from rebind.edit.ledger.edit import Edit, fold
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.verify import verify_folder
from rebind.errors import LedgerError
from tests.edit.ledgers import MODEL, log_of, opened, snapshot, weights
from tests.edit.writes import D_K, D_V, SITES, new_edit
from tests.support import Draw


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def tampered(folder):
    """Every file of a ledger with one thing changed, one at a time."""
    for file in sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "lock"):
        data = file.read_bytes()
        name = str(file.relative_to(folder))
        for place in range(0, len(data), max(1, len(data) // 40)):
            yield f"{name} flipped at {place}", file, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        yield f"{name} emptied", file, b""
        yield f"{name} removed", file, None


def test_tampering_with_any_file_is_found(folder):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    ledger.undo("e0001")
    assert ledger.verify() == verify_folder(folder) == []
    count = 0
    for what, file, data in list(tampered(folder)):
        original = file.read_bytes()
        file.unlink() if data is None else file.write_bytes(data)
        assert verify_folder(folder), what
        file.write_bytes(original)
        count += 1
    assert count > 150
    assert verify_folder(folder) == []


@pytest.mark.parametrize(("name", "lie"), [("place", "/other/tiny"), ("dtype", "float32")])
def test_a_header_that_lies_of_its_model_is_found(folder, name, lie):
    Ledger.open(folder, MODEL, model_name="tiny", place="/models/tiny", dtype="bfloat16").append(new_edit(1))
    assert verify_folder(folder) == []
    file = folder / "ledger.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: lie}))
    assert "ledger.json was altered" in verify_folder(folder)[0]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1, 2), (0, 0, 1, 2)])
def test_lines_reordered_dropped_or_doubled_are_found(folder, order):
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    ledger.undo("e0001")
    lines = log_of(folder).read_bytes().splitlines(keepends=True)
    log_of(folder).write_bytes(b"".join(lines[number] for number in order))
    assert verify_folder(folder)
    with pytest.raises(LedgerError, match="line . of .*log.jsonl was altered or damaged"):
        opened(folder)


def test_an_altered_event_is_named_and_nothing_is_changed(folder):
    ledger = opened(folder)
    for seed in (1, 2, 3):
        ledger.append(new_edit(seed))
    text = log_of(folder).read_text("utf-8")
    log_of(folder).write_text(text.replace("subject 2-0", "subject 9-0"), "utf-8")
    before = snapshot(folder)
    with pytest.raises(LedgerError, match="line 2 of .*altered.*restore"):
        opened(folder)
    assert verify_folder(folder) == ["line 2 of log.jsonl was altered, or the line before it was"]
    assert snapshot(folder) == before


def test_altered_tensors_are_not_folded(folder):
    base = Draw(9, torch.float32).normal(D_V, D_K)
    ledger = opened(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    file = folder / "edits" / "e0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    again = opened(folder)
    with pytest.raises(LedgerError, match="e0001.safetensors was altered.*undo edit e0001"):
        weights(again, base)
    again.undo("e0001")
    assert torch.equal(weights(again, base), fold(base, SITES[0], [new_edit(2)]))
    file.unlink()
    with pytest.raises(LedgerError, match="e0001.safetensors cannot be read"):
        opened(folder).get("e0001").write(SITES[0])


def test_tensors_of_the_wrong_shape_are_found_though_every_digest_fits(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Edit, "write", lambda self, site: None)  # a writer without checks
        opened(folder).append(new_edit(1, tensors={f"{SITES[0]}/keys": torch.zeros(1, 1)}))
    assert "edit e0001: edit e0001 has no tensor" in opened(folder).verify()[0]


def test_a_ledger_moved_or_copied_is_still_good(folder, tmp_path):
    opened(folder).append(new_edit(1))
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    copy = opened(tmp_path / "copy")
    assert copy.verify() == []
    copy.get("e0001").write(SITES[0])
