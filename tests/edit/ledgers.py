"""Ledgers of the tiny model and what is asked of them, for the tests of the ledger."""

from __future__ import annotations

from pathlib import Path

from rebind.edit.ledger.edit import fold
from rebind.edit.ledger.ledger import Ledger
from tests.edit.writes import SITES

MODEL, OTHER = "a" * 64, "b" * 64


def opened(folder):
    return Ledger.open(folder, MODEL, model_name="tiny")


def ids(edits):
    return [edit.id for edit in edits]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def weights(ledger, base, site=SITES[0]):
    return fold(base, site, ledger.active)


def log_of(folder):
    return folder / "log.jsonl"
