"""Whatever was altered, damaged or lost in a ledger is reported, and never used."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import pytest
import torch

from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.log import chain_lines
from rebind.edit.ledger.snapshots import Snapshots
from rebind.edit.ledger.verify import verify_folder
from rebind.errors import LedgerError
from tests.edit.editors import open_editor
from tests.edit.writes import D_K, D_V, SITES, fold_edits, ids, new_edit, open_ledger, snapshot, weights
from tests.support import Draw, raises


def filled_ledger(folder):
    ledger = open_ledger(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    ledger.undo("e0001")
    return ledger


def tampered(folder):
    """Yield every file of a ledger with one thing changed: (what, file, its new content or None)."""
    for file in sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "lock" and "snapshots" not in f.parts):
        data = file.read_bytes()
        name = str(file.relative_to(folder))
        for at in range(0, len(data), max(1, len(data) // 40)):
            yield f"{name} flipped at {at}", file, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        yield f"{name} emptied", file, b""
        yield f"{name} removed", file, None


def test_tampering_with_any_file_is_detected(folder):
    assert filled_ledger(folder).verify() == verify_folder(folder) == []
    count = 0
    for what, file, data in list(tampered(folder)):
        original = file.read_bytes()
        file.unlink() if data is None else file.write_bytes(data)
        assert verify_folder(folder), what
        file.write_bytes(original)
        count += 1
    assert count > 150
    assert verify_folder(folder) == []


def test_an_altered_header_is_detected(folder):
    filled_ledger(folder)
    header = json.loads((folder / "ledger.json").read_text())
    (folder / "ledger.json").write_text(json.dumps({**header, "model_name": "other"}))
    assert len(verify_folder(folder)) == 1


def forge(folder, **changes):
    """Change fields of the first edit, and correct all digests, as somebody with bad intentions would."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_bytes().splitlines()]
    for event in events:
        del event["line"]
    first = next(event for event in events if event["event"] == "edit")
    settings = {**first["settings"], **changes.pop("settings", {})} if "settings" in changes else first["settings"]
    first |= {"settings": settings, **changes}
    digest = json.loads((folder / "ledger.json").read_bytes())["digest"]
    (folder / "log.jsonl").write_bytes(b"".join(chain_lines(events, digest)))


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": 3},
        {"sites": [None]},
        {"method": ["memit"]},
        {"forced": "no"},
        {"settings": {"layers": [[2]]}},
        {"settings": {"layers": [10**30]}},
        {"settings": {"lam": "0.3"}},
        {"settings": {"rows": {"joint": [{"group": 0}]}}},
        {"settings": {"consolidates": {"edits": [3]}}},
    ],
    ids=str,
)
def test_a_forged_field_of_another_type_is_refused(folder, changes):
    filled_ledger(folder)
    forge(folder, settings={"lam": 0.5})
    assert open_ledger(folder).get("e0001").settings["lam"] == 0.5, "the digests are right"
    forge(folder, **changes)
    with raises(LedgerError, "ledger_damaged"):
        open_ledger(folder)


@pytest.mark.parametrize("changes", [{"sites": ["model.layers.77.mlp"]}, {"settings": {"layers": [77]}}], ids=str)
def test_a_forged_place_is_not_in_the_model(folder, changes):
    ledger = open_editor(ledger=folder).ledger
    ledger.append(new_edit(1))
    forge(folder, **changes)
    with raises(LedgerError, "edit_does_not_fit"):
        open_editor(ledger=folder)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1, 2), (0, 0, 1, 2)])
def test_reordered_dropped_and_repeated_lines_are_detected(folder, order):
    filled_ledger(folder)
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[number] for number in order))
    assert verify_folder(folder)
    with raises(LedgerError, "ledger_damaged"):
        open_ledger(folder)


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_the_advice_about_a_damaged_line_helps(folder, damaged):
    ledger = open_ledger(folder)
    for seed in (1, 2, 3):
        ledger.append(new_edit(seed))
    log = folder / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[damaged] = lines[damaged].replace(b"subject ", b"object! ")  # behind the line with which every log begins
    log.write_bytes(b"".join(lines))
    before = snapshot(folder)
    with pytest.raises(LedgerError, match=f"Line {damaged + 1} "):
        open_ledger(folder)
    assert len(verify_folder(folder)) == 1
    assert snapshot(folder) == before
    log.write_bytes(b"".join(lines[:damaged]))  # this line and all after it deleted, and the files of their edits
    for number in range(damaged, 4):
        (folder / "edits" / f"e000{number}.safetensors").unlink()
    again = open_ledger(folder)
    assert ids(again.edits) == [f"e000{number}" for number in range(1, damaged)]
    again.append(new_edit(4))
    assert open_ledger(folder).get(f"e000{damaged}").facts == new_edit(4).facts


def test_altered_tensors_are_not_used_and_their_edit_can_be_undone(folder):
    base = Draw(9, torch.float32).normal(D_V, D_K)
    ledger = open_ledger(folder)
    ledger.append(new_edit(1))
    ledger.append(new_edit(2))
    file = folder / "edits" / "e0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    for damage in (bytes(data), b"nothing", None):
        file.unlink() if damage is None else file.write_bytes(damage)
        with raises(LedgerError, "ledger_damaged"):
            weights(open_ledger(folder), base)
    again = open_ledger(folder)
    again.undo("e0001")
    assert torch.equal(weights(again, base), fold_edits(base, SITES[0], [new_edit(2)]))


# What a check remembers, and writers beside it


def test_a_later_check_reads_what_is_new_and_what_has_changed(folder, monkeypatch):
    ledger = filled_ledger(folder)
    monkeypatch.setattr(Snapshots, "is_worth", lambda *_: True)  # store everything, however small
    checked, original = [], Edit.require_complete
    monkeypatch.setattr(Edit, "require_complete", lambda edit: checked.append(edit.id) or original(edit))
    assert verify_folder(folder) == []
    assert checked == ["e0001", "e0002"]
    ledger.append(new_edit(3))
    checked.clear()
    assert verify_folder(folder) == []
    assert checked == ["e0003"]
    checked.clear()
    assert verify_folder(folder) == []
    assert checked == []
    assert verify_folder(folder, full=True) == []
    assert checked == ["e0001", "e0002", "e0003"]
    for what, file, data in list(tampered(folder))[::7]:
        content = file.read_bytes()
        file.unlink() if data is None else file.write_bytes(data)
        assert verify_folder(folder), what
        file.write_bytes(content)
    assert verify_folder(folder) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_busy_writer_is_no_damage(folder):
    open_ledger(folder).append(new_edit(0, rows=1))
    child = os.fork()
    if child == 0:
        try:
            ledger = open_ledger(folder)
            for seed in itertools.count(1):
                edit = ledger.append(new_edit(seed, rows=1))
                ledger.undo(edit.id)
        finally:
            os._exit(1)
    try:
        end, checks = time.monotonic() + 30, 0
        while checks < 20 or (len(open_ledger(folder).edits) < 5 and time.monotonic() < end):
            assert verify_folder(folder) == []
            checks += 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(open_ledger(folder).edits) >= 5
