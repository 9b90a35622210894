"""The result of a run in a few numbers: scores with intervals and drift per state of the model, as JSON and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rebind.evals.records import Record
from rebind.evals.scores import SCORES, summarize
from rebind.storage import Row

DRIFT = {  # name → meaning
    "perplexity": "of text that no edit is about",
    "kl": "nats, next token on canary prompts: mean",
    "largest_kl": "the same: largest",
    "growth": "largest ‖W' − W‖ / ‖W‖ of a site",
}
COLUMNS = ("S", "ES", "PS", "NS", "EA", "PA", "free", "portability", "locality", "GE", "perplexity", "kl", "growth")

Summary = dict[str, Any]


def summarize_run(
    config: dict[str, Any], records: Sequence[Record], rows: Sequence[Row], drift: Sequence[Row]
) -> Summary:
    """Return scores with intervals, and drift, in every state of the model."""
    base = {row["record"]: row for row in rows if row["edits"] == 0}
    states = []
    for edits in sorted({row["edits"] for row in rows}):
        here = [row for row in rows if row["edits"] == edits]
        scores = summarize(
            [records[row["record"]] for row in here],
            here,
            [base[row["record"]] for row in here],
            seed=config["seed"],
            rounds=config["bootstrap"],
        )
        mean_drift = _mean_drift([row for row in drift if row["edits"] == edits])
        states.append({"edits": edits, "records": len(here), "scores": scores, "drift": mean_drift})
    return {
        "model": config["model"]["name"],
        "data": config["data"]["name"],
        "skipped": len(config["data"]["skipped"]),
        "method": config["method"],
        "protocol": config["protocol"]["name"],
        "batch": config["protocol"]["batch"],
        "seed": config["seed"],
        "states": states,
    }


def _mean_drift(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return means over single edits; None where a broken model returned a number that is not finite."""
    columns = {name: [row[name] for row in rows] for name in DRIFT} if rows else {}
    return {name: None if None in values else round(fmean(values), 6) for name, values in columns.items()}


def describe_protocol(summary: Summary) -> str:
    """Return the protocol of a run in words."""
    words = {"single": "one edit at a time", "batch": "all in one batch"}
    return words.get(summary["protocol"], f"batches of {summary['batch']} in sequence")


def markdown_report(summary: Summary) -> str:
    """Return table.md: all states in short, then every score of the last state with its interval."""
    count = summary["states"][0]["records"]
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    lines = [
        f"# {summary['method']} on {summary['model']}, {describe_protocol(summary)}",
        "",
        f"{count} record{'s' * (count != 1)} of {summary['data']}{skipped}, seed {summary['seed']}.",
        "",
        *markdown_table(*states_table([("", summary)])),
        "",
        *markdown_table(["score", "before", "after", "95%", "meaning"], scores_table(summary)),
    ]
    return "\n".join(lines) + "\n"


def states_table(runs: Sequence[tuple[str, Summary]]) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per state of each (name, summary), with the main scores that the runs have."""
    states = [(run, state, _values(state)) for run, summary in runs for state in summary["states"]]
    present = [name for name in COLUMNS if any(name in values for *_, values in states)]
    rows = [
        [
            run,
            "before" if state["edits"] == 0 else f"{state['edits']:,}",
            f"{state['records']:,}",
            *(_cell(values, name) for name in present),
        ]
        for run, state, values in states
    ]
    header = ["run", "edits", "records", *present]
    return (header, rows) if any(name for name, _ in runs) else (header[1:], [row[1:] for row in rows])


def scores_table(summary: Summary) -> list[list[str]]:
    """Return rows (name, before, after, interval, meaning) of every score and drift of the last state."""
    first, last = summary["states"][0], summary["states"][-1]
    before, after = _values(first), _values(last)
    rows = []
    for name in after:
        score = last["scores"].get(name)
        interval = f"{format_score(score['low'])} – {format_score(score['high'])}" if score else ""
        rows.append([name, _cell(before, name), _cell(after, name), interval, (SCORES | DRIFT)[name]])
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if name in ("run", "score", "meaning") else "---:" for name in header]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def format_score(value: float) -> str:
    """Format a score with three significant digits.

    >>> format_score(0.9137), format_score(26.7812), format_score(612.3), format_score(-0.25)
    ('.914', '26.78', '612.3', '-.250')
    """
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _values(state: dict[str, Any]) -> dict[str, float | None]:
    return {**{name: score["value"] for name, score in state["scores"].items()}, **state["drift"]}


def _cell(values: dict[str, float | None], name: str) -> str:
    """Format a value; None means that it was measured and is not finite."""
    value = values.get(name, math.nan)
    return "not finite" if value is None else "" if math.isnan(value) else format_score(value)
