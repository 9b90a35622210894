"""Creating a ledger: the header is written last, so where it exists, the ledger is complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rebind.edit.ledger.log import EDITS, HEADER, LOG, SEALED_FOLDER, chain_lines
from rebind.edit.ledger.snapshots import FOLDER as SNAPSHOTS
from rebind.edit.ledger.tensors import damaged
from rebind.errors import InputError
from rebind.storage import lock, make_folders, write_file, write_json

LOCK, WORK = "lock", "work"
TIMEOUT = 60.0


def create(path: Path, header: Mapping[str, str]) -> None:
    """Create a ledger in a new or empty folder, or in one in which a creation was cut short."""
    make_folders(path)
    if strangers := _strangers(path):
        raise InputError(
            f"{path} holds {', '.join(strangers[:3])} and no ledger",
            expected="a ledger or an empty folder",
            advice="Choose another folder",
            code="not_a_ledger_folder",
        )
    with lock(path / LOCK, TIMEOUT):
        if (path / HEADER).exists():  # another process was faster
            return
        if not is_unfinished(path):
            raise damaged(f"{path} has a log but no {HEADER}")
        write_file(path / LOG, chain_lines([{"event": "begin"}], header["digest"]))
        write_json(path / HEADER, header)


def is_unfinished(path: Path) -> bool:
    """Return whether a folder is empty or holds no more than a creation that was cut short leaves."""
    if not path.is_dir() or (path / HEADER).exists() or _strangers(path):
        return False
    if any((path / name).exists() and any((path / name).iterdir()) for name in (EDITS, SEALED_FOLDER)):
        return False
    log = path / LOG
    return not log.exists() or log.read_bytes().count(b"\n") <= 1


def _strangers(path: Path) -> list[str]:
    """Return what lies in a folder and cannot belong to a ledger."""
    own_names = (HEADER, LOG, LOCK, EDITS, WORK, SNAPSHOTS, SEALED_FOLDER)
    return sorted(file.name for file in path.iterdir() if file.name not in own_names and file.name[0] != ".")
