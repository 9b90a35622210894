"""Where ledgers lie when nobody says, and whose they are."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebind.cli.options import DEFAULT_MODEL
from rebind.edit.log import read_header
from rebind.errors import InputError, LedgerError, LedgerWarning

HEADER, LOG = "ledger.json", "log.jsonl"  # what makes a folder a ledger, and where its edits are
LISTED = 5


def data_folder() -> Path:
    """The user's data folder for rebind: unlike a cache, not to be thrown away."""
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg).expanduser() / "rebind"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "rebind"
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rebind"
    return Path.home() / ".local" / "share" / "rebind"


def ledgers_folder() -> Path:
    """The folder of all default ledgers: REBIND_LEDGERS, or one in the data folder."""
    chosen = os.environ.get("REBIND_LEDGERS")
    return Path(chosen).expanduser() if chosen else data_folder() / "ledgers"


def default_ledger(model_name: str, fingerprint: str) -> Path:
    return ledgers_folder() / f"{_slug(model_name)}-{fingerprint[:8]}"


# Whose a default ledger is


@dataclass(frozen=True)
class Kept:
    """A default ledger: its folder and its header, empty where it cannot be read."""

    folder: Path
    header: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str | None:
        """Where its model lay. Earlier versions wrote down only a name, which places a model if it is a Hub id."""
        name: str = self.header.get("model_name", "")
        place: str | None = self.header.get("place", name if "/" in name else None)  # no folder's name has a slash
        return place

    @property
    def gone(self) -> bool:
        """Whether its model is no longer where it lay: it was moved, renamed or removed."""
        return self.place is not None and Path(self.place).is_absolute() and not _is_there(Path(self.place))

    @property
    def has_edits(self) -> bool:
        log = self.folder / LOG
        return log.exists() and log.stat().st_size > 0

    @property
    def active(self) -> int:
        """How many edits are active, as far as the log can be read; no tensors are."""
        count = 0
        for line in (self.folder / LOG).read_bytes().splitlines() if self.has_edits else []:
            try:
                count += {"edit": 1, "redo": 1, "undo": -1}[json.loads(line)["event"]]
            except (ValueError, KeyError, TypeError):  # opening it, or verifying it, says what is wrong
                continue
        return count

    @property
    def described(self) -> str:
        """What tells it apart from others of its name."""
        if not self.header:
            return f"{HEADER} cannot be read"
        active, when = self.active, self.header["created"][:16].replace("T", " ")
        whose = f"of {self.place}" if self.place else "which does not say where its model lay"
        many = f"{active} active edit{'' if active == 1 else 's'}"
        return ", ".join(filter(None, [whose, self.header.get("dtype"), many, f"made {when} UTC"]))


def place_of(model: str) -> str:
    """What a model is known by without its weights: an absolute path, or a Hub id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if model != DEFAULT_MODEL and _is_there(path) else model


def ledgers_at(model: str) -> list[Kept]:
    """The default ledgers made for what lay in a model's place, whatever its weights were."""
    here = place_of(model)
    return [kept for kept in _named(model) if kept.place == here]


def ledger_of(model_name: str, fingerprint: str) -> Path:
    """The default ledger of a loaded model, be it there or not: after it was renamed the one it had before."""
    default = default_ledger(model_name, fingerprint)
    if (default / HEADER).exists():
        return default
    same = [kept for kept in _kept(f"*-{fingerprint[:8]}") if kept.header.get("model") == fingerprint]
    for kept in same:
        if kept.gone:
            return kept.folder
        if kept.place is None and kept.active:
            warnings.warn(
                f"an earlier rebind made {kept.folder} for these weights by the name {kept.header['model_name']}: if "
                f"the model was renamed since, -l {shlex.quote(str(kept.folder))} has its edits",
                LedgerWarning,
                stacklevel=2,
            )
    return default


# From a model's name to its ledger, without its weights


