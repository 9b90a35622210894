"""The command line: `rebind`.

app           the command and its subcommands
command       turns functions into commands
options       options that commands share
completion    names for shell completion
session       open an editor and its ledger from options
fact_input    the facts that a command works on
commands/     one module per command
ui/           what the commands print

Nothing here imports torch before a command needs it, so that `rebind --help` is fast.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the installed command."""
    try:
        from rebind.cli.app import app
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.exit(f"error: The command line needs {problem.name}: pip install 'rebind[edit]'")
    app()
