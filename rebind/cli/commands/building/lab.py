"""`rebind lab`: run an experiment, or list them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rebind.cli import completion
from rebind.cli import options as opt
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.errors import FAILED_CHECK
from rebind.cli.ui.tables import pairs, seconds, table
from rebind.limits import MAX_SEEDS

if TYPE_CHECKING:
    from rebind.lab.experiment import Experiment, Point
    from rebind.lab.run import ExperimentResult

EXAMPLES = opt.examples(
    "rebind lab",
    "rebind lab hopfield --quick",
    "rebind lab closed-form width=256 loads=0.5,1,2 --seeds 5 --out runs/wide",
    note="To resume a run that was stopped or killed, run the same command again. The exit code is 1 if a claim does "
    "not hold.",
)


def lab(
    name: Annotated[
        str | None,
        opt.argument(
            "NAME", "An experiment, or list.", autocompletion=completion.one_of("list", *completion.EXPERIMENTS)
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, opt.argument("KEY=VALUE", "Settings of the experiment; separate list items by commas.")
    ] = None,
    quick: Annotated[
        bool, opt.flag("--quick", "Run a small version that takes seconds; its curves already have the right shape.")
    ] = False,
    seeds: Annotated[
        int | None, opt.value("N", "Number of seeds per point.", default="the experiment's", min=1, max=MAX_SEEDS)
    ] = None,
    out: Annotated[Path | None, opt.value("DIR", "Folder for the results.", default="a new one in runs/")] = None,
    device: opt.Device = None,
    *,
    terminal: Terminal,
) -> None:
    """Run an experiment on the capacity, forgetting and cost of memories; without a name, list the experiments."""
    from rebind.lab.catalogue import EXPERIMENTS, get_experiment
    from rebind.lab.run import run_experiment

    if name in (None, "list"):
        _list(terminal, list(EXPERIMENTS.values()))
        return
    experiment_class = get_experiment(name)
    settings = [*(overrides or []), *([] if seeds is None else [f"seeds={seeds}"])]
    experiment = (experiment_class.quick() if quick else experiment_class()).with_settings(settings)
    with Phases(terminal) as phases:

        def report(done: int, total: int, point: Point) -> None:
            note = ", ".join(f"{key} {value}" for key, value in point.items() if key != "seed")
            phases.count(experiment.name, done, total, note)

        result = run_experiment(experiment, out, device=device or "cpu", progress=report)
    if not terminal.writes:
        return
    _show(terminal, experiment, result)
    if result.failed_claims:
        failed = "; ".join(f"{claim.statement} ({claim.measured})" for claim in result.failed_claims)
        terminal.report("error", f"{len(result.failed_claims)} of {len(result.claims)} claims do not hold: {failed}")
        raise typer.Exit(FAILED_CHECK)


def _list(terminal: Terminal, experiments: list[type[Experiment]]) -> None:
    grid = table("experiment", "measures, reproduces", "two cores", "GPU", right=("two cores", "GPU"))
    for experiment in experiments:
        title = Text.assemble(experiment.title, (f"\n{experiment.answers}", "dim"))
        grid.add_row(experiment.name, title, experiment.cpu_time, experiment.gpu_time)
    grid.columns[0].no_wrap = True
    terminal.print(grid)
    terminal.hint("rebind lab NAME runs one, with --quick in seconds; see rebind lab --help")
    fields = ("name", "title", "answers", "cpu_time", "gpu_time")
    document = {"experiments": [{field: getattr(experiment, field) for field in fields} for experiment in experiments]}
    terminal.result(document, "\n".join(experiment.name for experiment in experiments))


def _show(terminal: Terminal, experiment: Experiment, result: ExperimentResult) -> None:
    claims = table("", "claim", "measured")
    for claim in result.claims:
        mark = Text("✓", "green") if claim.holds else Text("✗", "bold red")
        claims.add_row(mark, claim.statement, claim.measured)
    resumed = f", {result.resumed} of them from an earlier run" if result.resumed else ""
    files = ", ".join(sorted(file.name for file in result.folder.iterdir() if not file.name.startswith(".")))
    points = f"{len(result.rows)}{resumed}"
    rows = [("points", points), ("time", seconds(result.seconds)), ("results", result.folder), ("files", files)]
    terminal.print(Text(experiment.title, style="bold"), claims, pairs(rows))
    if find_spec("matplotlib") is None:
        terminal.hint("There is no figure: run pip install 'rebind[lab]', then the same command again")
    document = {
        "folder": str(result.folder),
        "config": result.config,
        "seconds": result.seconds,
        "claims": [vars(claim) for claim in result.claims],
        "rows": result.rows,
    }
    terminal.result(document, str(result.folder))
