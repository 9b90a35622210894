"""`rebind lab`: run an experiment, or list them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from rebind.cli import options
from rebind.cli.screen import Screen, screen
from rebind.cli.tables import pairs, table

if TYPE_CHECKING:
    from rebind.lab.experiment import Experiment, Point
    from rebind.lab.run import Progress as Told
    from rebind.lab.run import Result

EXAMPLES = """[bold]Examples[/bold]

rebind lab

rebind lab hopfield --quick

rebind lab closed-form width=256 loads=0.5,1,2 --seeds 5 --out runs/wide

A run that was stopped or killed goes on where it was when the same command is given again."""


def lab(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The experiment. Default: list them.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of its config; lists as a,b,c.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version whose shape is already right.")] = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Seeds a point. Default: the experiment's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results. Default: one in runs/.")
    ] = None,
    device: options.Device = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure and draw what memories hold, forget and cost; without a name, list the experiments."""
    with screen(as_json, quiet, debug) as shown:
        if debug:
            logging.basicConfig(format="%(relativeCreated)8d ms %(name)s: %(message)s")
            logging.getLogger("rebind.lab").setLevel(logging.DEBUG)
        from rebind.lab.catalogue import EXPERIMENTS, get_experiment
        from rebind.lab.experiment import configure
        from rebind.lab.run import run

        if name in (None, "list"):
            _list(shown, list(EXPERIMENTS.values()))
            return
        experiment = get_experiment(name)
        words = [*(overrides or []), *([] if seeds is None else [f"seeds={seeds}"])]
        config = configure(experiment.quick if quick else experiment.config, words)
        with _bar(shown, experiment.name) as progress:
            result = run(experiment, config, out, device=device or "cpu", progress=progress)
        _show(shown, experiment, result)


def _list(shown: Screen, experiments: list[Experiment[Any]]) -> None:
    made = table("experiment", "what is measured", "answers", "CPU", "GPU", right=["CPU", "GPU"])
    for one in experiments:
        made.add_row(one.name, one.title, one.answers, one.takes, one.on_gpu)
    shown.show(made)
    shown.hint("rebind lab NAME runs one, --quick in seconds; rebind lab --help has the rest")
    told = [
        {"name": one.name, "title": one.title, "answers": one.answers, "takes": one.takes, "on_gpu": one.on_gpu}
        for one in experiments
    ]
    shown.result({"experiments": told}, "\n".join(one.name for one in experiments))


@contextmanager
def _bar(shown: Screen, name: str) -> Iterator[Told]:
    drawn = Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
        TimeElapsedColumn(),
        console=shown.err,
        disable=not (shown.for_people and shown.err.is_terminal),
    )
    task = drawn.add_task(name, total=None, doing="")

    def told(done: int, total: int, point: Point) -> None:
        doing = ", ".join(f"{key} {value}" for key, value in point.items() if key != "seed") if done < total else ""
        drawn.update(task, completed=done, total=total, doing=doing)

    with drawn:
        yield told


def _show(shown: Screen, experiment: Experiment[Any], result: Result) -> None:
    from rebind.lab.run import FIGURE

    shown.show(Text(experiment.title, style="bold"))
    made = table("", "claim", "measured")
    for claim in result.claims:
        made.add_row(Text("✓", "green") if claim.holds else Text("✗", "bold red"), claim.says, claim.got)
    shown.show(made)
    shown.show(
        pairs(
            [
                (
                    "points",
                    f"{len(result.rows)}" + (f", {result.resumed} of them from before" if result.resumed else ""),
                ),
                ("results", result.folder),
                ("files", ", ".join(sorted(file.name for file in result.folder.iterdir()))),
            ]
        )
    )
    if not (result.folder / f"{FIGURE}.png").exists() and find_spec("matplotlib") is None:
        shown.hint("no figure: pip install 'rebind[lab]' for it, then run the same command again")
    claims = [{"says": claim.says, "holds": claim.holds, "got": claim.got} for claim in result.claims]
    document = {"folder": str(result.folder), "config": result.config, "claims": claims, "rows": result.rows}
    shown.result(document, str(result.folder))
