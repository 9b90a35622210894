"""Compaction: old edits that nobody will undo any more are stored together.

The active ones become *sealed* edits: one line each, and all of their tensors in one file. Scores, versions and target
states, which no fold needs, are dropped, and so are undone edits. Facts, keys, values, gains and rows stay as they are,
in their order, so a fold makes the same steps as before and ends with the same bytes.

The new file of tensors is complete before the new log takes the place of the old one, in one step. A process that is
killed before it leaves the old ledger, and one that is killed after it the new one; the files that neither needs are
removed by the next writer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from safetensors.torch import save

from rebind.edit.ledger.edit import JSON
from rebind.edit.ledger.edits import EditSequence, edit_id
from rebind.edit.ledger.log import EDITS, LOG, SEALED_FOLDER, SEALED_NAME, LedgerState, chain_lines, parse_line, utc_now
from rebind.edit.ledger.table import SEALED, UNDONE, Rows
from rebind.errors import InputError
from rebind.storage import open_to_read, path_inside, write_file

DROPPED = "targets"  # tensors that are needed to show an edit, not to apply it


@dataclass(frozen=True)
class Compaction:
    """What a compaction did, or would do."""

    sealed: tuple[str, ...]  # edits that could be undone before, and cannot be undone any more
    dropped: tuple[str, ...]  # undone edits, which cannot be redone any more
    bytes_before: int  # of the log and the tensors
    bytes_after: int | None = None  # None if nothing was changed


def compact(
    folder: Path, state: LedgerState, header_digest: str, before: int | None, keep_last: int | None, *, dry_run: bool
) -> Compaction:
    """Compact the ledger in a folder, which must be locked: see `Ledger.compact`."""
    count = _count(state, before, keep_last)
    flags = state.table.rows["flags"][:count]
    kept, dropped = np.flatnonzero((flags & UNDONE) == 0), np.flatnonzero(flags & UNDONE)
    new = np.flatnonzero((flags & (UNDONE | SEALED)) == 0)
    if not len(new) + len(dropped):
        raise InputError(
            "There is nothing to compact", expected="edits that can still be undone", code="nothing_to_compact"
        )
    size = ledger_bytes(folder)
    sealed_ids, dropped_ids = (tuple(EditSequence(state, rows).ids) for rows in (new, dropped))
    if dry_run:
        return Compaction(sealed_ids, dropped_ids, size)
    last = int(state.table.rows["number"][count - 1])
    file = f"{secrets.token_hex(8)}.pack"
    places: list[dict[str, JSON]] = []
    write_file(path_inside(folder, f"{SEALED_FOLDER}/{file}"), _packed(state, kept, places), staging=folder)
    events = chain([_first_event(state, file, last)], _sealed_events(state, kept, places), _later_events(folder, last))
    write_file(folder / LOG, chain_lines(events, header_digest), staging=folder)
    return Compaction(sealed_ids, dropped_ids, size)


def _count(state: LedgerState, before: int | None, keep_last: int | None) -> int:
    """Return how many of the first edits are compacted."""
    if (before is None) == (keep_last is None):
        raise InputError(
            "What to compact is not clear",
            advice="Use either {before} or {keep_last}",
            settings={"before": None, "keep_last": None},
            code="compact_range",
        )
    if keep_last is not None and keep_last < 0:
        raise InputError(f"Cannot keep {keep_last} edits", expected="0 or more", code="compact_range")
    numbers = state.table.rows["number"]
    if before is not None:
        return int(np.searchsorted(numbers, before))
    return max(0, len(numbers) - (keep_last or 0))


def _packed(state: LedgerState, rows: Rows, places: list[dict[str, JSON]]) -> Iterator[bytes]:
    """Yield the tensors of edits, one safetensors file after another, and note where each begins."""
    start = 0
    for edit in EditSequence(state, rows):
        tensors = {name: tensor for name, tensor in edit.loaded().tensors.items() if name != DROPPED}
        data = save(tensors)
        places.append({"start": start, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        start += len(data)
        yield data


def _first_event(state: LedgerState, file: str, last: int) -> Mapping[str, JSON]:
    about: dict[str, JSON] = {"file": file, "last": edit_id(last), "lines": state.lines, "digest": state.digest}
    return {"event": "compact", "time": utc_now(), **about}


def _sealed_events(state: LedgerState, rows: Rows, places: list[dict[str, JSON]]) -> Iterator[Mapping[str, JSON]]:
    for edit, place in zip(EditSequence(state, rows), places, strict=True):
        content = {name: value for name, value in edit.to_json().items() if name not in ("scores", "versions")}
        yield {"event": "sealed", "id": edit.id, **content, "token": edit.token.hex(), **place}


def _later_events(folder: Path, last: int) -> Iterator[Mapping[str, JSON]]:
    """Yield the events of the old log that concern later edits."""
    with open_to_read(folder / LOG) as log:
        for line in log:
            if not line.endswith(b"\n"):
                return
            event, _ = parse_line(line)
            if event["event"] == "edit" and int(event["id"][1:]) > last:
                yield event
            elif event["event"] in ("undo", "redo"):
                ids = [id for id in event["ids"] if int(id[1:]) > last]
                if ids:
                    forced = [id for id in event.get("forced", ()) if id in ids]
                    event = {name: value for name, value in event.items() if name != "forced"}
                    yield {**event, "ids": ids, **({"forced": forced} if forced else {})}


def remove_leftovers(folder: Path, state: LedgerState) -> None:
    """Remove files that a compaction made superfluous, or that one that was killed left. The ledger must be locked."""
    with suppress(OSError):
        for file in (folder / SEALED_FOLDER).iterdir():
            if SEALED_NAME.fullmatch(file.name) and file.name != state.sealed_file:
                path_inside(folder, f"{SEALED_FOLDER}/{file.name}").unlink(missing_ok=True)
    with suppress(OSError):
        if state.sealed_file:
            for file in (folder / EDITS).iterdir():
                if is_leftover(file.name, state):
                    path_inside(folder, f"{EDITS}/{file.name}").unlink(missing_ok=True)


def is_leftover(name: str, state: LedgerState) -> bool:
    """Return whether a compaction made a file in `edits` superfluous."""
    stem, _, suffix = name.partition(".")
    if not state.sealed_file or suffix != "safetensors" or not stem[1:].isdecimal():
        return False
    row = state.row(stem)
    superfluous = row is None or state.table.has_flag(row, SEALED)
    return superfluous and int(stem[1:]) <= state.compacted_until


def ledger_bytes(folder: Path) -> int:
    """Return the bytes of the log and the tensors of a ledger."""
    files = [folder / LOG, *(file for name in (EDITS, SEALED_FOLDER) for file in (folder / name).glob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())
