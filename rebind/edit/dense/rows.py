"""The rows of an edit, and which of them are read once edits follow one another.

An edit has one group of rows per subject. The keys of a group share a value, which says all facts of the edit about
that subject. If earlier edits are about the subject, too, the edit has a second variant of the group: its value was
searched together with their facts (`Joint.carries`), except for those that it contradicts (`Joint.replaces`). The joint
variant is read while all the edits that it carries are active, the group's own one otherwise, so that any of the edits
can be undone without a new search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from rebind.edit.facts.fact import comparable
from rebind.edit.ledger.edit import CONSOLIDATES, JSON, ROW_PARTS, ROWS, Edit


@dataclass(frozen=True)
class Joint:
    """How a group of rows relates to earlier edits about its subject."""

    group: int
    carries: tuple[str, ...]  # ids of edits whose facts the joint value says, too
    replaces: tuple[str, ...]  # ids of edits whose facts about the subject this one contradicts

    def to_json(self) -> dict[str, JSON]:
        return {"group": self.group, "carries": list(self.carries), "replaces": list(self.replaces)}


@dataclass(frozen=True, eq=False)
class EditRows:
    """The rows of one edit. Variants are numbered: one per group, then one per joint that carries other edits."""

    layer: int
    states: Tensor  # [m, d]: hidden states at the subjects, not yet whitened
    thresholds: Tensor  # [m]
    owner: Tensor  # [m]: the variant that a row belongs to
    values: Tensor  # [v, d]: δ of each variant
    subjects: tuple[str, ...]  # of each group
    joints: tuple[Joint, ...]

    @classmethod
    def of(cls, edit: Edit) -> EditRows:
        """Return the rows that an edit stores."""
        settings: Any = edit.settings
        joints = (Joint(one["group"], tuple(one["carries"]), tuple(one["replaces"])) for one in settings[ROWS]["joint"])
        tensors = edit.loaded().tensors
        states, thresholds, owner, values = (tensors[f"{ROWS}/{part}"] for part in ROW_PARTS)
        layer, subjects = settings["layers"][0], cls.subjects_in(edit)
        return cls(layer, states, thresholds, owner, values, subjects, tuple(joints))

    @staticmethod
    def subjects_in(edit: Edit) -> tuple[str, ...]:
        """Return the subjects of an edit, one per group."""
        return tuple(dict.fromkeys(comparable(fact.subject) for fact in edit.facts))

    def tensors(self) -> dict[str, Tensor]:
        """Return what `Edit.tensors` stores."""
        return {f"{ROWS}/{part}": getattr(self, part).cpu() for part in ROW_PARTS}

    @cached_property
    def joint_of(self) -> dict[int, Joint]:
        """How each group relates to earlier edits, if there are any."""
        return {joint.group: joint for joint in self.joints}

    @cached_property
    def joint_variants(self) -> dict[int, int]:
        """The variant of each group that carries other edits."""
        carrying = [joint.group for joint in self.joints if joint.carries]
        return {group: len(self.subjects) + index for index, group in enumerate(carrying)}


Variant = tuple[int, int]  # (which edit, which of its variants)


def read_variants(
    edits: Sequence[tuple[str, EditRows]], moved: Mapping[str, Collection[str]] | None = None
) -> dict[str, list[Variant]]:
    """Return the variants that are read for each subject after some edits, each with its id, in order.

    The latest edit about a subject comes first. Edits that it neither carries nor replaces are read as well. `moved`
    is what `moved_subjects` returns.
    """
    groups: dict[str, list[Variant]] = {}
    for index, (id, rows) in enumerate(edits):
        for group, subject in enumerate(rows.subjects):
            if not moved or id not in moved.get(subject, ()):
                groups.setdefault(subject, []).append((index, group))
    return {subject: _read_of_subject(edits, own) for subject, own in groups.items()}


def _read_of_subject(edits: Sequence[tuple[str, EditRows]], groups: list[Variant]) -> list[Variant]:
    """Return what is read of the groups about one subject that are in the dense memory.

    What an edit replaces stays replaced when a later edit carries it, and comes back when it is undone.
    """
    if len(groups) == 1 and not edits[groups[0][0]][1].joints:
        return groups
    ids = {edits[index][0] for index, _ in groups}
    covered: set[str] = set()
    variants = []
    for index, group in reversed(groups):
        id, rows = edits[index]
        is_read, variant = id not in covered, group
        joint = rows.joint_of.get(group)
        if joint is not None:
            covered |= set(joint.replaces)
            if is_read and joint.carries and ids.issuperset(joint.carries):
                covered |= set(joint.carries)
                variant = rows.joint_variants[group]
        if is_read:
            variants.append((index, variant))
    return variants


def moved_subjects(edits: Iterable[Edit]) -> dict[str, set[str]]:
    """Return the subjects that consolidations took out of the dense memory, with the ids of the edits about them."""
    moved: dict[str, set[str]] = {}
    for edit in edits:
        settings: Any = edit.settings
        for subject in settings.get(CONSOLIDATES, {}).get("subjects", ()):
            moved.setdefault(subject, set()).update(edit.consolidates)
    return moved


def replaced_by(edit: Edit) -> dict[str, list[str]]:
    """Return the ids of the edits whose facts an edit replaces, by subject."""
    settings: Any = edit.settings
    replaced = {one["group"]: one["replaces"] for one in settings[ROWS]["joint"]}
    return {subject: replaced.get(group, []) for group, subject in enumerate(EditRows.subjects_in(edit))}


def superseded_by(edit: Edit) -> set[str]:
    """Return the ids of the edits that some group of an edit carries or replaces."""
    settings: Any = edit.settings
    return {id for one in settings.get(ROWS, {}).get("joint", ()) for id in (*one["carries"], *one["replaces"])}


def unrelated(edit: Edit, others: Iterable[Edit]) -> list[Edit]:
    """Return those of the other edits that have no agreement with this one about who speaks for a subject."""
    own = superseded_by(edit)
    return [other for other in others if other.id not in own and edit.id not in superseded_by(other)]
