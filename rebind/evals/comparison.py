"""Compare runs side by side, and list everything besides the method in which they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.edit.methods import METHODS
from rebind.errors import InputError
from rebind.evals.summary import markdown_table, states_table
from rebind.storage import RunFolder, read_json_object

COMPARED = {  # what runs may differ in, and where config.json has it
    "model": "model.fingerprint",
    "dtype": "model.dtype",
    "chat template": "model.chat",
    "device": "model.device",
    "threads": "model.threads",
    "records": "data.digest",
    "protocol": "protocol",
    "settings": "settings",
    "second moments": "moments",
    "questions": "questions",
    "text for perplexity": "drift.text_digest",
    "number of edits with drift": "drift.edits",
    "bootstrap": "bootstrap",
    "seed": "seed",
    "versions": "versions",
}


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
    """Return a sentence for each thing but the method in which the runs differ."""
    differences = [_difference(what, [_at(config, path) for config in configs]) for what, path in COMPARED.items()]
    differences += _used_differences(configs)
    return [f"The runs differ in their {difference}: compare with care." for difference in differences if difference]


def _used_differences(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return differences of the settings in use that are not due to the methods."""
    used = [(config["method"], config["used"]) for config in configs]
    methods = dict.fromkeys(method for method, _ in used)
    differences = [_difference("settings in use", [own for name, own in used if name == method]) for method in methods]
    several = [own["layers"] for name, own in used if name not in METHODS or METHODS[name].several_layers]
    return [difference for difference in differences if difference] or [_difference("layers", several)]


def _difference(what: str, values: Sequence[Any]) -> str:
    """Return what differs, with its values if they are short; an empty text if nothing differs."""
    leaves = [_leaves(value) for value in values]
    names = sorted({name for leaf in leaves for name in leaf})
    words = [(name, [_word(leaf.get(name)) for leaf in leaves]) for name in names]
    differing = [(name, some) for name, some in words if len(set(some)) > 1]
    shown = [f"{name} {', '.join(some)}".strip() if max(map(len, some)) <= 40 else name for name, some in differing]
    details = "; ".join(one for one in shown if one)
    return f"{what} ({details})" if details else what if differing else ""


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by dotted names."""
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
