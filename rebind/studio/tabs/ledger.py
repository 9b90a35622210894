"""The Ledger tab."""

from __future__ import annotations

from starlette.routing import Route

from rebind.studio.state import Studio


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/ledger/."""
    return []
