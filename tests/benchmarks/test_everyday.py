"""The everyday facts: nothing that is asked about other subjects is protected by the search that is measured."""

from __future__ import annotations

from itertools import combinations

import pytest

from benchmarks.everyday import EverydayFact
from rebind.edit.facts.relations import PROTECTED_SUBJECTS

SPLITS = ("tune", "dev", "held", "fresh", "second")


@pytest.mark.parametrize("split", SPLITS)
def test_no_protected_subject_is_asked_about(split):
    names = [name for kind in PROTECTED_SUBJECTS.values() for name in kind]
    for one in EverydayFact.read(split):
        assert one.fact.subject not in names
        for text in one.other_subjects:
            assert not [name for name in names if name in text]


def test_the_sets_share_no_subject():
    subjects = {split: {one.fact.subject.lower() for one in EverydayFact.read(split)} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not subjects[one] & subjects[other]
