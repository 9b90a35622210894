"""The command `rebind`: one file a verb. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """What the installed command runs."""
    try:
        from rebind.cli.__main__ import app
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command needs {problem.name}: pip install 'rebind[edit]'")
    app()
