"""The state of a ledger as a file, so that opening the ledger reads only the lines that were added since."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rebind.edit.ledger.log import LOG, LedgerState
from rebind.edit.ledger.snapshots import Snapshots
from rebind.edit.ledger.table import MENTION, ROW, EditTable, Kind, short_digest
from rebind.storage import open_to_read

KIND = "state"
NEW_BYTES, NEW_SHARE = 2**19, 64  # a state is stored when the log has grown by so many bytes, and by this share of it


def dump_state(state: LedgerState, header_digest: str) -> list[bytes | memoryview]:
    """Return a state as bytes."""
    table = state.table
    about: dict[str, Any] = {
        "header": header_digest,
        "digest": state.digest,
        "offset": state.offset,
        "lines": state.lines,
        "last_number": state.last_number,
        "last_line": list(state.last_line),
        "sealed_file": state.sealed_file,
        "compacted_until": state.compacted_until,
        "kinds": [kind.to_json() for kind in table.kinds],
        "rows": len(table.rows),
        "mentions": len(table.mentions),
        "layout": [str(ROW), str(MENTION)],
    }
    return [json.dumps(about).encode() + b"\n", table.rows.tobytes(), table.mentions.tobytes()]


def load_state(data: bytes, folder: Path, header_digest: str) -> LedgerState | None:
    """Return a state from `dump_state`'s bytes; None if it belongs to another ledger or another version."""
    end = data.index(b"\n") + 1
    about = json.loads(data[:end])
    if about["header"] != header_digest or about["layout"] != [str(ROW), str(MENTION)]:
        return None
    middle = end + about["rows"] * ROW.itemsize
    rows = np.frombuffer(data[end:middle], ROW).copy()
    mentions = np.frombuffer(data[middle:], MENTION).copy()
    table = EditTable(rows, mentions, map(Kind.from_json, about["kinds"]))
    return LedgerState(
        about["digest"],
        folder,
        about["offset"],
        about["lines"],
        table,
        about["last_number"],
        (about["last_line"][0], about["last_line"][1]),
        about["sealed_file"],
        about["compacted_until"],
    )


def belongs_to(state: LedgerState, log: BinaryIO) -> bool:
    """Return whether a log still has the last line that a state has read, at its place."""
    start, digest = state.last_line
    if os.fstat(log.fileno()).st_size < state.offset:
        return False
    log.seek(start)
    return short_digest(log.read(state.offset - start)) == digest


def stored_state(snapshots: Snapshots, folder: Path, header_digest: str) -> LedgerState | None:
    """Return the stored state of a ledger, if its log continues it."""
    for name in reversed(snapshots.names(KIND)):
        if (data := snapshots.read(name)) is None:
            continue
        state = load_state(data, folder, header_digest)
        if state is not None:
            try:
                with open_to_read(folder / LOG) as log:
                    if belongs_to(state, log):
                        return state
            except OSError:
                return None
    return None


def store_state(snapshots: Snapshots, state: LedgerState, header_digest: str, stored_bytes: int) -> int:
    """Store a state if the log has grown enough; return how many bytes of the log are stored now."""
    enough = max(NEW_BYTES, state.offset // NEW_SHARE) if snapshots.worth_seconds else 1
    if state.offset - stored_bytes < enough:
        return stored_bytes
    if snapshots.enabled:
        snapshots.replace(KIND, snapshots.write(KIND, dump_state(state, header_digest)))
    return state.offset
