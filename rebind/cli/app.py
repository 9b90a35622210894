"""The command `rebind` and its subcommands."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from rebind.cli.command import add_command, new_app
from rebind.cli.commands import ask, consolidate, demo, doctor, edit, learn, ledger, moments, studio
from rebind.cli.commands.analysis import eval as evaluation
from rebind.cli.commands.analysis import layers, lens, trace
from rebind.cli.commands.building import bench, generate, lab, train
from rebind.version import __version__

HELP = "Edit facts in a language model, see what changed, and undo any edit exactly."
EPILOG = """[bold]Start here[/bold]

rebind edit "The capital of {France} is" "Rome"

rebind ask "The capital of France is"

rebind ledger undo e0001

Exit codes: 0 success, 1 internal error or failed check, 2 invalid input, 3 numerical, ledger or I/O failure, \
130 interrupted, 141 broken pipe."""

app = new_app(name="rebind", help=HELP, epilog=EPILOG, no_args_is_help=True, add_completion=True)


def _print_version(is_set: bool) -> None:
    if is_set:
        versions = [f"rebind {__version__}", *map(_version_of, ("torch", "transformers"))]
        typer.echo(", ".join(versions))
        raise typer.Exit


def _version_of(package: str) -> str:
    """Return the name and the version of a package without importing it."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


@app.callback(help=HELP)
def _rebind(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of rebind, torch and transformers, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Take the options of `rebind` itself."""


add_command(app, "demo", demo.demo, demo.EXAMPLES)
add_command(app, "edit", edit.edit, edit.EXAMPLES, processes="shared")
add_command(app, "ask", ask.ask, ask.EXAMPLES)
add_command(app, "learn", learn.learn, learn.EXAMPLES)
app.add_typer(ledger.app, name="ledger")
add_command(app, "consolidate", consolidate.consolidate, consolidate.EXAMPLES)
add_command(app, "studio", studio.studio, studio.EXAMPLES)
add_command(app, "trace", trace.trace, trace.EXAMPLES, processes="shared")
add_command(app, "lens", lens.lens, lens.EXAMPLES)
add_command(app, "layers", layers.layers, layers.EXAMPLES, processes="shared")
app.add_typer(evaluation.app, name="eval")
add_command(app, "train", train.train, train.EXAMPLES, processes="own")
add_command(app, "generate", generate.generate, generate.EXAMPLES)
add_command(app, "lab", lab.lab, lab.EXAMPLES, processes="shared")
add_command(app, "moments", moments.moments, moments.EXAMPLES, processes="shared")
app.add_typer(bench.app, name="bench")
add_command(app, "doctor", doctor.doctor, doctor.EXAMPLES)
