"""All experiments, by name."""

from __future__ import annotations

from typing import Any

from rebind.lab import capacity, closed_form, cost, edits, forgetting, hopfield, mqar, overwrite, ttt_1d
from rebind.lab.experiment import Experiment
from rebind.memory.checks import unknown_name

EXPERIMENTS: dict[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (capacity, overwrite, closed_form, forgetting, hopfield, ttt_1d, cost, mqar, edits)
}


def get_experiment(name: str) -> Experiment[Any]:
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]
