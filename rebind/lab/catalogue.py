"""All experiments, by name. A new experiment is one class, and one entry here."""

from __future__ import annotations

from rebind.lab.closed_form import ClosedForm
from rebind.lab.consolidation.experiment import LifeOfFacts
from rebind.lab.cost import Cost
from rebind.lab.edits.experiment import Edits
from rebind.lab.experiment import Experiment, require_known
from rebind.lab.forgetting import Forgetting
from rebind.lab.hopfield import Hopfield
from rebind.lab.mqar.experiment import Mqar
from rebind.lab.retrieval.capacity import Capacity
from rebind.lab.retrieval.overwrite import Overwrite
from rebind.lab.ttt_1d import Ttt1d

EXPERIMENTS: dict[str, type[Experiment]] = {
    experiment.name: experiment
    for experiment in (Capacity, Overwrite, ClosedForm, Forgetting, Hopfield, Ttt1d, Cost, Mqar, Edits, LifeOfFacts)
}


def get_experiment(name: str) -> type[Experiment]:
    """Return the experiment with that name."""
    require_known("experiment", [name], EXPERIMENTS)
    return EXPERIMENTS[name]
