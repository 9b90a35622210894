"""Edits in a job: all of them are written or, if one fails or somebody cancels, none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rebind.edit.editor import Editor
from rebind.studio.jobs import JobControl


@contextmanager
def all_or_nothing(editor: Editor, control: JobControl) -> Iterator[list[str]]:
    """Run a block that writes edits and lists their ids; whatever ends it early, those are undone.

    An edit that the editor has not finished is not in the ledger, and nothing is to be undone for it. After the block
    the job can no longer be cancelled.
    """
    written: list[str] = []
    try:
        yield written
        control.raise_if_cancelled()
    except BaseException:
        control.commit()  # undoing must not be cancelled in its turn
        for id in reversed(written):
            editor.undo(id)
        raise
    control.commit()
