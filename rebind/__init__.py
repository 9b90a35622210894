"""rebind: a weight matrix as an associative memory. Write it, overwrite it, read it, forget."""

from rebind.errors import (
    InputError,
    NumericalError,
    NumericalWarning,
    RebindError,
    ShapeError,
    UnknownNameError,
)
from rebind.memory import LowRank, Memory, Write, chain, get_rule, load

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "LowRank",
    "Memory",
    "NumericalError",
    "NumericalWarning",
    "RebindError",
    "ShapeError",
    "UnknownNameError",
    "Write",
    "__version__",
    "chain",
    "get_rule",
    "load",
]
