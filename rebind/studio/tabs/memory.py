"""The Memory tab: the same sequence of writes played into one or two fast-weight memories."""

from __future__ import annotations

import inspect
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rebind.errors import FieldError
from rebind.memory import Rule
from rebind.studio import memory_player as player
from rebind.studio.forms import Form
from rebind.studio.replies import reply
from rebind.studio.state import Studio

MOST_MEMORIES = 2
LONGEST_SEED = 10_000


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/memory/. They need no model."""

    async def rules(request: Request) -> Response:
        return reply(
            {
                "rules": [_describe(rule) for rule in player.rules()],
                "features": list(player.FEATURES),
                "limits": {
                    "width": [2, player.MOST_WIDTH],
                    "similarity": [0, player.MOST_SIMILARITY],
                    "pairs": player.MOST_PAIRS,
                },
            }
        )

    async def play(request: Request) -> Response:
        form = await Form.of(request)
        return reply(await run_in_threadpool(_play, form))

    return [Route("/api/memory/rules", rules), Route("/api/memory/play", play, methods=["POST"])]


def _describe(rule: Rule) -> dict[str, Any]:
    gates = [
        {
            "name": name,
            "default": default,
            "largest": player.largest(rule, name),
            "channels": player.has_channels(rule, name),
        }
        for name, default in rule.gates.items()
    ]
    return {"name": rule.name, "about": (inspect.getdoc(rule) or "").split("\n\n")[0], "gates": gates}


def _play(form: Form) -> dict[str, Any]:
    script = player.Script(player.read_pairs(form.text("pairs", "", longest=20_000)))
    geometry = player.Geometry(
        width=form.integer("width", 16, low=2, high=player.MOST_WIDTH),
        similarity=form.number("similarity", 0.0, low=0, high=player.MOST_SIMILARITY),
        orthogonal=form.flag("orthogonal"),
        seed=form.integer("seed", 0, low=0, high=LONGEST_SEED),
    )
    return {
        "writes": script.writes(),
        "keys": script.keys,
        "latest": script.latest(),
        "memories": [script.to_json(one, geometry) for one in _players(form)],
    }


def _players(form: Form) -> list[player.Player]:
    memories = form.fields.get("memories")
    if not isinstance(memories, list) or not 1 <= len(memories) <= MOST_MEMORIES:
        raise FieldError("There is no memory to write", field="", expected=f"1 to {MOST_MEMORIES} memories")
    players = []
    for index, one in enumerate(memories):
        fields = one if isinstance(one, dict) else {}
        gates = fields.get("gates")
        try:
            rule, feature = str(fields.get("rule")), str(fields.get("feature", "identity"))
            players.append(player.read_player(rule, gates if isinstance(gates, dict) else {}, feature))
        except FieldError as error:
            error.field = f"{error.field}-{index}"  # the page has the same fields for each memory
            raise
    return players
