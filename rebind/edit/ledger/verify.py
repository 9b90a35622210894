"""What is wrong with a ledger: everything in it read afresh, every digest computed again.

A ledger that is opened stops at the first thing that does not fit. Here reading goes on, so that all of the damage
is told at once. What cannot be seen: lines of undo and redo cut off whole at the log's end, an edit cut off there
together with its tensors, and a ledger written anew with digests that fit. The folder is then one that might have been.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.log import LOG, RESTORE, digest_of, parse_line, read_header, split_lines
from rebind.edit.ledger.state import EDITS, State, stored_tensors
from rebind.errors import LedgerError, RebindError


def verify_folder(path: str | Path) -> list[str]:
    """What is wrong with the ledger in a folder, even one too damaged to open."""
    path = Path(path)
    try:
        header = read_header(path)
        data = (path / LOG).read_bytes()
    except LedgerError as problem:
        return [str(problem)]
    except OSError as problem:
        return [f"{path / LOG} cannot be read ({problem}): {RESTORE}"]
    problems: list[str] = []
    state = State(header["digest"])
    lines, torn = split_lines(data)
    for number, raw in enumerate(lines, start=1):
        try:
            event, stated = parse_line(raw)
            if digest_of(event, state.digest) != stated:
                problems.append(f"line {number} of {LOG} was altered, or the line before it was")
            state.digest = stated  # so that one altered line is one problem
            state.take(event, partial(stored_tensors, path, event))
        except (ValueError, RebindError) as problem:
            problems.append(f"line {number} of {LOG} is damaged ({problem})")
    if torn:
        problems.append(f"{LOG} ends in an unfinished line of {len(torn)} bytes: the next edit drops it")
    for edit in state.edits.values():
        problems += wrong_tensors(edit)
    known = {f"{name}.safetensors" for name in state.edits}
    found = sorted(file.name for file in (path / EDITS).glob("*") if not file.name.startswith("."))
    problems += [f"{EDITS}/{name} is in no line of {LOG}" for name in found if name not in known]
    return problems


def wrong_tensors(edit: Edit) -> list[str]:
    """What is wrong with the tensors of an edit: at one of its sites they are damaged, missing or make no write."""
    try:
        for site in edit.sites:
            edit.write(site)
    except RebindError as problem:
        return [f"edit {edit.id}: {problem}"]
    return []
