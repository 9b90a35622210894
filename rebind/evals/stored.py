"""The stored rows of an evaluation: appended unit by unit, and checked before an interrupted run resumes.

Checksums show damage. A file that was forged with matching checksums is refused here, before any work is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from rebind.evals import summary
from rebind.evals.protocols import Stage
from rebind.evals.records import Record
from rebind.evals.scores import score_record
from rebind.storage import Row, RunFolder, damage_errors

RECORDS, DRIFT, EDITS, TIMINGS = "records.jsonl", "drift.jsonl", "edits.jsonl", "timings.jsonl"
UnitRows = dict[str, list[Row]]  # the rows of one unit, for each file


def append_unit(folder: RunFolder, rows: UnitRows) -> None:
    """Append the rows of the next unit; with the rows of its records it counts as complete."""
    logged = folder.rows(EDITS).read() if rows[EDITS] else []
    edits = [row for row in rows[EDITS] if not logged or logged[-1]["records"][0] < row["records"][0]]
    for name, new_rows in {**rows, EDITS: edits}.items():
        if new_rows:
            folder.rows(name).append(new_rows)


def drop_incomplete_units(folder: RunFolder, units: Sequence[Stage]) -> int:
    """Remove the rows of units that are not complete, and return the number of complete ones."""
    records = folder.rows(RECORDS)
    complete = bisect_right(list(accumulate(len(unit.records) for unit in units)), len(records.read()))
    records.truncate(sum(len(unit.records) for unit in units[:complete]))
    folder.rows(DRIFT).truncate(sum(unit.drift for unit in units[:complete]))
    return complete


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
            fmean([0.0, *(row[name] for name in summary.DRIFT if row[name] is not None)])


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
