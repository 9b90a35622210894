"""rebind: a weight matrix as an associative memory. Write it, overwrite it, read it, forget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rebind.errors import (
    InputError,
    NumericalError,
    NumericalWarning,
    RebindError,
    ShapeError,
    UnknownNameError,
)
from rebind.version import __version__

if TYPE_CHECKING:
    from rebind import memory
    from rebind.edit.editor import Editor
    from rebind.memory import LowRank, Memory, Write, chain, get_rule, load

__all__ = [
    "Editor",
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
    "memory",
]


def __getattr__(name: str) -> Any:
    """Torch and transformers are imported when something of theirs is first asked for: `rebind --help` is quick."""
    if name == "memory":
        return import_module("rebind.memory")
    if name not in __all__:
        raise AttributeError(f"module 'rebind' has no attribute {name!r}")
    try:
        home = import_module("rebind.edit.editor" if name == "Editor" else "rebind.memory")
    except ImportError as problem:
        if name != "Editor":
            raise
        raise ImportError(f"editing needs {problem.name}: pip install 'rebind[edit]'") from problem
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__
