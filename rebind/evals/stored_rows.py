"""Check the rows of an interrupted run before it resumes: they are its own, and scores can be computed from them.

Checksums show damage. A file that was forged with matching checksums is refused here, before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean

from rebind.evals.records import Record
from rebind.evals.scores import score_record
from rebind.evals.summary import DRIFT
from rebind.storage import Row, damage_errors


def check_answers(path: Path, rows: Sequence[Row], records: Sequence[Record], states: Sequence[Row]) -> None:
    """Check rows of answers. `states` has the fields that tell the rows of a whole run apart, such as the record."""
    with _damage_errors(path):
        for row, state in zip(rows, states, strict=False):
            _require_equal({name: row[name] for name in state}, state)
            score_record(records[state["record"]], row)


def check_drift(path: Path, rows: Sequence[Row], edits: Sequence[int]) -> None:
    """Check rows of drift, each of which was measured after a number of edits."""
    with _damage_errors(path):
        for row, count in zip(rows, edits, strict=False):
            _require_equal(row["edits"], count)
            fmean([0.0, *(row[name] for name in DRIFT if row[name] is not None)])


def check_edits(path: Path, rows: Sequence[Row], records: Sequence[Record]) -> None:
    """Check that rows of edits name their first record."""
    with _damage_errors(path):
        for first in (row["records"][0] for row in rows):
            _require_equal(first, range(len(records))[first])


def _damage_errors(path: Path) -> AbstractContextManager[None]:
    advice = "Remove the folder, or choose another, and run again"
    return damage_errors(path, advice=advice, code="damaged_row")


def _require_equal(stored: object, expected: object) -> None:
    if stored != expected:
        raise ValueError(f"{stored!r:.40} instead of {expected!r}")
