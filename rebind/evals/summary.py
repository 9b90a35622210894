"""Summarize a run: scores with intervals, and drift, for every state of the model, as JSON and as tables.

`compare` puts several runs side by side, and lists the settings besides the method in which they differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rebind.errors import InputError
from rebind.evals.answers import FRAMINGS
from rebind.evals.baselines import BASELINES
from rebind.evals.records import Record
from rebind.evals.scores import FRAMED_SCORES, OTHER_SCORES, framed_name, summarize
from rebind.storage import Row, RunFolder, check_json, damage_errors, flatten, read_json_object

DRIFT = {  # name → meaning
    "perplexity": "of text that no edit is about",
    "kl": "nats, next token on canary prompts: mean",
    "largest_kl": "the same: largest",
    "growth": "largest ‖W' − W‖ / ‖W‖ of a site",
}
# Settings that are expected to differ, or shown elsewhere
NOT_COMPARED = {"method", "data.name", "data.skipped", "model.name", "drift.text"}
COLUMNS = (
    *("free", "free_chat", "EA", "ES", "PS", "NS", "S", "choice", "portability", "free_reversed"),
    *("locality", "same_subject", "GE", "perplexity", "kl", "growth"),
)
RETENTION = ("free", "free_chat", "EA")
MAX_AGES = 10  # groups of records by age in a sequence

Summary = dict[str, Any]


def summarize_run(
    config: dict[str, Any],
    records: Sequence[Record],
    rows: Sequence[Row],
    drift: Sequence[Row],
    baselines: Sequence[Row] = (),
) -> Summary:
    """Return the scores with intervals and the drift of every state of the model, the baselines, and scores by age."""

    def estimate(answers: Sequence[Row]) -> dict[str, dict[str, float]]:
        answered_records = [records[row["record"]] for row in answers]
        return summarize(answered_records, answers, seed=config["seed"], rounds=config["bootstrap"])

    states = []
    for edits in sorted({row["edits"] for row in rows}):
        last = [row for row in rows if row["edits"] == edits]
        columns = {name: [row[name] for row in drift if row["edits"] == edits] for name in DRIFT}
        # Means over single edits; None if a broken model returned a number that is not finite.
        means = {
            name: None if None in values else round(fmean(values), 6) for name, values in columns.items() if values
        }
        states.append({"edits": edits, "records": len(last), "scores": estimate(last), "drift": means})
    answers_of = {name: [row for row in baselines if row["baseline"] == name] for name in BASELINES}
    size = config["protocol"]["batch"]
    ages = _ages(last, size) if config["protocol"]["name"] == "sequential" else []
    return {
        "model": config["model"]["name"],
        "data": config["data"]["name"],
        "skipped": len(config["data"]["skipped"]),
        "method": config["method"],
        "protocol": config["protocol"]["name"],
        "batch": size,
        "seed": config["seed"],
        "states": states,
        "baselines": [
            {"name": name, "records": len(records), "scores": estimate(answers)}
            for name, answers in answers_of.items()
            if len(answers) == len(records)
        ],
        "retention": [
            {
                "records": [group[0]["record"], group[-1]["record"] + 1],
                "scores": {name: score for name, score in estimate(group).items() if name in RETENTION},
            }
            for group in ages
        ],
    }


def _ages(rows: Sequence[Row], batch: int) -> list[Sequence[Row]]:
    """Return the rows of the last state in the order of writing, in groups of one batch or several."""
    batches = -(-len(rows) // batch)
    size = batch * -(-batches // MAX_AGES)
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def describe_protocol(summary: Summary) -> str:
    """Return the protocol of a run in words."""
    descriptions = {"single": "one edit at a time", "batch": "all in one batch"}
    return descriptions.get(summary["protocol"], f"batches of {summary['batch']} in sequence")


def markdown_report(summary: Summary) -> str:
    """Return table.md: the scores in each framing, the other scores, then states and ages of a sequence."""
    count = summary["states"][0]["records"]
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    lines = [
        f"# {summary['method']} on {summary['model']}, {describe_protocol(summary)}",
        "",
        f"{count} record{'s' * (count != 1)} of {summary['data']}{skipped}, seed {summary['seed']}.",
        "",
        *markdown_table(*framings_table(summary)),
        "",
        *(f"- {name}: {meaning}" for name, meaning in FRAMED_SCORES.items()),
        "",
        *markdown_table(*scores_table(summary)),
    ]
    if summary["retention"]:
        lines += ["", *markdown_table(*states_table([("", summary)])), "", *markdown_table(*retention_table(summary))]
    return "\n".join(lines) + "\n"


def framings_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per model and framing: before, after, and the baselines."""
    states = summary["states"]
    models = [("before", states[0]), ("after", states[-1]), *((row["name"], row) for row in summary["baselines"])]
    rows = []
    for label, model in models:
        values = _values(model)
        for framing in FRAMINGS:
            names = [framed_name(name, framing) for name in FRAMED_SCORES]
            if any(name in values for name in names):
                free, *others = (_cell(values, name) for name in names)
                rows.append([label, framing, free, _interval(model["scores"].get(names[0])), *others])
    first, *others = FRAMED_SCORES
    return ["model", "framing", first, "95 %", *others], rows


