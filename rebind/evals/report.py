"""What a run found, in few numbers: summary.json, table.md, figures; and several runs side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rebind.edit.methods import METHODS
from rebind.errors import InputError
from rebind.evals.records import Record
from rebind.evals.scores import SCORES, summarise
from rebind.evals.store import Row, read_json, write_json
from rebind.files import write_atomically

SUMMARY, TABLE = "summary.json", "table.md"
MEASURED = ("perplexity", "kl", "largest_kl", "growth")  # of drift
COLUMNS = ("S", "ES", "PS", "NS", "EA", "PA", "free", "portability", "kept", "GE", "perplexity", "kl", "growth")
DRIFT_MEANINGS = {
    "perplexity": "of held text",
    "kl": "nats, next token on unrelated prompts: mean",
    "largest_kl": "the same: largest",
    "growth": "largest ‖W' − W‖ / ‖W‖ of a site",
}
NOT_FINITE = "not finite"
COMPARED = {  # what runs may differ in, and where their config.json says it
    "model": "model.fingerprint",
    "dtype": "model.dtype",
    "chat template": "model.chat",
    "device": "model.device",
    "threads": "model.threads",
    "records": "data.digest",
    "protocol": "protocol",
    "settings": "settings",
    "moments": "moments",
    "questions": "asking",
    "held text": "drift.text_digest",
    "edits looked at for drift": "drift.edits",
    "bootstrap": "bootstrap",
    "seed": "seed",
    "versions": "versions",
}
S_MEANING = "harmonic mean of ES, PS and NS"


@dataclass(frozen=True)
class State:
    """A state of the model and the rows that were said in it."""

    edits: int
    rows: Sequence[Row]


def states_of(rows: Sequence[Row]) -> list[State]:
    """Rows by the number of edits, the base first."""
    counts = sorted({row["edits"] for row in rows})
    return [State(count, [row for row in rows if row["edits"] == count]) for count in counts]


def summary_of(
    config: dict[str, Any], records: Sequence[Record], rows: Sequence[Row], drift: Sequence[Row]
) -> dict[str, Any]:
    """Scores with intervals, and drift, in every state of the model."""
    base = {row["record"]: row for row in rows if row["edits"] == 0}
    states = []
    for state in states_of(rows):
        asked = [row["record"] for row in state.rows]
        scores = summarise(
            [records[index] for index in asked],
            state.rows,
            [base[index] for index in asked],
            seed=config["seed"],
            rounds=config["bootstrap"],
        )
        whole = _mean_drift([row for row in drift if row["edits"] == state.edits])
        states.append({"edits": state.edits, "records": len(asked), "scores": scores, "drift": whole})
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
    """Numbers of several single edits, as their means; None where a broken model made one that is not finite."""
    columns = {name: [row[name] for row in rows] for name in MEASURED} if rows else {}
    return {name: None if None in some else round(fmean(some), 6) for name, some in columns.items()}


def write(
    out: Path, config: dict[str, Any], records: Sequence[Record], rows: Sequence[Row], drift: Sequence[Row]
) -> dict[str, Any]:
    """Make the summary, the table and the figures of a run's folder."""
    summary = summary_of(config, records, rows, drift)
    write_json(out / SUMMARY, summary)
    write_atomically(out / TABLE, table(summary).encode())
    if figures := _figures():
        figures.draw(out, summary, rows)
    return summary


def _figures() -> Any:
    """The module that draws, or None where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from rebind.evals import figures

    return figures


# Tables


def table(summary: dict[str, Any]) -> str:
    """Markdown: the states in short, then every score of the last one with its interval."""
    count = summary["states"][0]["records"]
    skipped = f", {summary['skipped']} skipped" if summary["skipped"] else ""
    lines = [
        f"# {summary['method']} on {summary['model']}, {described(summary)}",
        "",
        f"{count} record{'s' * (count != 1)} of {summary['data']}{skipped}, seed {summary['seed']}.",
        "",
        *_markdown(*short_table([("", summary)])),
        "",
        *_markdown(["score", "before", "after", "95 %", "meaning"], long_table(summary)),
    ]
    return "\n".join(lines) + "\n"


def short_table(
    runs: Sequence[tuple[str, dict[str, Any]]], names: Sequence[str] = COLUMNS
) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the states of runs, one a row, with those of the named scores and drifts that they have."""
    states = [(run, _values(state), state) for run, summary in runs for state in summary["states"]]
    there = [name for name in names if any(name in values for _, values, _ in states)]
    named = any(name for name, _ in runs)
    rows = [
        [
            *([run] if named else []),
            "before" if state["edits"] == 0 else f"{state['edits']:,}",
            f"{state['records']:,}",
            *(_cell(values, name) for name in there),
        ]
        for run, values, state in states
    ]
    return [*(["run"] if named else []), "edits", "records", *there], rows


def _values(state: dict[str, Any]) -> dict[str, float | None]:
    return {**{name: score["value"] for name, score in state["scores"].items()}, **state["drift"]}


