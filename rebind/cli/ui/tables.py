"""Tables, and numbers formatted for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rebind.cli.ui.terminal import Terminal
from rebind.edit.wording import percent

MAX_TEXT_LENGTH = 48  # characters in a cell
LISTED = 20  # rows of a long table that are printed
ANSWER_GROUPS = (
    ("subject", "subject kept", "questions about the subject that the search did not see"),
    ("kept", "subject kept", "questions about the subject that the search kept"),
    ("neighbors", "neighbors kept", "questions about other subjects"),
)


def table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a light table. Columns named in `right` have numbers, which are not wrapped; other columns are."""
    grid = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    numbers = set(right)
    for name in columns:
        if name in numbers:
            grid.add_column(name, justify="right", no_wrap=True, overflow="ellipsis")
        else:
            grid.add_column(name, overflow="fold")
    return grid


def pairs(rows: Sequence[tuple[str, Any]]) -> Table:
    """Return a table of names and values, one pair per line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, str(value))
    return grid


def seconds(value: float) -> str:
    """Return a duration in suitable units.

    >>> seconds(0.04), seconds(75.0), seconds(7300.0)
    ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if value < 60:
        return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
    minutes, remainder = divmod(round(value), 60)
    return f"{minutes} min {remainder} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, name: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "edit"), counted(2, "edit")
    ('1 edit', '2 edits')
    """
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def one_line(text: str, longest: int = MAX_TEXT_LENGTH) -> str:
    """Return a text on one line, shortened; a text without words stays visible.

    >>> one_line("in\\n Rome"), one_line(" "), one_line(""), one_line("far too long", 8)
    ('in Rome', "' '", '(nothing)', 'far too…')
    """
    line = " ".join(text.split())
    if not line:
        return repr(text) if text else "(nothing)"
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def last_words(text: str, longest: int = MAX_TEXT_LENGTH) -> str:
    """Return the end of a text on one line, from the beginning of a word.

    >>> last_words("We talked. The capital is", 18)
    '… The capital is'
    """
    line = " ".join(text.split())
    return line if len(line) <= longest else f"… {line[2 - longest :].partition(' ')[2]}"


def print_answers(terminal: Terminal, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the answers to facts before and after an edit, and how many are now right.

    Each row has a text, a target, and the scores "before" and "after".
    """
    grid = table("fact", "probability", "rank", "before", "after", right=("probability", "rank"))
    for row in rows[:LISTED]:
        before, after = row["before"], row["after"]
        grid.add_row(
            f"{row['text']} → {row['target']}",
            _change(percent(before["probability"]), percent(after["probability"]), after["exact"]),
            _change(str(before["rank"]), str(after["rank"]), after["rank"] == 1),
            *(one_line(score.get("continues") or first_words(score, row["target"])) for score in (before, after)),
        )
    terminal.print(grid)
    print_number_left_out(terminal, rows)
    if len(rows) > 1:
        before, after = (sum(row[when]["exact"] for row in rows) for when in ("before", "after"))
        terminal.print(f"{after} of {len(rows)} facts answered with the whole target (before: {before})")


def print_number_left_out(terminal: Terminal, rows: Sequence[object]) -> None:
    """Print how many rows are left out of a table of the first `LISTED`, if any."""
    if len(rows) > LISTED:
        terminal.hint(f"… and {len(rows) - LISTED} more; --json lists all of them")


def first_words(score: Mapping[str, Any], target: str) -> str:
    """Return the answer of a model, as far as its score has it: the target, or the first token of another answer."""
    return target if score["exact"] else f"{one_line(score['says'])}…"


def _change(before: str, after: str, is_good: bool) -> Text:
    return Text.assemble((f"{before} → ", "dim"), (after, "bold green" if is_good else "yellow"))


def unchanged_rows(outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how many other answers an edit kept, for `pairs`."""
    rows: list[tuple[str, str]] = []
    for group, name, meaning in ANSWER_GROUPS:
        if number := outcome["asked"].get(group):
            changed = sum(answer["about"] == group for answer in outcome["changed"])
            label = "" if rows and rows[-1][0] == name else name  # one label for two rows about the subject
            rows.append((label, f"{number - changed} of {number} {meaning}"))
    return rows


def outcome_rows(outcome: Mapping[str, Any], framings: Sequence[str]) -> list[tuple[str, str]]:
    """Return the framings in which facts are said, and how many other answers an edit kept, for `pairs`."""
    said = outcome["said"]
    shares = ", ".join(f"{name} {percent(said[name])}" for name in framings if name in said)
    return [("said", shares), *unchanged_rows(outcome)]


def earlier_rows(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the earlier edits about the same subjects whose facts an edit replaces or says as well, for `pairs`."""
    from rebind.edit.ledger.edit import ROWS

    joint = settings.get(ROWS, {}).get("joint", [])
    rows = []
    for name, field in (("replaces", "replaces"), ("repeats", "carries")):
        if ids := dict.fromkeys(id for one in joint for id in one[field]):
            rows.append((name, f"what {', '.join(ids)} says about the same subject"))
    return rows


def drift_rows(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how far an edited model is from its base model and which checks failed, for `pairs`."""
    rows = []
    if drift := scores.get("drift"):
        largest = f", largest {drift['largest']:.2g} nats after {drift['prompt']!r}" if drift["largest"] else ""
        weights = f"changed by {percent(drift['growth'])}" if drift["growth"] else "unchanged"
        rows.append(("drift", f"{drift['kl']:.2g} nats on unrelated prompts{largest}; weights {weights}"))
    if failed := (scores.get("guard") or {}).get("failed"):
        rows.append(("forced", "; ".join(f"{failure['check']}: {failure['says']}" for failure in failed)))
    return rows


def memory_rows(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return how large the dense memory is and how often ordinary text reads it, for `pairs`."""
    if not (memory := scores.get("memory")):
        return []
    return [
        ("memory", f"{counted(memory['rows'], 'row')}, read at {percent(memory['fires'])} of the tokens of other text")
    ]