def scores_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return a header, one row per score that has no framings, and the rows of drift."""
    first, last = summary["states"][0], summary["states"][-1]
    before, after = _values(first), _values(last)
    baselines = {row["name"]: _values(row) for row in summary["baselines"]}
    rows = []
    for name, meaning in (OTHER_SCORES | DRIFT).items():
        if name in after:
            values = [_cell(before, name), _cell(after, name), _interval(last["scores"].get(name))]
            rows.append([name, *values, *(_cell(baseline, name) for baseline in baselines.values()), meaning])
    return ["score", "before", "after", "95 %", *baselines, "meaning"], rows


def retention_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per age of a sequence: the scores at the end, from the first records to the last."""
    names = [name for name in RETENTION if any(name in group["scores"] for group in summary["retention"])]
    rows = []
    for group in summary["retention"]:
        begin, stop = group["records"]
        rows.append([f"{begin + 1:,} – {stop:,}", *(_cell(_values(group), name) for name in names)])
    return ["written", *names], rows


def _interval(score: dict[str, float] | None) -> str:
    return f"{format_score(score['low'])} – {format_score(score['high'])}" if score else ""


def states_table(runs: Sequence[tuple[str, Summary]]) -> tuple[list[str], list[list[str]]]:
    """Return a header and one row per state of each (name, summary), with the main scores of the runs."""
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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if name in ("run", "score", "meaning", "model", "framing") else "---:" for name in header]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def format_score(value: float) -> str:
    """Format a score with three significant digits.

    >>> format_score(0.9137), format_score(26.7812), format_score(612.3), format_score(-0.25)
    ('.914', '26.78', '612.3', '-.250')
    """
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _values(part: dict[str, Any]) -> dict[str, float | None]:
    """Return the scores of a state, a baseline or a group of records without intervals, and the drift of a state."""
    return {**{name: score["value"] for name, score in part["scores"].items()}, **part.get("drift", {})}


def _cell(values: dict[str, float | None], name: str) -> str:
    """Format a value; None means that it was measured and is not finite."""
    value = values.get(name, math.nan)
    return "not finite" if value is None else "" if math.isnan(value) else format_score(value)


# Several runs


@dataclass(frozen=True)
class Comparison:
    """Several runs in one table."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]  # settings in which the runs differ
    runs: list[tuple[str, Summary]]  # (name, summary)

    @property
    def markdown(self) -> str:
        return "\n".join([*markdown_table(self.header, self.rows), "", *self.notes]).rstrip() + "\n"


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the finished runs in these folders."""
    if len(folders) < 2:
        raise InputError(f"There is only {len(folders)} run", expected="two or more", code="too_few_runs")
    configs = [RunFolder.read_config(folder, "evaluation") for folder in folders]
    summaries = [_read_summary(folder) for folder in folders]
    runs = list(zip(_names(folders, configs), summaries, strict=True))
    return Comparison(*states_table(runs), _notes(configs), runs)


def _read_summary(folder: Path) -> Summary:
    """Return the summary of a finished run; raise if it was altered, or cannot be shown."""
    if (stored := read_json_object(folder / "summary.json")) is None:
        raise InputError(
            f"The evaluation in {folder} is not finished",
            advice="Run the same command again to finish it",
            code="run_not_finished",
        )
    advice = "Run the same evaluation again to replace it"
    with damage_errors(folder / "summary.json", advice=advice, code="summary_damaged"):
        summary = check_json(stored)
        markdown_report(summary)
    return summary


def _names(folders: Sequence[Path], configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the methods if they differ, or else as much of the paths of the folders as distinguishes them."""
    methods = [str(config.get("method")) for config in configs]
    paths = [folder.resolve() for folder in folders]
    tails = (["/".join(path.parts[-parts:]) for path in paths] for parts in itertools.count(1))
    return next(names for names in itertools.chain([methods], tails) if len(set(names)) >= len(set(paths)))


def _notes(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each setting besides the method in which the runs differ.

    Resolved settings (`used`) are compared only between runs of one method, because every method has its own.
    """
    leaves = [flatten(config) for config in configs]
    notes = []
    for name in sorted({name for leaf in leaves for name in leaf} - NOT_COMPARED):
        groups: dict[str, list[str]] = {}
        for leaf in leaves:
            groups.setdefault(str(leaf.get("method")) if name.startswith("used.") else "", []).append(
                str(leaf.get(name))
            )
        for values in groups.values():
            if len(set(values)) > 1:
                notes.append(f"The runs differ in {name} ({', '.join(f'{value:.40}' for value in values)}).")
    return notes
