"""Turn a function into a command: shared groups of options, plain help, and one handler for all errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal, TypeAlias, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from rebind.cli.options import OutputOptions
from rebind.cli.ui import Terminal
from rebind.cli.ui.errors import INVALID_INPUT, run
from rebind.errors import InputError

Processes: TypeAlias = Literal["one", "shared", "own"]
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class PlainHelp:
    """Help that shows exactly what to type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, arguments in capitals and flags without a type.

        typer 0.29 writes a required argument in braces, which mark the subject of a prompt here, and the types of
        flags and arguments (`--force <bool>`) as though they were to be typed.
        """
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of TyperCommand or TyperGroup
        for param in params:
            if param.param_type_name == "argument":
                name = param.metavar + ("..." if param.nargs == -1 else "")
                usage = name if param.required else f"[{name}]"
                param.get_usage_pieces = lambda ctx, usage=usage: [usage]
            if param.param_type_name == "argument" or param.is_flag:
                param.display_type_rich = lambda ctx: None
        return params


class Command(PlainHelp, TyperCommand):
    """A command with options."""


class CommandGroup(PlainHelp, TyperGroup):
    """Commands under one name. The outermost group reports all errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help if no command is named."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(INVALID_INPUT)
        return super().parse_args(ctx, args)

    def main(self, args: Any = None, prog_name: str | None = None, *_: Any, **__: Any) -> None:
        """Run the command line and exit; click would report errors in another form."""
        prog_name = prog_name or "rebind"
        self._main_shell_completion({}, prog_name)  # if the shell asks for completions, answers it and exits
        arguments = list(sys.argv[1:] if args is None else args)
        is_first = os.environ.get("RANK", "0") == "0" or _count_processes() == 1
        # Options are not parsed yet, so errors in the options themselves need these.
        terminal = Terminal(as_json="--json" in arguments, debug="--debug" in arguments, writes=is_first)

        def invoke() -> None:
            _require_unicode(arguments)
            with self.make_context(prog_name, arguments, obj=terminal) as context:
                self.invoke(context)

        sys.exit(run(invoke, terminal))


def new_app(**settings: Any) -> typer.Typer:
    """Return a group of commands."""
    settings = {"add_completion": False, **settings}
    return typer.Typer(cls=CommandGroup, pretty_exceptions_enable=False, context_settings=HELP_NAMES, **settings)


def add_command(
    app: typer.Typer, name: str, function: Callable[..., None], examples: str, *, processes: Processes = "one"
) -> None:
    """Add a function to a group of commands; its docstring and its examples are the help.

    `processes` says what happens under torchrun: the command needs "one" process, its work is "shared" between them, or
    it joins them on its "own".
    """
    command = with_option_groups(function, processes=processes)
    app.command(name, cls=Command, epilog=examples, context_settings=HELP_NAMES)(command)


def with_option_groups(function: Callable[..., None], *, processes: Processes = "one") -> Callable[..., None]:
    """Expand each parameter whose type is a dataclass of options into these options.

    A parameter of type Terminal stands for --json, --quiet and --debug, and receives the terminal of the command line.
    """
    groups: dict[str, Any] = {}
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for parameter in signature(function, eval_str=True).parameters.values():
        group = OutputOptions if parameter.annotation is Terminal else parameter.annotation
        if is_dataclass(group):
            groups[parameter.name] = group
            for name, hint in get_type_hints(group, include_extras=True).items():
                default = getattr(group, name)
                parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @wraps(function)
    def call(context: typer.Context, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            if group is OutputOptions:
                values[name] = _configure(context.obj, values[name], context.command.params)
        if context.invoked_subcommand is None:
            if _count_processes() > 1:
                _join(context.command_path, processes)
            function(**values)

    call.__signature__ = signature(function).replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {}
    return call


def _require_unicode(arguments: list[str]) -> None:
    """Raise if bytes on the command line are not UTF-8: neither a ledger nor a report could name such a path."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            problem = f"The argument {argument!r} is not valid Unicode"
            raise InputError(problem, expected="UTF-8", code="invalid_unicode") from None


def _count_processes() -> int:
    """Return the number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def _join(command: str, processes: Processes) -> None:
    """Join the other processes of a command, if it can share its work with them."""
    if processes == "one":
        raise InputError(
            f"`{command}` was started in {_count_processes()} processes",
            expected="one process",
            advice="Start it without torchrun",
            code="several_processes",
        )
    if processes == "shared":
        from rebind.parallel import join_processes

        join_processes("cpu")  # messages are exchanged on the CPU, even if processes compute on GPUs


def _configure(terminal: Terminal, output: OutputOptions, params: list[Any]) -> Terminal:
    terminal.as_json, terminal.quiet, terminal.debug = output.as_json, output.quiet, output.debug
    terminal.options = {param.name: max(param.opts, key=len) for param in params if param.param_type_name == "option"}
    return terminal
