"""The comparison of methods on a terminal: a table for each protocol."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.methods.states import SCORES, WAYS, Row


def show(rows: Sequence[Row], console: Console) -> None:
    """A table for each protocol."""
    for protocol, found in dict.fromkeys((row.protocol, row.found) for row in rows):
        some = [row for row in rows if (row.protocol, row.found) == (protocol, found)]
        title = "in one edit" if protocol == "batch" else f"one batch after another, {WAYS[found]}"
        if protocol == "batch":  # rows come in the order of their weight
            some.sort(key=lambda row: (row.method != "before", row.facts))
        notes = [f"{row.method} at {row.facts:,}: {row.why}" for row in some if row.why]
        notes += [f"{row.method} at {row.facts:,} is {row.same}" for row in some if row.same]
        if any(row.made for row in some):
            notes.append(
                "made: neighbors of records are facts too; PS and NS are of records, what they ask is not written"
            )
        console.print(table(title, some, "; ".join(notes)))


def table(title: str, rows: Sequence[Row], note: str) -> Table:
    """A line a row: scores, what became of the model, and where the facts were written."""
    made = Table(title=title, title_justify="left", title_style="bold", caption=note or None, caption_justify="left")
    for column in ("method", "facts", *SCORES, "perplexity", "drift", "growth", "layers", "λ"):
        made.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        count = f"{row.groups} × {row.facts}" if row.groups > 1 else f"{row.facts:,}"
        scores = (_told(row.scores.get(name, {}).get("value"), ".3f") for name in SCORES)
        made.add_row(
            row.method + (", made" if row.made else ""),
            count,
            *scores,
            _told(row.perplexity, ".2f"),
            _told(row.drift, ".3f"),
            _told(row.growth, ".2f"),
            f"{row.layers[0]}-{row.layers[-1]}" if len(row.layers) > 1 else ",".join(map(str, row.layers)),
            _told(row.lam, ".0f"),
        )
    return made


def _told(value: float | None, how: str) -> str:
    return "—" if value is None else format(value, how)
