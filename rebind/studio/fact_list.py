"""The facts of a ledger as rows: searched, filtered and cut into pages on the server, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rebind.edit.dense.rows import moved_subjects
from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger

STATES = ("all", "on", "off")
PAGE = 50  # rows


@dataclass(frozen=True)
class FactRow:
    """One fact of one edit, and where it is now."""

    edit: Edit
    fact: Fact
    index: int  # among the facts of the edit
    is_on: bool
    memory: str  # "weights" or "dense"
    moved_by: str  # the edit that moved the fact from the dense memory into the weights

    def matches(self, words: Sequence[str]) -> bool:
        """Return whether all of some words, in lower case, are in the fact or the names of its edit."""
        if not words:
            return True
        text = f"{self.fact.text} {self.fact.target} {self.edit.id} {self.edit.method} {self.memory}".casefold()
        return all(word in text for word in words)

    def to_json(self) -> dict[str, Any]:
        """Return what a row of the page shows."""
        before, after = self.fact.parts
        return {
            "edit": self.edit.id,
            "index": self.index,
            "together": len(self.edit.facts),
            "before": before,
            "subject": self.fact.subject,
            "after": after,
            "target": self.fact.target,
            "text": self.fact.text,
            "on": self.is_on,
            "memory": self.memory,
            "moved_by": self.moved_by,
            "method": self.edit.method,
            "created": self.edit.created,
            "forced": self.edit.forced,
        }


def fact_rows(ledger: Ledger) -> Iterator[FactRow]:
    """Yield every fact of a ledger, the newest edit first.

    An edit that moved facts out of the dense memory has no rows of its own: its facts are those of the edits that they
    came from. To switch it off is to have them in the dense memory again.
    """
    active = {edit.id: edit for edit in ledger.active}
    moved = moved_subjects(list(active.values()))
    movers = {source: edit.id for edit in active.values() for source in edit.consolidates}
    for edit in reversed(ledger.edits):
        if edit.consolidates:
            continue
        is_on = edit.id in active
        for index, fact in enumerate(edit.facts):
            is_moved = is_on and edit.id in moved.get(comparable(fact.subject), ())
            memory = "dense" if edit.has_rows and not is_moved else "weights"
            yield FactRow(edit, fact, index, is_on, memory, movers.get(edit.id, "") if is_moved else "")


def page_of_facts(ledger: Ledger, *, search: str = "", state: str = "all", page: int = 1) -> dict[str, Any]:
    """Return one page of the facts that match a search, and how many there are."""
    words, rows = search.casefold().split(), list(fact_rows(ledger))
    matches = [row for row in rows if (state == "all" or row.is_on is (state == "on")) and row.matches(words)]
    pages = max(1, -(-len(matches) // PAGE))
    page = min(page, pages)
    shown = matches[(page - 1) * PAGE : page * PAGE]
    active = {edit.id for edit in ledger.active}
    moves = [edit for edit in ledger.edits if edit.consolidates]
    return {
        "rows": [row.to_json() for row in shown],
        "matches": len(matches),
        "page": page,
        "pages": pages,
        "facts": len(rows),
        "on": sum(row.is_on for row in rows),
        "dense": sum(row.is_on and row.memory == "dense" for row in rows),
        "moves": [{"edit": one.id, "facts": len(one.facts), "on": one.id in active} for one in moves],
    }
