"""The algebra of memory: one write, every rule and closed form on top of it. Pure torch."""

from rebind.memory import closed_form, features, hopfield, rules, solve, ttt
from rebind.memory.associative import Interference, Memory, load
from rebind.memory.chain import chain
from rebind.memory.closed_form import NullSpace, Recursive, equality, equality_block, null_space, ridge
from rebind.memory.features import Feature, feature_names, get_feature, l2_normalise, sum_normalise
from rebind.memory.low_rank import LowRank
from rebind.memory.programmer import FastWeightProgrammer
from rebind.memory.rules import Coefficients, Rule, get_rule, rule_names
from rebind.memory.solve import Solution, factor
from rebind.memory.write import Write

__all__ = [
    "Coefficients",
    "FastWeightProgrammer",
    "Feature",
    "Interference",
    "LowRank",
    "Memory",
    "NullSpace",
    "Recursive",
    "Rule",
    "Solution",
    "Write",
    "chain",
    "closed_form",
    "equality",
    "equality_block",
    "factor",
    "feature_names",
    "features",
    "get_feature",
    "get_rule",
    "hopfield",
    "l2_normalise",
    "load",
    "null_space",
    "ridge",
    "rule_names",
    "rules",
    "solve",
    "sum_normalise",
    "ttt",
]
