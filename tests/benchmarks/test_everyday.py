"""The everyday facts: nothing that is asked about other subjects is protected by the search that is measured."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.everyday import EverydayFact
from rebind.edit.facts.relations import PROTECTED_SUBJECTS

SPLITS = ("tune", "dev", "held", "fresh", "second")


NAMES = [name for kind in PROTECTED_SUBJECTS.values() for name in kind]


@pytest.mark.parametrize("split", SPLITS[:-1])
def test_no_protected_subject_is_asked_about(split):
    for one in EverydayFact.read(split):
        for text in (one.fact.text, *one.same_subject, *one.other_subjects):
            assert not [name for name in NAMES if name in text]


def test_no_neighbor_in_the_second_set_is_protected():
    """Its author did not know the names: prompts about the subject may mention London, but no question is about it."""
    for one in EverydayFact.read("second"):
        assert one.fact.subject not in NAMES
        for text in one.other_subjects:
            assert not [name for name in NAMES if name in text]


def test_the_sets_share_no_subject():
    subjects = {split: {one.fact.subject.lower() for one in EverydayFact.read(split)} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not subjects[one] & subjects[other]
