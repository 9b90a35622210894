"""The manual: every command with its help, as Markdown. `make docs` writes docs/cli.md, and a test compares.

python -m rebind.cli.manual docs/cli.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from rebind.cli.app import app
from rebind.cli.ui.usage import usage

HEAD = """# The command line

<!-- Written by `make docs` from the commands' own help: change that, not this file. -->

`rebind COMMAND --help` shows the same. Every command takes `--json` (one document on standard output), `--quiet` (the
one thing a script wants) and `--debug` (tracebacks); progress, warnings and errors go to standard error.
"""
CODE = ("rebind ", "torchrun ")  # how a line that is typed begins
TAG = re.compile(r"\[/?[a-z ]+\]")  # rich's markup


def manual() -> str:
    """All of docs/cli.md."""
    root: Any = typer.main.get_command(app)
    pages = list(_pages("rebind", root))
    index = "\n".join(f"- [`{name}`](#{name.replace(' ', '-')}): {_plain(command.help)}" for name, command in pages)
    body = "\n".join(_page(name, command) for name, command in pages)
    return f"{HEAD}\n{_epilog(root.epilog)}\n{index}\n\n{body}".rstrip() + "\n"


def _pages(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that does something, groups opened."""
    for inner, found in getattr(command, "commands", {}).items():
        is_group = bool(getattr(found, "commands", None))
        if not found.hidden and (not is_group or found.invoke_without_command):
            yield f"{name} {inner}", found
        if is_group:
            yield from _pages(f"{name} {inner}", found)


def _page(name: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    typed = " ".join([name, "[OPTIONS]", *(usage(argument) for argument in arguments)])
    parts = [f"## {name}", "", _plain(command.help), "", "```", typed, "```", ""]
    if arguments:
        parts += ["| argument | |", "| --- | --- |", *(f"| `{usage(one)}` | {_told(one)} |" for one in arguments), ""]
    # In the order of their first options, as --help has them.
    panels = list(dict.fromkeys(option.rich_help_panel or "Options" for option in options))
    ordered = sorted(options, key=lambda option: panels.index(option.rich_help_panel or "Options"))
    for panel, rows in groupby(ordered, key=lambda option: option.rich_help_panel or "Options"):
        parts += [f"| {panel} | |", "| --- | --- |", *(f"| {_names(one)} | {_told(one)} |" for one in rows), ""]
    return "\n".join(parts) + "\n" + _epilog(command.epilog)


def _names(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])


def _told(param: Any) -> str:
    """The help, and the default where it is worth a word."""
    default = param.default
    plain = isinstance(default, (str, int, float, Path)) and not isinstance(default, bool)
    shown = f" Default: `{default}`." if plain and param.param_type_name == "option" else ""
    needed = " Required." if param.required and param.param_type_name == "option" else ""
    return (_plain(param.help) + shown + needed).replace("|", "\\|")


def _epilog(text: str | None) -> str:
    """Examples as code, the rest as prose."""
    lines = [line for line in (_plain(line) for line in (text or "").splitlines()) if line]
    parts = []
    for is_code, group in groupby(lines, key=lambda line: line.startswith(CODE)):
        rows = list(group)
        parts.append("```\n" + "\n".join(rows) + "\n```\n" if is_code else "\n\n".join(rows) + "\n")
    return "\n".join(parts)


def _plain(text: str | None) -> str:
    return " ".join(TAG.sub("", text or "").split())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(manual(), encoding="utf-8")