def find_ledger(model: str, ledger: Path | None) -> Path:
    """The ledger that was named, or the one that a model's name alone tells apart from all others."""
    if ledger is not None:
        return ledger.expanduser()
    found = _rivals(_named(model))
    if len(found) > 1:
        names = ", ".join(kept.folder.name for kept in found)
        raise InputError(
            f"{len(found)} models named {_slug(_name_of(model))} have ledgers in {ledgers_folder()} ({names}), "
            f"expected one: name its folder with --ledger"
        )
    return choose_ledger(model, None, changing=True)


def choose_ledger(model: str, ledger: Path | None, *, again: str = "", changing: bool = False) -> Path:
    """The ledger that was named, or the one made for the model in this place.

    One that does not say where its model lay is found by its name, and not to be changed. `again` is the command as
    it was typed, for messages that say how to go on.
    """
    if ledger is not None:
        return ledger.expanduser()
    here = place_of(model)
    found = _rivals([kept for kept in _named(model) if kept.place in (here, None)])
    if not found:
        raise _no_ledger(model, again)
    if len(found) > 1:
        raise InputError(
            f"{len(found)} ledgers may be that of {here}, expected one: name it with --ledger, {_choices(found, again)}"
        )
    one = found[0]
    if one.header and one.place is None:  # one whose header cannot be read is refused when it is opened
        unknown = f"an earlier rebind made {one.folder}, which does not say where its model lay"
        if changing:
            raise InputError(
                f"{unknown}: it may be another one named {_slug(_name_of(model))}, and nothing was changed; if it is "
                f"{here}, say so: {_step(one, again)}"
            )
        warnings.warn(f"{unknown}: it was found by the model's name alone", LedgerWarning, stacklevel=2)
    return one.folder


def require_some_ledger(model: str) -> None:
    """Ask before a model is loaded whether there is a ledger that could be its."""
    if not (_named(model) or any(kept.gone for kept in _kept("*"))):
        raise _no_ledger(model)


def _no_ledger(model: str, again: str = "") -> InputError:
    """That a model has no ledger, and which may be its all the same: it may have been moved, renamed or copied."""
    every, named = _kept("*"), _named(model)
    near = [kept for kept in every if kept.place and (kept.gone or kept in named)]
    others = [kept.folder.name for kept in every]
    known = f" (there are {', '.join(others[:LISTED])})" if others and not near else ""
    moved = f"; if it was moved, renamed or copied, {_choices(near[:LISTED], again)}" if near else ""
    return InputError(
        f"no ledger of {place_of(model)} in {ledgers_folder()}{known}: `rebind edit` makes one, --model or --ledger "
        f"names another{moved}"
    )


def _choices(found: Sequence[Kept], again: str) -> str:
    return " or ".join(f"{_step(kept, again)} ({kept.described})" for kept in found)


def _step(kept: Kept, again: str) -> str:
    return f"`{f'{again} -l {shlex.quote(str(kept.folder))}'.strip()}`"


def _named(model: str) -> list[Kept]:
    """The default ledgers of all models with this one's name."""
    return _kept(f"{_glob_safe(_slug(_name_of(model)))}-????????")


def _rivals(found: list[Kept]) -> list[Kept]:
    return [kept for kept in found if kept.has_edits] or found  # one that was begun for nothing is no rival


def _kept(pattern: str) -> list[Kept]:
    return [Kept(file.parent, _header(file.parent)) for file in sorted(ledgers_folder().glob(f"{pattern}/{HEADER}"))]


def _header(folder: Path) -> dict[str, Any]:
    try:
        return read_header(folder)
    except LedgerError:
        return {}


def _slug(name: str) -> str:
    """A model's name as the name of a folder.

    >>> _slug("Qwen/Qwen3-0.6B")
    'Qwen--Qwen3-0.6B'
    """
    return re.sub(r"[^\w.-]+", "--", name).strip(".-") or "model"


def _name_of(model: str) -> str:
    """What a model is called once it is loaded."""
    path = Path(model).expanduser()
    if model == DEFAULT_MODEL:
        return model
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as problem:  # what may not be looked at is there; a name too long for a file is none
        return problem.errno == errno.EACCES


def _glob_safe(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
