"""Experiments on memories: how much they store, what they forget, and what that costs.

- `experiment`: the base class; `catalogue`: all experiments by name
- `run`: measure an experiment into a folder, or resume it
- `report`, `style`, `theory`: tables and claims, panels of curves, expected errors of random keys
- `closed_form`, `forgetting`, `hopfield`, `ttt_1d`, `cost`: experiments without training
- `edits`: editing methods in one layer of a language model
- `retrieval`: the retrieval tasks of Schlag et al., with the experiments `capacity` and `overwrite`
- `mqar`: multi-query associative recall
- `stacks`: many small models trained in parallel, for `retrieval` and `mqar`

To add an experiment, write a subclass of `Experiment` in a module of its own and add it to `catalogue`.
"""

from __future__ import annotations

from rebind.lab.catalogue import EXPERIMENTS, get_experiment
from rebind.lab.experiment import Experiment
from rebind.lab.report import Claim, Table
from rebind.lab.run import ExperimentResult, run_experiment

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "ExperimentResult", "Table", "get_experiment", "run_experiment"]
