"""The base class of experiments: settings, points to measure, and a table, a figure and claims.

A *point* is one configuration to measure, such as `{"rule": "delta", "n": 32, "seed": 0}`; a *row* is a point together
with its results. Points that are measured together form a *batch*. The results of a batch may depend only on the
settings and on its points, so that a run that was interrupted and resumed has the same results as an uninterrupted one.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch

from rebind.errors import InputError
from rebind.lab.report import Claim, Table
from rebind.lab.style import Panel
from rebind.limits import MAX_SEEDS
from rebind.memory.checks import unknown_name
from rebind.storage import Row

if TYPE_CHECKING:
    import matplotlib.figure  # an optional dependency: measuring does not need it

Figure: TypeAlias = "matplotlib.figure.Figure"
Point: TypeAlias = dict[str, Any]
MAX_SIZE = 10_000_000  # of a setting that is a whole number


@dataclass(frozen=True)
class Experiment(ABC):
    """One experiment. The fields of a subclass are its settings; their defaults are the full-size experiment."""

    name: ClassVar[str]
    title: ClassVar[str]  # what is measured, in one line
    answers: ClassVar[str]  # the figure, table or sentence in the literature that it reproduces
    cpu_time: ClassVar[str]  # duration at full size on two CPU cores, or "for a GPU"
    gpu_time: ClassVar[str] = "—"  # duration at full size on one H200, where it was measured
    quick_settings: ClassVar[str]  # `key=value` words that make it small; it still shows the shape of the results

    seeds: int = 3  # every point is measured with this many random seeds

    @classmethod
    def quick(cls) -> Self:
        """Return a small version that takes seconds."""
        return cls().with_settings(cls.quick_settings.split())

    @abstractmethod
    def batches(self) -> list[list[Point]]:
        """Return all points, batch by batch; raise InputError for settings that cannot be measured."""

    @abstractmethod
    def measure(self, points: Sequence[Point], device: torch.device) -> list[Row]:
        """Return the results of one batch, a dictionary of finite numbers per point."""

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> Table:
        """Return the main results as a table."""

    @abstractmethod
    def claims(self, rows: Sequence[Row]) -> Iterable[Claim]:
        """Yield the claims of the experiment, each checked against the rows."""

    @abstractmethod
    def panels(self) -> list[Panel]:
        """Return the curves of the experiment, for its figure and for watching it."""

    @abstractmethod
    def figure(self, rows: Sequence[Row]) -> Figure:
        """Draw the rows, with `rebind.lab.style`."""

    def with_settings(self, settings: Iterable[str]) -> Self:
        """Return the experiment with `key=value` settings replaced, each read as the type of its default."""
        defaults = {field.name: getattr(self, field.name) for field in fields(self)}
        changes: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals:
                raise InputError(
                    f"{setting!r} is not a setting",
                    expected=f"key=value, where the key is one of {', '.join(defaults)}",
                    code="not_a_setting",
                )
            require_known("setting", [name], defaults)
            if name in changes:
                raise InputError(f"Setting {name!r} appears twice", expected="each setting once", code="setting_twice")
            changes[name] = _parse(name, text, defaults[name])
        return replace(self, **changes)


def grid(**values: Iterable[Any]) -> list[Point]:
    """Return one point per combination of these values; the last name varies fastest."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def require_known(kind: str, chosen: Iterable[str], names: Iterable[str]) -> None:
    """Raise an error for the first chosen name that does not exist."""
    known = list(names)
    for name in chosen:
        if name not in known:
            raise unknown_name(kind, name, known)


def _parse(name: str, text: str, default: Any) -> Any:
    """Read text as the type of the default. A list is written a,b,c; repeated values count once, numbers are sorted."""
    if isinstance(default, tuple):
        values = dict.fromkeys(_parse(name, part, default[0]) for part in text.split(",") if part)
        if not values:
            raise _invalid(name, text, f"values such as {','.join(map(str, default))}")
        return tuple(values) if isinstance(default[0], str) else tuple(sorted(values))
    if isinstance(default, str):
        return text
    is_whole = isinstance(default, int)
    least = 1 if is_whole and name != "layer" else 0  # layers are counted from 0
    most = MAX_SEEDS if name == "seeds" else MAX_SIZE if is_whole else sys.float_info.max
    try:
        value = type(default)(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        limit = f" and at most {most:,}" if is_whole else ""
        raise _invalid(name, text, f"a {'whole' if is_whole else 'finite'} number, {least} or more{limit}")
    return value


def _invalid(name: str, text: str, expected: str) -> InputError:
    return InputError(f"Setting {name!r} is {text!r}", expected=expected, code="invalid_setting")
