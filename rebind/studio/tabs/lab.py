"""The Lab tab: an experiment in its quick version, its curves while they are measured, its claims at the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rebind.studio.forms import Form
from rebind.studio.jobs import JobControl
from rebind.studio.replies import reply
from rebind.studio.state import Studio

if TYPE_CHECKING:
    from rebind.lab import Experiment
    from rebind.lab.experiment import Point
    from rebind.storage import Row

FIGURE = "figure.svg"


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/lab/. They need no model."""

    async def experiments(request: Request) -> Response:
        from rebind.lab import EXPERIMENTS

        fields = ("name", "title", "answers")
        return reply({"experiments": [{name: getattr(one, name) for name in fields} for one in EXPERIMENTS.values()]})

    async def run(request: Request) -> Response:
        from rebind.lab import EXPERIMENTS

        form = await Form.of(request)
        name = form.choice("experiment", EXPERIMENTS, "closed-form")
        experiment = EXPERIMENTS[name].quick()
        return reply(studio.jobs.submit("lab", partial(measure, experiment)).to_json(), 202)

    return [Route("/api/lab/experiments", experiments), Route("/api/lab/run", run, methods=["POST"])]


def measure(experiment: Experiment, control: JobControl) -> dict[str, Any]:
    """Run an experiment and publish its panels after every batch.

    It runs in a folder of its own that is removed afterwards, so that a cancelled run leaves nothing to resume.
    """
    from rebind.lab import run_experiment

    panels = experiment.panels()
    total = sum(map(len, experiment.batches()))

    def progress(done: int, total: int, point: Point) -> None:
        control.stage("measuring" if point else "checking the claims, drawing the figure", done / total)

    def publish(rows: list[Row]) -> None:
        control.publish({"done": len(rows), "total": total, "panels": [panel.to_json(rows) for panel in panels]})

    publish([])
    with TemporaryDirectory(prefix="rebind-lab-") as folder:
        result = run_experiment(experiment, Path(folder) / "run", progress=progress, on_rows=publish)
        figure = result.folder / FIGURE
        table = experiment.table(result.rows)
        return {
            "experiment": experiment.name,
            "title": experiment.title,
            "answers": experiment.answers,
            "points": len(result.rows),
            "seconds": result.seconds,
            "panels": [panel.to_json(result.rows) for panel in panels],
            "claims": [vars(claim) for claim in result.claims],
            "table": {"header": list(table.header), "rows": [list(row) for row in table.rows]},
            "figure": figure.read_text(encoding="utf-8")
            if figure.is_file()
            else "",  # without matplotlib there is none
        }
