"""Units of work that several processes divide between them, stored in a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


class OrderedUnits:
    """Units of work in the files of a run folder, in their order, although processes finish them in any order.

    A single process appends each unit to the files as soon as it is finished. Several processes store what they have
    finished in a file of their own each, one line per unit, until one of them merges the units. So neither a kill nor a
    resume with another number of processes loses a finished unit.

    Args:
        folder: the run folder.
        recover: drops incomplete units from the files, and returns how many units are complete.
        append: appends the results of the next unit to the files.
    """

    def __init__(self, folder: RunFolder, recover: Callable[[], int], append: Callable[[Any], None]) -> None:
        self._folder, self._recover, self._append = folder, recover, append
        self._next = 0  # the unit that is appended next

    def open(self) -> set[int]:
        """Merge what earlier processes have finished, and return the numbers of all finished units."""

        def find() -> list[int]:
            later = self._merge()
            return [*range(self._next), *later]

        return set(from_writer(find, "stored units"))

    def add(self, number: int, results: Any) -> None:
        """Store the results of a unit; they are on disk when this returns."""
        if ranks().count == 1 and number == self._next:
            self._append(results)
            self._next += 1
        else:
            self._folder.rows(PATTERN.format(ranks().rank)).append({"unit": number, "results": results})

    def merge(self) -> None:
        """Merge all units after every process has finished."""
        gather(None, "units")
        from_writer(lambda: list(self._merge()), "all units")
        if is_writer():
            for file in self._files():
                remove_file(file)

    def _merge(self) -> dict[int, Any]:
        """Append finished units to the files, as far as they are next in order; return all that are in other files."""
        later = {row["unit"]: row["results"] for file in self._files() for row in JsonLines(file).read()}
        self._next = self._recover()
        while self._next in later:
            self._append(later[self._next])
            self._next += 1
        return later

    def _files(self) -> list[Path]:
        return sorted(self._folder.path.glob(PATTERN.format("*")))
