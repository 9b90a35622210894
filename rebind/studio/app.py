"""The Starlette application: the page, the jobs, and the routes of every tab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rebind.errors import FieldError, RebindError
from rebind.studio.forms import Form
from rebind.studio.replies import problem, reply
from rebind.studio.security import Access, Gate
from rebind.studio.state import Studio
from rebind.studio.tabs import edit, lab, ledger, memory, trace
from rebind.version import __version__

STATIC = Path(__file__).parent / "static"
LONGEST_WAIT = 20.0  # seconds that a request for the next change of a job stays open
REFUSALS = {
    404: ("There is nothing at this address", "not_found"),
    405: ("This address does not take such a request", "wrong_method"),
    413: ("The request is too large", "request_too_large"),
}
TABS: dict[str, Callable[[Studio], list[Route]]] = {
    "edit": edit.routes,
    "ledger": ledger.routes,
    "trace": trace.routes,
    "memory": memory.routes,
    "lab": lab.routes,
}


def create_app(studio: Studio, access: Access) -> Gate:
    """Return the application behind its gate; `access` decides which requests it answers."""
    routes: list[Any] = [Route("/", _page), *_common_routes(studio)]
    for tab in TABS.values():
        routes += tab(studio)
    routes.append(Mount("/static", StaticFiles(directory=STATIC)))
    handlers: dict[Any, Any] = {
        RebindError: lambda request, error: problem(error),
        HTTPException: _as_problem,
        Exception: lambda request, error: problem(error),
    }
    return Gate(Starlette(routes=routes, exception_handlers=handlers), access)


def _common_routes(studio: Studio) -> list[Route]:
    def state(request: Request) -> Response:
        jobs = [{"id": job.id, "name": job.name} for job in studio.jobs.unfinished]
        model = {"model": studio.model_name, "loaded": studio.loaded, "problem": studio.load_problem}
        ledger = studio.ledger_digest if studio.loaded else ""
        return reply({"version": __version__, **model, "models": studio.models, "ledger": ledger, "jobs": jobs})

    async def load(request: Request) -> Response:
        form = await Form.of(request)
        return reply(studio.load(form.text("model", longest=1_000)).to_json(), 202)

    async def job(request: Request) -> Response:
        after = Form(dict(request.query_params)).integer("after", -1, low=-1, high=2**31)
        one = studio.jobs.get(request.path_params["id"])
        await one.wait(after, LONGEST_WAIT)
        return reply(one.to_json())

    async def cancel(request: Request) -> Response:
        return reply(studio.jobs.cancel(request.path_params["id"]).to_json())

    return [
        Route("/api/state", state),
        Route("/api/model", load, methods=["POST"]),
        Route("/api/jobs/{id}", job),
        Route("/api/jobs/{id}/cancel", cancel, methods=["POST"]),
    ]


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _as_problem(request: Request, error: HTTPException) -> Response:
    sentence, code = REFUSALS.get(error.status_code, REFUSALS[404])
    return problem(FieldError(sentence, code=code), error.status_code)
