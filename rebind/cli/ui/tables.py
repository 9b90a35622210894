"""Numbers and answers as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rebind.edit.wording import percent


def table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """A light table; columns named in `right` hold numbers, which stay whole: the others give way to them."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, header_style="bold")
    numbers = set(right)
    for name in columns:
        if name in numbers:
            made.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
        else:
            made.add_column(name, overflow="fold")
    return made


def seconds(value: float) -> str:
    """A time, in the units it is felt in.

    >>> seconds(0.04), seconds(75.0), seconds(7300.0)
    ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if value < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes, in the largest unit that leaves a number above one.

    >>> size(512), size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def spoken(text: str, most: int = 48) -> str:
    """What a model said, on one line, spaces made visible only where nothing else is."""
    line = " ".join(text.split())
    if not line:
        return repr(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def change(before: str, after: str, good: bool) -> Text:
    """`before → after`, the latter in colour."""
    return Text.assemble((f"{before} → ", "dim"), (after, "bold green" if good else "yellow"))


def answers_table(first: str) -> Table:
    """For prompts and how they were answered before and after."""
    return table(first, "probability", "rank", "said before", "says now", right=("probability", "rank"))


def begun(score: Mapping[str, Any], target: str) -> str:
    """What a model said, as far as a score knows: the target, or its own first token."""
    return spoken(target) if score["exact"] else f"{spoken(score['says'])}…"


def width(made: Table) -> int:
    """What a table takes where there is room for all of it."""
    return Console(width=1_000).measure(made).maximum


def pairs(rows: Sequence[tuple[str, Any]]) -> Table:
    """Names and values, one a line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, str(value))
    return made


def drift_rows(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How far an edited model is from its base, and what its guard objected to, for `pairs`."""
    rows = []
    if drift := scores.get("drift"):
        moved = f"{nats(drift['kl'])} on unrelated prompts, most {nats(drift['largest'])} after {drift['prompt']!r}"
        rows.append(("drift", f"{moved}; weights moved by {percent(drift['growth'])}"))
    if failed := (scores.get("guard") or {}).get("failed"):
        rows.append(("forced", "; ".join(f"{one['check']}: {one['says']}" for one in failed)))
    return rows


def nats(value: float) -> str:
    """A divergence.

    >>> nats(0.00021), nats(0.25), nats(3.0)
    ('0.0002 nats', '0.25 nats', '3 nats')
    """
    return f"{value:.1g} nats" if value < 0.01 else f"{value:.2g} nats"
