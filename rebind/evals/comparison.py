"""Compare runs side by side, and list everything besides the method in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.errors import InputError
from rebind.evals.summary import Summary, markdown_table, states_table
from rebind.storage import RunFolder, read_json_object

NOT_COMPARED = {"method", "data.name", "data.skipped", "model.name", "drift.text"}  # or shown otherwise


@dataclass(frozen=True)
class Comparison:
    """Several runs in one table."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]  # what the runs do not have in common
    runs: list[tuple[str, Summary]]  # (name, summary)

    @property
    def markdown(self) -> str:
        return "\n".join([*markdown_table(self.header, self.rows), "", *self.notes]).rstrip() + "\n"


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the finished runs in these folders."""
    if len(folders) < 2:
        raise InputError(f"There is only {len(folders)} run", expected="two or more", code="too_few_runs")
    configs = [RunFolder.read_config(folder, "evaluation") for folder in folders]
    summaries = []
    for folder in folders:
        if (summary := read_json_object(folder / "summary.json")) is None:
            raise InputError(
                f"The evaluation in {folder} is not finished",
                advice="Run the same command again to finish it",
                code="run_not_finished",
            )
        summaries.append(summary)
    runs = list(zip(_names(folders, configs), summaries, strict=True))
    return Comparison(*states_table(runs), _notes(configs), runs)


def _names(folders: Sequence[Path], configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the methods if these differ, else as much of the folders' paths as makes them different."""
    methods = [config["method"] for config in configs]
    paths = [folder.resolve() for folder in folders]
    tails = (["/".join(path.parts[-parts:]) for path in paths] for parts in itertools.count(1))
    return next(names for names in itertools.chain([methods], tails) if len(set(names)) >= len(set(paths)))


def _notes(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each setting besides the method in which the runs differ.

    Settings in use (`used`) are compared only between runs of one method, because every method has its own.
    """
    leaves = [_leaves(config) for config in configs]
    notes = []
    for name in sorted({name for leaf in leaves for name in leaf} - NOT_COMPARED):
        groups: dict[str, list[str]] = {}
        for leaf in leaves:
            groups.setdefault(leaf["method"] if name.startswith("used.") else "", []).append(str(leaf.get(name)))
        for values in groups.values():
            if len(set(values)) > 1:
                notes.append(f"The runs differ in {name} ({', '.join(f'{value:.40}' for value in values)}).")
    return notes


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    parts = [_leaves(part, f"{name}.{key}".strip(".")) for key, part in value.items()]
    return {path: leaf for part in parts for path, leaf in part.items()}
