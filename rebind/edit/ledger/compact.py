"""Compaction: old edits that nobody will undo any more are stored together.

The active ones become *sealed* edits: one line each, with the settings that they share stored once, and all of their
tensors in one file. Scores, versions and target states, which no fold needs, are dropped, and so are undone edits.
Facts, keys, values, gains and rows stay as they are, in their order, so a fold makes the same steps as before and ends
with the same bytes.

The new file of tensors is complete before the new log takes the place of the old one, in one step. A process that is
killed before it leaves the old ledger, and one that is killed after it the new one; the files that neither needs are
removed by the next writer.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from rebind.edit.ledger.edit import CONSOLIDATES, JSON, ROWS, Edit, canonical_json
from rebind.edit.ledger.edits import EditSequence, edit_id
from rebind.edit.ledger.log import EDITS, LOG, SEALED_FOLDER, SEALED_NAME, LedgerState, chain_lines, parse_line, utc_now
from rebind.edit.ledger.table import SEALED, UNDONE, Rows
from rebind.edit.ledger.tensors import StoredTensors, split_header
from rebind.errors import InputError
from rebind.storage import open_to_read, path_inside, write_file

OWN_SETTINGS = ("lam", ROWS, CONSOLIDATES)  # those in which edits differ
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
    number = int(state.table.rows["number"][count - 1])
    file = f"{secrets.token_hex(8)}.pack"
    places: list[dict[str, JSON]] = []
    headers: dict[bytes, int] = {}
    packed = _packed(state, kept, places, headers)
    write_file(path_inside(folder, f"{SEALED_FOLDER}/{file}"), packed, staging=folder)
    about: dict[str, JSON] = {"file": file, "last": edit_id(number), "headers": [text.hex() for text in headers]}
    events = _events(folder, state, kept, places, about)
    write_file(folder / LOG, _chained(events, header_digest), staging=folder)
    return Compaction(sealed_ids, dropped_ids, size)


def _count(state: LedgerState, before: int | None, keep_last: int | None) -> int:
    """Return how many of the first edits are compacted."""
    if (before is None) == (keep_last is None):
        raise InputError(
            "What to compact is not clear",
            expected="either {before} or {keep_last}",
            settings={"before": None, "keep_last": None},
            code="compact_range",
        )
    if keep_last is not None and keep_last < 0:
        raise InputError(f"Cannot keep {keep_last} edits", expected="0 or more", code="compact_range")
    numbers = state.table.rows["number"]
    if before is not None:
        return int(np.searchsorted(numbers, before))
    return max(0, len(numbers) - (keep_last or 0))


def _packed(
    state: LedgerState, rows: Rows, places: list[dict[str, JSON]], headers: dict[bytes, int]
) -> Iterator[bytes]:
    """Yield the tensors of edits, one after another, and note where each begins, and which header it has."""
    start = 0
    for edit in EditSequence(state, rows):
        stored = edit.tensors
        if isinstance(stored, StoredTensors) and stored.length is not None:  # sealed before
            header, data = stored.header, stored.read()
        else:
            tensors = edit.loaded().tensors
            header, data = split_header(save({name: tensor for name, tensor in tensors.items() if name != DROPPED}))
        place: dict[str, JSON] = {"start": start, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        places.append({**place, "header": headers.setdefault(header, len(headers))})
        start += len(data)
        yield data


def _events(
    folder: Path, state: LedgerState, rows: Rows, places: list[dict[str, JSON]], about: Mapping[str, JSON]
) -> Iterator[Mapping[str, JSON]]:
    """Yield the events of a compacted log."""
    shared: dict[bytes, int] = {}
    for edit in EditSequence(state, rows):
        shared.setdefault(canonical_json(_shared(edit)), len(shared))
    lines: dict[str, JSON] = {"lines": state.lines, "digest": state.digest}
    settings: Any = [json.loads(text) for text in shared] or [{}]
    yield {"event": "compact", "time": utc_now(), **about, "shared": settings, **lines}
    for edit, place in zip(EditSequence(state, rows), places, strict=True):
        own = {name: edit.settings[name] for name in OWN_SETTINGS if name in edit.settings}
        content = {name: value for name, value in edit.to_json().items() if name not in ("scores", "versions")}
        content |= {"settings": own, "shared": shared[canonical_json(_shared(edit))], "token": edit.token.hex()}
        yield {"event": "sealed", "id": edit.id, **content, **place}
    yield from _later_events(folder, int(str(about["last"])[1:]))


def _shared(edit: Edit) -> dict[str, JSON]:
    return {name: value for name, value in edit.settings.items() if name not in OWN_SETTINGS}


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


def _chained(events: Iterable[Mapping[str, JSON]], digest: str) -> Iterator[bytes]:
    for event in events:
        (line,) = chain_lines([event], digest)
        _, digest = parse_line(line)
        yield line


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
