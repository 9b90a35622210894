"""Whose a default ledger is: found by the weights of a loaded model, or by the place that a model is in."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebind.cli.places import default_ledger, is_there, ledgers_folder, name_of, place_of, slug, stamp_of
from rebind.edit.ledger.log import read_header
from rebind.errors import InputError, LedgerError, LedgerWarning

HEADER, LOG = "ledger.json", "log.jsonl"  # what makes a folder a ledger, and where its edits are
LISTED = 5


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
        """Whether its model is no longer where it lay: it was moved, renamed, removed or replaced."""
        if self.place is None or not Path(self.place).is_absolute():
            return False
        return not is_there(Path(self.place)) or self.replaced

    @property
    def replaced(self) -> bool:
        """Whether other weights lie where its model lay. Earlier versions kept no stamp to tell by."""
        made, now = self.header.get("stamp"), stamp_of(self.place or "")
        return bool(made and now and made != now)

    @property
    def has_edits(self) -> bool:
        try:
            return (self.folder / LOG).stat().st_size > 0
        except OSError:  # opening it, or verifying it, says what is wrong
            return False

    @property
    def active(self) -> int:
        """How many edits are active, as far as the log can be read; no tensors are."""
        try:
            lines = (self.folder / LOG).read_bytes().splitlines()
        except OSError:
            return 0
        count = 0
        for line in lines:
            try:
                count += {"edit": 1, "redo": 1, "undo": -1}[json.loads(line)["event"]]
            except (ValueError, KeyError, TypeError):
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


# By weights


def ledgers_at(model: str) -> list[Kept]:
    """The default ledgers made for what lay in a model's place, whatever its name and its weights were."""
    return _at(place_of(model), _kept())


def ledger_of(model_name: str, fingerprint: str, place: str) -> Path:
    """The default ledger of a loaded model, be it there or not: after it was moved or renamed the one it had before."""
    default, every = default_ledger(model_name, fingerprint), _kept()
    same = [kept for kept in every if kept.header.get("model") == fingerprint]
    own = [kept for kept in every if kept.folder == default]
    found = _rivals(_at(place, same)) or own or [kept for kept in same if kept.gone and kept.has_edits]
    if any(kept.folder == default for kept in found):
        found = own
    if len(found) == 1:
        _mention_adopted(found[0], place)
        return found[0].folder
    if found:
        _warn(
            f"{len(found)} ledgers have edits to these weights, and none of them is used, as any may be that of "
            f"{place}: name it with --ledger, {_choices(found, '')}"
        )
    for kept in same:
        if kept.place is None and kept.active:
            _warn(
                f"an earlier rebind made {kept.folder} for these weights by the name {kept.header['model_name']}: if "
                f"the model was renamed since, -l {shlex.quote(str(kept.folder))} has its edits"
            )
    return default


def _mention_adopted(kept: Kept, place: str) -> None:
    """Say that edits are used in another place than they were made in: it may be a fresh copy, meant to have none."""
    if kept.place in (place, None) or not kept.has_edits:
        return
    _warn(
        f"the edits in {kept.folder} were made to the same weights in {kept.place} and are used for {place}: "
        f"`-l {shlex.quote(str(kept.folder))}` says that it is meant, `rebind edit -l NEW` starts afresh"
    )


def _warn(told: str) -> None:
    warnings.warn(told, LedgerWarning, stacklevel=3)


# By place, without the weights


def find_ledger(model: str, ledger: Path | None) -> Path:
    """The ledger that was named, or the one that a model's name alone tells apart from all others."""
    if ledger is not None:
        return ledger.expanduser()
    found = _rivals(_named(model, _kept()))
    if len(found) > 1:
        names = ", ".join(kept.folder.name for kept in found)
        raise InputError(
            f"{len(found)} models named {slug(name_of(model))} have ledgers in {ledgers_folder()} ({names}), "
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
    here, every = place_of(model), _kept()
    found = _rivals([*_at(here, every), *(kept for kept in _named(model, every) if kept.place is None)])
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
                f"{unknown}: it may be another one named {slug(name_of(model))}, and nothing was changed; if it is "
                f"{here}, say so: {_step(one, again)}"
            )
        _warn(f"{unknown}: it was found by the model's name alone")
    if changing and one.replaced:
        raise InputError(
            f"the weights in {here} are not those that {one.folder} was made for, and nothing was changed: if its "
            f"edits are meant all the same, say so: {_step(one, again)}"
        )
    return one.folder


def require_readable() -> None:
    """Ask before a model is loaded whether its default ledger can be looked for."""
    _kept()


def require_some_ledger(model: str) -> None:
    """Ask before a model is loaded whether there is a ledger that could be its."""
    here, every = place_of(model), _kept()
    if not (_at(here, every) or _named(model, every) or any(kept.gone for kept in every)):
        raise _no_ledger(model)


def _no_ledger(model: str, again: str = "") -> InputError:
    """That a model has no ledger, and which may be its all the same: it may have been moved, renamed or copied."""
    every = _kept()
    named = _named(model, every)
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


def _at(place: str, every: Sequence[Kept]) -> list[Kept]:
    """Those made for a model in this place; a copy of a ledger by another name is none."""
    return [kept for kept in every if kept.place == place and kept.folder.name.endswith(f"-{kept.header['model'][:8]}")]


def _named(model: str, every: Sequence[Kept]) -> list[Kept]:
    """Those of all models with this one's name."""
    return [kept for kept in every if kept.folder.name[:-8] == f"{slug(name_of(model))}-"]


def _rivals(found: list[Kept]) -> list[Kept]:
    return [kept for kept in found if kept.has_edits] or found  # one that was begun for nothing is no rival


def _kept() -> list[Kept]:
    """All ledgers in the folder of the default ones, by name."""
    root = ledgers_folder()
    try:
        folders = sorted(root.iterdir())  # glob takes a folder that may not be read for an empty one
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise LedgerError(
            f"cannot read {root} ({problem.strerror or problem}), expected the folder that ledgers are in: get read "
            f"access to it, name another with REBIND_LEDGERS, or a ledger with --ledger"
        ) from None
    return [Kept(folder, _header(folder)) for folder in folders if is_there(folder / HEADER)]


def _header(folder: Path) -> dict[str, Any]:
    try:
        return read_header(folder)
    except LedgerError:
        return {}
