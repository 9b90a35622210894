"""The command `rebind`: one file a verb. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import json
import sys

NOT_BEGUN = "stopped: nothing was begun, run the same command again"


def main() -> None:
    """What the installed command runs."""
    try:
        _run()
    except KeyboardInterrupt:  # while the verbs are imported; once one is at work, its screen says what became of it
        sys.stderr.write(f"{NOT_BEGUN}\n")
        if "--json" in sys.argv:
            sys.stdout.write(json.dumps({"error": NOT_BEGUN, "code": 130}, indent=1) + "\n")
        sys.exit(130)


def _run() -> None:
    try:
        from rebind.cli.app import app
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command needs {problem.name}: pip install 'rebind[edit]'")
    app()
