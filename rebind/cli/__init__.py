"""The command `rebind`: one file a verb. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """What the installed command runs."""
    try:
        _run()
    except KeyboardInterrupt:  # while the verbs are imported; once one is at work, its screen says what became of it
        sys.stderr.write("stopped: nothing was begun, run the same command again\n")
        sys.exit(130)


def _run() -> None:
    try:
        from rebind.cli.__main__ import app
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command needs {problem.name}: pip install 'rebind[edit]'")
    app()
