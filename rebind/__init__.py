"""rebind: a weight matrix as an associative memory that can be written, overwritten, read and forgotten.

- `rebind.edit`: edit facts in pretrained language models (`Editor`)
- `rebind.memory`: the algebra of writes (`Memory`, `Write`)
- `rebind.ops`, `rebind.nn`: many writes, fast; sequence layers and models built on them
- `rebind.optimize`, `rebind.compat`: run models of transformers on these operations; the functions of fla
- `rebind.models`: someone else's language model behind one object (`LanguageModel`)
- `rebind.analysis`, `rebind.evals`, `rebind.lab`: tracing, evaluation of edits, experiments
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rebind.errors import (
    CudaGraphWarning,
    FactWarning,
    FieldError,
    GuardError,
    InputError,
    LedgerError,
    LedgerWarning,
    MemoryWarning,
    NumericalError,
    NumericalWarning,
    OutOfMemoryError,
    RebindError,
    RebindWarning,
    ShapeError,
    StorageError,
    UnknownNameError,
)
from rebind.version import __version__

if TYPE_CHECKING:
    from rebind import analysis, compat, edit, evals, lab, memory, models, nn, ops
    from rebind.compat.optimize import optimize
    from rebind.edit import Edit, Editor, Fact, Guard, Ledger, attach
    from rebind.memory import LowRank, Memory, Write, chain, get_rule
    from rebind.models import LanguageModel

__all__ = [
    "CudaGraphWarning",
    "Edit",
    "Editor",
    "Fact",
    "FactWarning",
    "FieldError",
    "Guard",
    "GuardError",
    "InputError",
    "LanguageModel",
    "Ledger",
    "LedgerError",
    "LedgerWarning",
    "LowRank",
    "Memory",
    "MemoryWarning",
    "NumericalError",
    "NumericalWarning",
    "OutOfMemoryError",
    "RebindError",
    "RebindWarning",
    "ShapeError",
    "StorageError",
    "UnknownNameError",
    "Write",
    "__version__",
    "analysis",
    "attach",
    "chain",
    "compat",
    "edit",
    "evals",
    "get_rule",
    "lab",
    "memory",
    "models",
    "nn",
    "ops",
    "optimize",
]

_SUBPACKAGES = {"analysis", "compat", "edit", "evals", "lab", "memory", "models", "nn", "ops"}
_MODULES = {
    **dict.fromkeys(("Edit", "Editor", "Fact", "Guard", "Ledger", "attach"), "rebind.edit"),
    **dict.fromkeys(("LowRank", "Memory", "Write", "chain", "get_rule"), "rebind.memory"),
    "LanguageModel": "rebind.models",
    "optimize": "rebind.compat.optimize",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers when something that needs them is first used: `rebind --help` stays fast."""
    if name not in _SUBPACKAGES and name not in _MODULES:
        raise AttributeError(f"module 'rebind' has no attribute {name!r}")
    try:
        return import_module(f"rebind.{name}") if name in _SUBPACKAGES else getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as problem:
        if problem.name not in ("transformers", "tokenizers"):
            raise
        raise ImportError(
            f"rebind.{name} needs {problem.name}. Install it with: pip install 'rebind[edit]'"
        ) from problem


def __dir__() -> list[str]:
    return __all__
