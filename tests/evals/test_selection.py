"""Which records a model can be evaluated with."""

from __future__ import annotations

import pytest

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.evals import get_protocol, known_records, read_records, usable_records
from rebind.evals.selection import without_conflicts
from tests.evals.runs import RAW, new_editor
from tests.support import raises

SINGLE, BATCH = get_protocol("single"), get_protocol("batch")
LONG = {**RAW[1], "id": "long", "prompt": "very " * 120 + "{Ada} is"}


@pytest.fixture(scope="module")
def editor():
    return new_editor()


def ids(records) -> list[str]:
    return [record.id for record in records]


def test_records_that_do_not_fit_are_named_or_skipped(editor):
    wide = {**RAW[2], "id": "wide", "neighbors": ["old " * 120 + "is"]}
    records = read_records([RAW[0], LONG, wide])
    with raises(InputError, "prompt_too_long") as caught:
        usable_records(editor, records, SINGLE, skip_bad=False)
    assert caught.value.problem.startswith("Record long")
    usable = usable_records(editor, records, SINGLE, skip_bad=True)
    assert ids(usable) == ["0"]
    assert [reason.split(":")[0] for reason in usable.skipped] == ["Record long", "Record wide"]
    with raises(InputError, "no_usable_record"):
        usable_records(editor, read_records([LONG]), SINGLE, skip_bad=True)


def test_records_after_the_limit_are_not_checked(editor):
    again = {**RAW[0], "id": "again", "target": "Madrid"}
    broken = {"prompt": "no subject", "target": "x"}
    raw = [broken, RAW[0], LONG, again, broken, RAW[2], broken, RAW[3], LONG]
    records = read_records(raw, skip_bad=True)
    usable = usable_records(editor, records, BATCH, skip_bad=True, limit=2)
    assert [record.fact.target for record in usable] == ["Rome", "Spain"]
    assert len(usable.skipped) == 5, "three that cannot be read, and two before the limit"
    for limit in (None, 9):
        usable = usable_records(editor, records, BATCH, skip_bad=True, limit=limit)
        assert (len(usable), len(usable.skipped)) == (3, 6), "all of them"
    assert len(usable_records(editor, records, SINGLE, skip_bad=True, limit=2)) == 2


def test_contradictions_matter_only_where_records_meet(editor):
    records = read_records([RAW[0], {**RAW[0], "id": "other", "target": "Madrid"}])
    assert usable_records(editor, records, SINGLE, skip_bad=False).records == records.records
    with raises(InputError, "conflicting_records"):
        usable_records(editor, records, BATCH, skip_bad=False)
    assert len(usable_records(editor, records, BATCH, skip_bad=True)) == 1


@pytest.mark.parametrize("protocol", [SINGLE, BATCH], ids=lambda protocol: protocol.name)
def test_a_record_that_contradicts_itself_is_named_or_skipped(protocol, editor):
    also = [{"prompt": "The capital of {France} is", "target": "Madrid"}]
    same = {**RAW[1], "id": "same", "also": [{name: RAW[1][name] for name in ("prompt", "target")}]}
    records = read_records([{**RAW[0], "id": "odd", "also": also}, same, RAW[2]])
    with pytest.raises(InputError):
        usable_records(editor, records, protocol, skip_bad=False)
    usable = usable_records(editor, records, protocol, skip_bad=True)
    assert ids(usable) == ["same", "2"]
    assert [reason.split(":")[0] for reason in usable.skipped] == ["Record odd"]


def test_a_record_that_is_skipped_conflicts_with_none():
    one = {"id": "a", "prompt": "{Oslo} is", "target": "old"}
    two = {"id": "b", "prompt": "{Oslo} is", "target": "new", "also": [{"prompt": "{Bergen} is", "target": "wet"}]}
    three = {"id": "c", "prompt": "{Bergen} is", "target": "dry"}
    same = {**one, "id": "d"}
    consistent = without_conflicts(read_records([one, two, three, same]), skip_bad=True)
    assert ids(consistent) == ["a", "c", "d"]
    assert len(consistent.skipped) == 1


def test_known_records_are_those_whose_true_target_is_preferred(editor):
    fact = {name: RAW[0][name] for name in ("prompt", "target", "old")}
    swapped = {**fact, "id": "swapped", "target": "Paris", "old": "Rome"}
    known = known_records(editor, read_records([fact, swapped, RAW[2]]))
    new, true = editor.score([Fact.parse("The capital of {France} is", target) for target in ("Rome", "Paris")])
    assert ids(known) == ["0" if true.nll < new.nll else "swapped"]
    for unknown in (swapped if true.nll < new.nll else fact, RAW[2]):  # the latter has no true target
        with raises(InputError, "no_known_record"):
            known_records(editor, read_records([unknown]))
