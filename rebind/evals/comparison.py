"""Compare runs side by side, and list everything besides the method in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.errors import InputError
from rebind.evals.summary import markdown_table, states_table
from rebind.storage import RunFolder, read_json_object

NOT_COMPARED = {"method", "data.name", "data.skipped", "model.name", "drift.text"}  # or shown otherwise


@dataclass(frozen=True)
class Comparison:
    """Several runs in one table."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]  # what the runs do not have in common
    runs: list[tuple[str, dict[str, Any]]]  # (name, summary)

    @property
    def markdown(self) -> str:
        return "\n".join([*markdown_table(self.header, self.rows), "", *self.notes]).rstrip() + "\n"


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the finished runs in these folders."""
    if len(folders) < 2:
        raise InputError(f"There is only {len(folders)} run", expected="two or more", code="too_few_runs")
    configs = [RunFolder.read_config(folder, "evaluation") for folder in folders]
    summaries = [_summary(folder) for folder in folders]
    runs = list(zip(_names(folders, summaries), summaries, strict=True))
    header, rows = states_table(runs)
    return Comparison(header, rows, _notes(configs), runs)


def _summary(folder: Path) -> dict[str, Any]:
    summary = read_json_object(folder / "summary.json")
    if summary is None:
        raise InputError(
            f"The evaluation in {folder} is not finished",
            advice="Run the same command again to finish it",
            code="run_not_finished",
        )
    return summary


def _names(folders: Sequence[Path], summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the methods if these differ, else as much of the folders' paths as makes them different."""
    methods = [summary["method"] for summary in summaries]
    if len(set(methods)) == len(methods):
        return methods
    paths = [folder.resolve() for folder in folders]
    if repeated := [folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1]:
        raise InputError(f"{repeated[0]} is named twice", expected="each run once", code="run_repeated")
    tails = (["/".join(path.parts[-parts:]) for path in paths] for parts in itertools.count(1))
    return next(names for names in tails if len(set(names)) == len(names))


def _notes(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each setting besides the method in which the runs differ.

    Settings in use (`used`) are compared only between runs of one method, because every method has its own.
    """
    leaves = [_leaves(config) for config in configs]
    notes = []
    for name in sorted({name for leaf in leaves for name in leaf} - NOT_COMPARED):
        groups = {leaf["method"] for leaf in leaves} if name.startswith("used.") else {None}
        for method in groups:
            values = [leaf.get(name) for leaf in leaves if method is None or leaf["method"] == method]
            if any(value != values[0] for value in values):
                notes.append(f"The runs differ in {name} ({', '.join(_short(value) for value in values)}).")
    return notes


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf for key, part in value.items() for path, leaf in _leaves(part, f"{name}.{key}".strip(".")).items()
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
