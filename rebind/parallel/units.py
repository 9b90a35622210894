"""Units of work that processes finish in any order. Each process stores what it has finished, one line per unit.

The lines stay in files beside the results until one process has merged them in order, so neither a kill nor a resume
with another number of processes loses a finished unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rebind.parallel.processes import from_writer, gather, is_writer, ranks
from rebind.storage import JsonLines, RunFolder, RunKind, remove_file

PATTERN = "finished-{}.jsonl"


@contextmanager
def open_run_folder(path: Path, kind: RunKind, config: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open a run folder for all processes; the writer holds its lock."""
    with ExitStack() as stack:
        opened: list[RunFolder] = []

        def claim() -> list[Any]:
            opened.append(stack.enter_context(RunFolder.open(path, kind, config)))
            return [opened[0].config, opened[0].resumed]

        stored, resumed = from_writer(claim, "run folder")
        yield opened[0] if opened else RunFolder(path, stored, resumed)
        gather(None, "close run folder")  # the lock is held until all are done


class FinishedUnits:
    """The units in a run folder that are finished and not merged into its results yet."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._own = folder.rows(PATTERN.format(ranks().rank))

    def add(self, unit: int, results: Any) -> None:
        """Store the results of a unit; they are on disk when this returns."""
        self._own.append({"unit": unit, "results": results})

    def read(self) -> dict[int, Any]:
        """Return the results of all units that any process has finished."""
        files = sorted(self.folder.path.glob(PATTERN.format("*")))
        return {row["unit"]: row["results"] for file in files for row in JsonLines(file).read()}

    def clear(self) -> None:
        """Remove the files, after the writer has merged them."""
        if is_writer():
            for file in self.folder.path.glob(PATTERN.format("*")):
                remove_file(file)
