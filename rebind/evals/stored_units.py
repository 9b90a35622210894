"""Store the units of an evaluation in its run folder, in order, no matter how many processes run them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rebind.parallel import FinishedUnits, from_writer, gather, ranks
from rebind.storage import Row, RunFolder

RECORDS, DRIFT, EDITS, TIMINGS = "records.jsonl", "drift.jsonl", "edits.jsonl", "timings.jsonl"
UnitRows = dict[str, list[Row]]  # the rows of one unit, for each file


class StoredUnits:
    """The rows of each unit in a run folder."""

    def __init__(self, folder: RunFolder, sizes: Sequence[int], drifts: Sequence[bool]) -> None:
        self.folder, self.ends = folder, list(accumulate(sizes))  # number of rows up to and including each unit
        self.drifts = list(accumulate(map(int, drifts)))
        self._finished = FinishedUnits(folder)
        self._next = 0  # the unit whose rows are appended next
        self._is_single = ranks().count == 1

    def open(self) -> tuple[set[int], list[Row], list[Row]]:
        """Return the finished units, and the rows of records and drift that are merged already."""

        def find() -> tuple[list[int], list[Row], list[Row]]:
            records, drift = self._merge()
            return [*range(self._next), *self._finished.read()], records, drift

        finished, records, drift = from_writer(find, "stored units")
        return set(finished), records, drift

    def add(self, number: int, rows: UnitRows) -> None:
        """Store the rows of a unit."""
        if self._is_single and number == self._next:
            self._append(rows)
        else:
            self._finished.add(number, rows)

    def merge(self) -> tuple[list[Row], list[Row]]:
        """Merge all units after every process has finished; return all rows of records and drift."""
        gather(None, "units")
        records, drift = from_writer(lambda: list(self._merge()), "all units")
        self._finished.clear()
        return records, drift

    def _merge(self) -> tuple[list[Row], list[Row]]:
        """Append finished units to the files, as far as they are next in order, and drop rows of incomplete units."""
        records, drift, later = self.folder.rows(RECORDS), self.folder.rows(DRIFT), self._finished.read()
        self._next = bisect_right(self.ends, len(records.read()))  # the number of units that are stored completely
        records.truncate(self.ends[self._next - 1] if self._next else 0)
        drift.truncate(self.drifts[self._next - 1] if self._next else 0)
        while self._next in later:
            self._append(later[self._next])
        return records.read(), drift.read()

    def _append(self, rows: UnitRows) -> None:
        """Append the rows of the next unit; with the rows of its records it counts as complete."""
        logged = self.folder.rows(EDITS).read() if rows[EDITS] else []
        edits = [row for row in rows[EDITS] if not logged or logged[-1]["records"][0] < row["records"][0]]
        for name, new_rows in (
            (EDITS, edits),
            (DRIFT, rows[DRIFT]),
            (RECORDS, rows[RECORDS]),
            (TIMINGS, rows[TIMINGS]),
        ):
            if new_rows:
                self.folder.rows(name).append(new_rows)
        self._next += 1
