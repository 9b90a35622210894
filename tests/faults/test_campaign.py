"""A short version of the fault campaign; `make faults` runs the whole one."""

from __future__ import annotations

import os

import pytest

from tests.faults import inputs
from tests.faults.campaign import PARTS, Campaign
from tests.faults.children import Fault, run_child
from tests.faults.report import VERDICTS, Tally, table

OPERATIONS = ("edit", "undo", "adapter-again", "matrix", "experiment")
ARTIFACTS = ("memory", "matrix", "delta", "experiment")
SCALES = {"kills": 0.05, "disks": 0.01, "crowds": 0.05, "tampering": 0.1, "inputs": 0.02, "values": 1.0}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the campaign forks")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_lost(part, tmp_path, monkeypatch):
    for name in ("REBIND_FAULTS", "REBIND_CACHE", "REBIND_LEDGERS", "REBIND_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    campaign = Campaign(tmp_path, seconds=8.0, scale=SCALES[part], parts=(part,))
    campaign.operations, campaign.artifacts = OPERATIONS, ARTIFACTS
    tally = campaign.run(part)
    assert tally.tried >= 1
    assert tally.findings == []


# The campaign itself notices faults


def test_a_child_dies_at_the_call_that_was_chosen(tmp_path):
    def work(acknowledge):
        (tmp_path / "one").write_bytes(b"1")
        acknowledge("one")
        (tmp_path / "two").mkdir()
        acknowledge("two")

    undisturbed = run_child(work, tmp_path)
    assert undisturbed.calls == ["open", "acknowledge", "os.mkdir", "acknowledge"]
    assert undisturbed.acknowledged == ["one", "two"]
    for name in ("one", "two"):
        path = tmp_path / name
        path.rmdir() if path.is_dir() else path.unlink()
    killed = run_child(work, tmp_path, Fault("kill", 3))
    assert (killed.status, killed.acknowledged) == ("killed", ["one"])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_child_that_does_not_end_is_stuck(tmp_path):
    ending = run_child(lambda _: __import__("time").sleep(60), tmp_path, timeout=0.2)
    assert ending.status == "stuck"


def test_a_full_disk_stays_full(tmp_path):
    def work(acknowledge):
        for name in "abc":
            try:
                (tmp_path / name).write_bytes(b"")
            except OSError as problem:
                acknowledge(f"{name} {problem.errno}")

    assert run_child(work, tmp_path, Fault("full", 2)).acknowledged == ["b 28", "c 28"]


def test_a_link_that_is_followed_is_noticed(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret").write_bytes(b"")
    (home / "link").symlink_to(tmp_path / "secret")
    assert run_child(lambda _: (home / "link").read_text(), home).followed == [str(home / "link")]


def test_every_command_is_in_the_table_of_inputs():
    """A new command without an entry is still tried, but only with command lines that do not reach its work."""
    known = {name for name, _ in inputs.commands()}
    assert set(inputs.BASES) <= known


def test_every_command_line_of_the_table_names_options_that_exist():
    """One that does not would end before anything is tried."""
    for name, command in inputs.commands():
        known = {option for param in command.params for option in getattr(param, "opts", ())}
        options = {word for word in inputs.BASES.get(name, ()) if word.startswith("--")}
        assert options - known <= {"--bogus"}, name


def test_a_tally_counts_faults_and_not_findings():
    tally = Tally("kills")
    tally.add("one", "killed", [("lost", "a"), ("lost", "b")])
    tally.add("two", "killed")
    assert [tally.count(verdict) for verdict in VERDICTS] == [1, 0, 0, 0, 0, 0]
    assert "| kills | 2 | 1 | 0 |" in table([tally])
