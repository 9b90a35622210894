"""The algebra of memory, in pure torch: one write, and every rule and closed form on top of it.

- `write`: the class `Write`, its composition and its inverse; `chain`: many writes composed into one; `low_rank`: the
  change that a write makes, as two thin factors.
- `rules`: the fast rules (`get_rule("delta")`); `features`: feature maps for keys and queries.
- `closed_form`: gains from second moments (`ridge`, `equality`, `null_space`, `Recursive`); `solve`: the
  factorizations and solves behind them.
- `associative`: the class `Memory`, which binds, recalls, rebinds and unbinds.
- `dense`: stored pairs read by a sharp softmax (`Dense`), with whitened keys (`Whitening`).
- `ttt`, `hopfield`, `programmer`: memories that are not linear in their state, so that they have a step and no `Write`.
- `checks`, `precision`: checks of arguments, and the dtypes in which results are computed.
"""

from __future__ import annotations

from rebind.memory import hopfield, ttt
from rebind.memory.associative import Interference, Memory
from rebind.memory.chain import chain
from rebind.memory.closed_form import NullSpace, Recursive, equality, equality_block, null_space, ridge
from rebind.memory.dense import Dense, Whitening
from rebind.memory.features import Feature, feature_names, get_feature, l2_normalize, sum_normalize
from rebind.memory.low_rank import LowRank
from rebind.memory.programmer import FastWeightProgrammer
from rebind.memory.rules import Coefficients, Rule, get_rule, rule_names
from rebind.memory.solve import Solution, factor
from rebind.memory.write import Write

__all__ = [
    "Coefficients",
    "Dense",
    "FastWeightProgrammer",
    "Feature",
    "Interference",
    "LowRank",
    "Memory",
    "NullSpace",
    "Recursive",
    "Rule",
    "Solution",
    "Whitening",
    "Write",
    "chain",
    "equality",
    "equality_block",
    "factor",
    "feature_names",
    "get_feature",
    "get_rule",
    "hopfield",
    "l2_normalize",
    "null_space",
    "ridge",
    "rule_names",
    "sum_normalize",
    "ttt",
]
