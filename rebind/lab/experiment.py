"""What an experiment is: a config, points to measure, a way to measure them, a table, a figure and claims.

A *point* is a setting to measure (`{"rule": "delta", "n": 32, "seed": 0}`); a *row* is a point with what was found
there. Points that are measured together make a *batch*. What a batch finds may depend on the config and on its points
alone, so that a run that was killed ends with the numbers of one that was not. Several batches may be measured side by
side; each is kept as soon as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from rebind.errors import InputError
from rebind.memory.checks import unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The settings of an experiment; each has its own, and these."""

    seeds: int = 3  # every point is measured so many times, with other random numbers

    from_zero: ClassVar[tuple[str, ...]] = ()  # settings that say which one; other whole numbers say how many


C = TypeVar("C", bound=Config)


class LabWarning(UserWarning):
    """Points were measured and kept, but something could not be made of them; the message says what."""


@dataclass(frozen=True)
class Claim:
    """A statement about the rows that they bear out, or do not."""

    says: str
    holds: bool
    got: str  # the numbers it rests on


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Experiment(Generic[C]):
    """One experiment, as its file describes it."""

    name: str
    title: str  # one line: what is measured
    answers: str  # the figure, table or sentence of the seeds that it answers
    takes: str  # time at full size on a CPU of two cores, or what it is for
    config: C  # full size
    quick: C  # the same shape in seconds
    batches: Callable[[C], list[list[Point]]]
    measure: Callable[[C, Sequence[Point], torch.device], list[Row]]
    table: Callable[[C, Sequence[Row]], Table]
    figure: Callable[[C, Sequence[Row]], Figure]
    claims: Callable[[C, Sequence[Row]], list[Claim]]
    on_gpu: str = "—"  # time at full size on one H200, where it was measured
    side_by_side: Callable[[C, Sequence[Sequence[Point]], torch.device], Iterator[tuple[int, list[Row]]]] | None = None
    """All these batches, each with its number when it is there, in any order. None: `measure`, one after another."""

    def rows(
        self, config: C, batches: Sequence[Sequence[Point]], device: torch.device
    ) -> Iterator[tuple[int, list[Row]]]:
        """What the batches find, each with its number."""
        if self.side_by_side is not None:
            return self.side_by_side(config, batches, device)
        return ((number, self.measure(config, batch, device)) for number, batch in enumerate(batches))


def configure(config: C, overrides: Iterable[str]) -> C:
    """The config with `key=value` settings put in, each read as the type of what it replaces."""
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    changed: dict[str, Any] = {}
    for word in overrides:
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"got {word!r}, expected key=value with a key of {', '.join(known)}: write {name}=…")
        if name not in known:
            raise unknown_name("setting", name, known)
        if name in changed:
            raise InputError(f"{name} is set twice, expected once: leave one of them out")
        changed[name] = _read(name, text, known[name], known[name], least=0 if name in config.from_zero else 1)
    return replace(config, **changed)


def require_known(kind: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a name that nobody answers to before anything is measured."""
    known = list(names)
    for name in given:
        if name not in known:
            raise unknown_name(kind, name, known)


def settings(config: Config) -> dict[str, Any]:
    """A config as JSON holds it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}


def _read(name: str, text: str, like: Any, default: Any, least: int) -> Any:
    """Text as the type of the value it replaces. A tuple is written a,b,c; it has each once, numbers in order."""
    if isinstance(like, tuple):
        parts = [part for part in text.split(",") if part]
        if not parts:
            raise InputError(f"{name} is empty, expected values as in {name}={','.join(map(str, like))}: name some")
        values = dict.fromkeys(_read(name, part, like[0], default, least) for part in parts)
        return tuple(values) if isinstance(like[0], str) else tuple(sorted(values))
    kind = type(like)
    try:
        value = kind(text)
    except ValueError:
        value = None
    least = least if kind is int else 0
    if value is None or value != value or (kind is not str and not least <= value < float("inf")):
        wanted = {int: f"a whole number of {least} or more", float: "a number of 0 or more"}[kind]
        usual = ",".join(map(str, default)) if isinstance(default, tuple) else default
        raise InputError(f"{name} is {text!r}, expected {wanted}: it is {usual} unless set") from None
    return value
