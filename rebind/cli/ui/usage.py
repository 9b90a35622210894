"""What help says is typed: arguments in capitals, and nothing behind an option that takes nothing.

typer 0.29 writes a required argument in braces, which mark the subject of a prompt here, and the type of a flag and of
an argument (`--force <bool>`) as though it were to be typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from typer.core import TyperGroup


class Commands(TyperGroup):
    """The command with all its verbs, however deep they lie."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for command in _within(self):
            command.get_params = _readable(command.get_params)


def usage(argument: Any) -> str:
    """An argument as it stands behind its command."""
    name = (argument.metavar or argument.name).upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _within(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from _within(inner)


def _readable(get_params: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """The same parameters, --help among them, each told how to show itself."""

    def params(context: Any) -> list[Any]:
        found = get_params(context)
        for param in found:
            if param.param_type_name == "argument":
                _show_argument(param)
            elif param.is_flag:
                param.display_type_rich = lambda ctx: None
        return found

    return params


def _show_argument(param: Any) -> None:
    param.metavar = (param.metavar or param.name).upper()
    param.get_usage_pieces = lambda ctx: [usage(param)]
    param.display_type_rich = lambda ctx: None
