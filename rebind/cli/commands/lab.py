"""`rebind lab`: run an experiment, or list them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import pairs, table

if TYPE_CHECKING:
    from rebind.lab.experiment import Experiment, Point
    from rebind.lab.run import Progress as Told
    from rebind.lab.run import Result

GAP, LEAST = 2, 20  # between columns, and the least of one that holds text

EXAMPLES = """[bold]Examples[/bold]

rebind lab

rebind lab hopfield --quick

rebind lab closed-form width=256 loads=0.5,1,2 --seeds 5 --out runs/wide

A run that was stopped or killed goes on where it was when the same command is given again."""


def lab(
    name: Annotated[str | None, opt.argument("NAME", "An experiment, or list.")] = None,
    overrides: Annotated[
        list[str] | None, opt.argument("KEY=VALUE", "Settings of the experiment; separate list items by commas.")
    ] = None,
    quick: Annotated[
        bool, opt.flag("--quick", "Run a small version whose curves already have the right shape.")
    ] = False,
    seeds: Annotated[
        int | None, opt.value("N", "Number of seeds per point.", default="the experiment's", min=1)
    ] = None,
    out: Annotated[Path | None, opt.value("DIR", "Folder for the results.", default="a new one in runs/")] = None,
    device: opt.Device = None,
    *,
    terminal: Terminal,
) -> None:
    """Run an experiment on what memories hold, forget and cost; without a name, list the experiments."""
    if terminal.debug:
        logging.basicConfig(format="%(relativeCreated)8d ms %(name)s: %(message)s")
        logging.getLogger("rebind.lab").setLevel(logging.DEBUG)
    from rebind.lab.catalogue import EXPERIMENTS, get_experiment
    from rebind.lab.experiment import configure
    from rebind.lab.run import run

    if name in (None, "list"):
        _list(terminal, list(EXPERIMENTS.values()), whole=name == "list")
        return
    experiment = get_experiment(name)
    words = [*(overrides or []), *([] if seeds is None else [f"seeds={seeds}"])]
    config = configure(experiment.quick if quick else experiment.config, words)
    with Phases(terminal) as phases:
        progress = _report_to(phases, experiment.name)
        result = run(experiment, config, out, device=device or "cpu", progress=progress)
    _show(terminal, experiment, result)


def _list(terminal: Terminal, experiments: list[Experiment[Any]], *, whole: bool) -> None:
    """Two lines each, as much of them as fits; the whole with `rebind lab list`."""
    if whole:
        for one in experiments:
            terminal.print(Text(one.name, style="bold"))
            time = f"two cores: {one.takes}; GPU: {one.on_gpu}"
            terminal.print(pairs([("measures", one.title), ("answers", one.answers), ("time", time)]))
    else:
        terminal.print(*_brief(experiments, terminal.out.width))
        terminal.hint("rebind lab list has the lines whole")
    terminal.hint("rebind lab NAME runs one, --quick in seconds; rebind lab --help has the rest")
    told = [
        {"name": one.name, "title": one.title, "answers": one.answers, "takes": one.takes, "on_gpu": one.on_gpu}
        for one in experiments
    ]
    terminal.result({"experiments": told}, "\n".join(one.name for one in experiments))


def _brief(experiments: list[Experiment[Any]], width: int) -> Iterator[Text]:
    """What each measures and how long that takes; then, behind its name, what it answers."""
    cells = [("experiment", "two cores", "GPU"), *((one.name, one.takes, one.on_gpu) for one in experiments)]
    name, takes, on_gpu = (max(map(len, column)) for column in zip(*cells, strict=True))
    behind = max(LEAST, width - name - GAP)
    room = max(LEAST, behind - takes - on_gpu - 2 * GAP)

    def line(first: str, text: str, cpu: str, gpu: str) -> str:
        return (" " * GAP).join([f"{first:<{name}}", f"{text:<{room}}", f"{cpu:>{takes}}", f"{gpu:>{on_gpu}}"])

    yield Text(line("experiment", "what is measured, what it answers", "two cores", "GPU"), style="bold")
    for one in experiments:
        yield Text(line(one.name, shorten(one.title, room, placeholder=" …"), one.takes, one.on_gpu))
        yield Text(" " * (name + GAP) + shorten(one.answers, behind, placeholder=" …"), style="dim")


def _report_to(phases: Phases, name: str) -> Told:
    def told(done: int, total: int, point: Point) -> None:
        doing = ", ".join(f"{key} {value}" for key, value in point.items() if key != "seed") if done < total else ""
        phases.count(name, done, total, doing)

    return told


def _show(terminal: Terminal, experiment: Experiment[Any], result: Result) -> None:
    from rebind.lab.run import FIGURE

    terminal.print(Text(experiment.title, style="bold"))
    made = table("", "claim", "measured")
    for claim in result.claims:
        made.add_row(Text("✓", "green") if claim.holds else Text("✗", "bold red"), claim.says, claim.got)
    terminal.print(made)
    terminal.print(
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
        terminal.hint("no figure: pip install 'rebind[lab]' for it, then run the same command again")
    claims = [{"says": claim.says, "holds": claim.holds, "got": claim.got} for claim in result.claims]
    document = {"folder": str(result.folder), "config": result.config, "claims": claims, "rows": result.rows}
    terminal.result(document, str(result.folder))
