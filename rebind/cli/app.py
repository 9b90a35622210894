"""The command itself: its verbs, and what it says when it is called alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from rebind.cli import NOT_BEGUN
from rebind.cli.commands import ask, bench, doctor, edit, generate, lab, layers, ledger, lens, moments, trace, train
from rebind.cli.commands import eval as evaluation
from rebind.cli.ui.terminal import (
    FAILED,
    STOPPED,
    UNREAD,
    drop_output,
    from_interrupt,
    is_unread,
    output_named,
    strict_json,
)
from rebind.cli.ui.usage import Commands
from rebind.errors import StorageError
from rebind.version import __version__

EXAMPLES = """[bold]Begin here[/bold]

rebind edit "The capital of {France} is" "Rome"

rebind ask "The capital of France is"

rebind ledger undo e0001

Exit codes: 0 done, 2 input that cannot be used, 3 numbers, ledgers or disks that would not do, 130 stopped, 141 \
nobody read on, 1 a bug."""


class Verbs(Commands):
    """The verbs, with what goes wrong before one of them is at work: words it does not take, help nobody reads."""

    asked_json = False

    def main(self, *args: Any, **named: Any) -> Any:
        try:
            return super().main(*args, **named)
        except OSError as problem:  # of an error that could not be told: how it ends is told all the same
            drop_output(sys.stderr)
            sys.exit(getattr(problem.__context__, "exit_code", FAILED))

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **named: Any) -> Any:
        self.asked_json = "--json" in args
        with self._ends_told():
            return super().make_context(info_name, args, *rest, **named)

    def invoke(self, ctx: Any) -> Any:
        with self._ends_told():
            return super().invoke(ctx)

    @contextmanager
    def _ends_told(self) -> Iterator[None]:
        try:
            with output_named():
                yield
        except KeyboardInterrupt as problem:
            if not from_interrupt(problem.__context__):  # else a verb's screen was telling of the first one
                self._end(NOT_BEGUN, STOPPED)
            raise typer.Exit(STOPPED) from None
        except StorageError as problem:
            self._end(f"error: {problem}", FAILED)
            raise typer.Exit(FAILED) from None
        except (Exception, SystemExit) as problem:
            if is_unread(problem):
                drop_output()
                raise typer.Exit(UNREAD) from None
            said = getattr(problem, "format_message", None)  # of click's errors, whichever click typer brings
            if said is not None:
                self._document(said(), getattr(problem, "exit_code", 2))
            raise

    def _end(self, line: str, code: int) -> None:
        with suppress(OSError):
            typer.echo(line, err=True)
        self._document(line.removeprefix("error: "), code)

    def _document(self, text: str, code: int) -> None:
        try:
            if self.asked_json:
                typer.echo(strict_json({"error": text, "code": code}), nl=False)
        except OSError:  # the line on the error stream must do
            drop_output()


app = typer.Typer(
    name="rebind",
    cls=Verbs,
    help="Rewrite facts in a language model, see what changed, and take any of it back.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rebind {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Rewrite facts in a language model, see what changed, and take any of it back."""


app.command("edit", epilog=edit.EXAMPLES)(edit.edit)
app.command("ask", epilog=ask.EXAMPLES)(ask.ask)
app.add_typer(ledger.app, name="ledger")
app.command("trace", epilog=trace.EXAMPLES)(trace.trace)
app.command("lens", epilog=lens.EXAMPLES)(lens.lens)
app.command("layers", epilog=layers.EXAMPLES)(layers.layers)
app.add_typer(evaluation.app, name="eval")
app.command("train", epilog=train.EXAMPLES)(train.train)
app.command("generate", epilog=generate.EXAMPLES)(generate.generate)
app.command("lab", epilog=lab.EXAMPLES)(lab.lab)
app.command("moments", epilog=moments.EXAMPLES)(moments.moments)
app.add_typer(bench.app, name="bench")
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)


if __name__ == "__main__":
    app()
