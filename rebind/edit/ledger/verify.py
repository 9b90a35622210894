"""Check a ledger: read all of it again and compute every digest anew.

Opening a ledger stops at the first problem; here reading goes on, to report all of them. Not detectable are undo and
redo lines that were cut off whole at the end of the log, an edit cut off there together with its tensors, and a
ledger that was rewritten with matching digests.
"""

from __future__ import annotations

from pathlib import Path

from rebind.edit.ledger.log import LOG, digest_of, parse_line, read_header
from rebind.edit.ledger.state import EDITS, LedgerState
from rebind.errors import LedgerError, RebindError


def verify_folder(path: str | Path) -> list[str]:
    """Return what is wrong with the ledger in a folder, even one too damaged to open; an empty list if it is intact."""
    path = Path(path)
    try:
        header = read_header(path)
        data = (path / LOG).read_bytes()
    except LedgerError as problem:
        return [str(problem)]
    except OSError as problem:
        return [f"{path / LOG} cannot be read ({problem})."]
    problems: list[str] = []
    state = LedgerState(header["digest"], path)
    *lines, unfinished = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            event, stated = parse_line(line)
            if digest_of(event, state.digest) != stated:
                problems.append(f"Line {number} of {LOG}, or the line before it, was altered.")
            state.digest = stated  # so that one altered line is one problem
            state.apply(event)
        except (ValueError, RebindError) as problem:
            problems.append(f"Line {number} of {LOG} is damaged ({problem}).")
    if unfinished:
        problems.append(f"{LOG} ends in an unfinished line of {len(unfinished)} bytes; the next edit drops it.")
    for edit in state.edits.values():
        try:
            for site in edit.sites:
                edit.write(site)
        except RebindError as problem:
            problems.append(f"Edit {edit.id}: {problem}")
    known = {f"{id}.safetensors" for id in state.edits}
    files = sorted(file.name for file in (path / EDITS).glob("*") if not file.name.startswith("."))
    return problems + [f"{EDITS}/{name} belongs to no line of {LOG}." for name in files if name not in known]