def _cell(values: dict[str, float | None], name: str) -> str:
    """A number; what is None was measured, and not finite."""
    return NOT_FINITE if values.get(name, 0.0) is None else number(values.get(name))


def long_table(summary: dict[str, Any]) -> list[list[str]]:
    """Rows: every score, then the drift, of the base and of the last state, with interval and meaning."""
    first, last = summary["states"][0], summary["states"][-1]
    rows = []
    for name, now in last["scores"].items():
        before = number(first["scores"].get(name, {}).get("value"))
        interval = f"{number(now['low'])} – {number(now['high'])}"
        meaning = SCORES[name].meaning if name in SCORES else S_MEANING
        rows.append([name, before, number(now["value"]), interval, meaning])
    for name in last["drift"]:
        rows.append([name, _cell(first["drift"], name), _cell(last["drift"], name), "", DRIFT_MEANINGS[name]])
    return rows


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---" if name in ("run", "score", "meaning") else "---:" for name in header]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def described(summary: dict[str, Any]) -> str:
    """A protocol in words."""
    if summary["protocol"] == "single":
        return "one edit at a time"
    if summary["protocol"] == "batch":
        return "all in one batch"
    return f"batches of {summary['batch']} in sequence"


def number(value: float | None) -> str:
    """A score in three digits.

    >>> number(0.9137), number(26.7812), number(612.3), number(None), number(-0.25)
    ('.914', '26.78', '612.3', '', '-.250')
    """
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:.1f}"
    if abs(value) >= 10:
        return f"{value:.2f}"
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


# Several runs


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]  # what the runs do not have in common
    runs: list[tuple[str, dict[str, Any]]]

    @property
    def markdown(self) -> str:
        return "\n".join([*_markdown(self.header, self.rows), "", *self.notes]).rstrip() + "\n"


def compare(folders: Sequence[Path]) -> Comparison:
    """Runs side by side, and a note for everything but the method in which they differ."""
    if len(folders) < 2:
        raise InputError(f"got {len(folders)} run, expected two or more: name their folders")
    summaries = [read_json(folder / SUMMARY) for folder in folders]
    configs = [read_json(folder / "config.json") for folder in folders]
    runs = list(zip(_names(folders, summaries), summaries, strict=True))
    header, rows = short_table(runs)
    return Comparison(header, rows, _notes(configs), runs)


def draw_comparison(path: Path, found: Comparison) -> None:
    """The runs in one PNG file."""
    figures = _figures()
    if figures is None:
        raise InputError("figures need matplotlib, which is not installed: pip install 'rebind[lab]'")
    figures.draw_comparison(path, found.runs)


def _names(folders: Sequence[Path], summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What tells the runs apart: the method if that does, else the folders, by as much of their paths as it takes."""
    methods = [summary["method"] for summary in summaries]
    if len(set(methods)) == len(methods):
        return methods
    paths = [folder.resolve() for folder in folders]
    if twice := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise InputError(f"{twice[0]} is named twice, expected each run once: name another folder")
    tails = (["/".join(path.parts[-parts:]) for path in paths] for parts in itertools.count(1))
    return next(names for names in tails if len(set(names)) == len(names))


def _notes(configs: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each thing but the method in which runs differ."""
    told = [_difference(what, [_at(config, path) for config in configs]) for what, path in COMPARED.items()]
    return [f"The runs differ in their {one}: compare with care." for one in (*told, *_used(configs)) if one]


def _used(configs: Sequence[dict[str, Any]]) -> list[str]:
    """In what the settings differ that runs were made with, where it is not their methods that make the difference."""
    known = [(config["method"], config["used"]) for config in configs if "used" in config]
    methods = dict.fromkeys(method for method, _ in known)
    told = [_difference("settings used", [used for name, used in known if name == method]) for method in methods]
    several = [used["layers"] for name, used in known if name not in METHODS or METHODS[name].several_layers]
    return [one for one in told if one] or [_difference("layers", several)]


def _difference(what: str, values: Sequence[Any]) -> str:
    """What differs, with its values where they are short; nothing where all are the same."""
    leaves = [_leaves(value) for value in values]
    names = sorted({name for one in leaves for name in one})
    told = [(name, [_word(one.get(name)) for one in leaves]) for name in names]
    differing = [(name, words) for name, words in told if len(set(words)) > 1]
    shown = [f"{name} {', '.join(words)}".strip() if max(map(len, words)) <= 40 else name for name, words in differing]
    details = "; ".join(one for one in shown if one)
    return f"{what} ({details})" if details else what if differing else ""


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """What lies in nested dicts, by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf for key, part in value.items() for path, leaf in _leaves(part, f"{name}.{key}".strip(".")).items()
    }


def _word(value: Any) -> str:
    return {"None": "none", "True": "yes", "False": "no"}.get(str(value), str(value))


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config
