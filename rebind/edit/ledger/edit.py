"""An edit: facts that were written together, computed against the base model.

They are one `Write` per site, or rows of a dense memory (`rebind.edit.dense.rows`).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.tensors import StoredTensors
from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.memory.write import Write
from rebind.version import __version__

JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"

PARTS = ("keys", "values", "gain")  # the tensors of a write, as they are named in an edit
ROWS = "rows"  # the settings and, as "rows/states" and so on, the tensors of an edit in the dense memory
CONSOLIDATES = "consolidates"  # the setting of an edit that moved facts out of the dense memory
MOVED = ("edits", "subjects")  # what that setting lists
ROW_PARTS = ("states", "thresholds", "owner", "values")
TOKEN_BYTES = 16
MOST_LAYERS = 10_000
JSON_FIELDS = ("method", "settings", "scores", "versions", "created", "forced")  # stored as they are


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """Facts that were written into a model together, with everything needed to write them again."""

    id: str = ""  # assigned by the ledger
    facts: tuple[Fact, ...]
    method: str
    settings: Mapping[str, JSON]
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # "{site}/keys", "{site}/values", "{site}/gain" for each site; rows; "targets"
    scores: Mapping[str, JSON] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    created: str = ""  # UTC, ISO 8601; empty: the ledger fills in the time of the append
    forced: bool = False  # whether the edit was written although it failed a check
    # What folds know the edit by. A ledger sets it to a digest of what it stores; any other edit has one of its own.
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES), init=False, repr=False)

    def write(self, site: str, like: Tensor | None = None) -> Write:
        """Return the write at one of the edit's sites, with the dtype and the device of `like` if it is given."""
        if site not in self.sites:
            raise unknown_name("site", site, self.sites)
        tensors = self._tensors(f"{site}/{part}" for part in PARTS)
        return Write(*(tensors if like is None else [tensor.to(like) for tensor in tensors]))

    @property
    def has_rows(self) -> bool:
        """Whether the facts are in the dense memory."""
        return ROWS in self.settings

    @property
    def consolidates(self) -> tuple[str, ...]:
        """The ids of the edits whose rows this one moved into the weights."""
        moved: Any = self.settings.get(CONSOLIDATES, {})
        return tuple(moved.get("edits", ()))

    def require_complete(self) -> None:
        """Raise unless everything is there that is needed to apply the edit."""
        edit = self.loaded()
        for site in edit.sites:
            edit.write(site)
        if edit.has_rows:
            edit._tensors(f"{ROWS}/{part}" for part in ROW_PARTS)

    def loaded(self) -> Edit:
        """Return the edit with its tensors in memory: they are read once."""
        if not isinstance(self.tensors, StoredTensors):
            return self
        return replace(self, tensors=self.tensors.load()).with_token(self.token)

    def with_token(self, token: bytes) -> Edit:
        """Let folds take this edit for the one with a token."""
        object.__setattr__(self, "token", token)
        return self

    def _tensors(self, names: Iterable[str]) -> list[Tensor]:
        tensors = self.loaded().tensors
        try:
            return [tensors[name] for name in names]
        except KeyError as missing:
            raise InputError(f"Edit {self.id or '(new)'} has no tensor {missing}", code="edit_incomplete") from None

    @property
    def digest(self) -> str:
        """What identifies the edit in any ledger of any model: its facts, method and settings."""
        facts = [fact.to_json() for fact in self.facts]
        return digest_of({"facts": facts, "method": self.method, "settings": self.settings})

    def to_json(self) -> dict[str, JSON]:
        """Return everything but the id and the tensors."""
        facts = [fact.to_json() for fact in self.facts]
        return {"facts": facts, "sites": list(self.sites), **{name: getattr(self, name) for name in JSON_FIELDS}}

    @classmethod
    def from_json(cls, id: str, stored: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Edit:
        """Return the edit that `to_json` described; raise ValueError if a field has another type."""
        check_types(stored)
        facts = tuple(Fact.from_json(record) for record in stored["facts"])
        fields = {name: stored[name] for name in JSON_FIELDS}
        return cls(id=id, facts=facts, sites=tuple(stored["sites"]), tensors=tensors, **fields)


def check_types(stored: Mapping[str, Any]) -> None:
    """Raise ValueError unless the fields of a stored edit have the types that folds rely on: a log may be forged."""
    kinds = {"method": str, "settings": dict, "scores": dict, "versions": dict, "created": str, "forced": bool}
    wrong = [name for name, kind in kinds.items() if not isinstance(stored[name], kind)]
    if not wrong:
        settings = stored["settings"]
        layers, lam = settings.get("layers", []), settings.get("lam")
        rows, moved = settings.get(ROWS, {"joint": []}), settings.get(CONSOLIDATES, {})
        is_right = {
            "sites": _are_texts(stored["sites"]),
            "layers": isinstance(layers, list) and all(type(one) is int and 0 <= one < MOST_LAYERS for one in layers),
            "lam": lam is None or (type(lam) in (int, float) and 0 <= lam < math.inf),
            ROWS: isinstance(rows, dict) and isinstance(rows.get("joint"), list) and all(map(_is_joint, rows["joint"])),
            CONSOLIDATES: isinstance(moved, dict) and all(_are_texts(moved.get(name, [])) for name in MOVED),
        }
        wrong = [name for name, right in is_right.items() if not right]
    if wrong:
        raise ValueError(f"{wrong[0]} of another type")


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_joint(value: object) -> bool:
    """Return whether a value describes rows that carry or replace those of other edits (`rebind.edit.dense.rows`)."""
    if not isinstance(value, dict) or type(value.get("group")) is not int:
        return False
    return _are_texts(value.get("carries")) and _are_texts(value.get("replaces"))


def pack_writes(writes: Mapping[str, Write]) -> dict[str, Tensor]:
    """Return the tensors of one write per site, named as in `Edit.tensors`."""
    return {
        f"{site}/{part}": tensor.cpu()
        for site, write in writes.items()
        for part, tensor in zip(PARTS, write.tensors(), strict=True)
    }


def library_versions() -> dict[str, str]:
    """Return the versions of everything that the numbers of an edit depend on."""
    return {
        "rebind": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def digest_of(value: JSON, previous: str = "") -> str:
    """Return the SHA-256 of a value, chained to the digest of the line before it."""
    return hashlib.sha256(previous.encode() + canonical_json(value)).hexdigest()


def canonical_json(value: JSON) -> bytes:
    """Return the one JSON text of a value, so that equal values have equal digests."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError) as problem:
        raise InputError(
            f"The edit cannot be stored as JSON ({problem})",
            expected="settings, scores and versions of finite numbers, texts, lists and dictionaries",
            code="not_json",
        ) from None
