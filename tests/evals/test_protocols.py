"""Which records are in the model, and which are asked, stage by stage."""

from __future__ import annotations

import pytest

from rebind.errors import InputError, UnknownNameError
from rebind.evals.protocols import Stage, get_protocol
from tests.support import raises


def test_single_is_each_alone():
    stages = list(get_protocol("single").stages(3))
    assert stages[0] == Stage(0, (), range(3), alone=True)
    assert stages[1:] == [Stage(1, (range(i, i + 1),), range(i, i + 1), alone=True) for i in range(3)]


def test_batch_is_all_at_once():
    assert list(get_protocol("batch").stages(5)) == [Stage(0, (), range(5)), Stage(5, (range(5),), range(5))]


def test_sequential_asks_everything_so_far_when_the_batches_have_doubled():
    stages = list(get_protocol("sequential", batch=10).stages(65))
    assert [stage.edits for stage in stages] == [0, 10, 20, 40, 65]
    assert stages[-1].batches == (*(range(i, i + 10) for i in range(0, 60, 10)), range(60, 65))
    assert [stage.records for stage in stages[1:]] == [range(10), range(20), range(40), range(65)]
    every = get_protocol("sequential", batch=10, every=3).stages(65)
    assert [stage.edits for stage in every] == [0, 30, 60, 65]
    assert [stage.edits for stage in get_protocol("sequential", batch=100).stages(7)] == [0, 7]


def test_units_cover_every_stage_in_order():
    units = get_protocol("sequential", batch=4).units(8, unit_size=3, drift_edits=1)
    asked = [(unit.edits, unit.records.start, unit.records.stop, unit.drift) for unit in units]
    assert asked == [
        (0, 0, 3, True),
        (0, 3, 6, False),
        (0, 6, 8, False),
        (4, 0, 3, True),
        (4, 3, 4, False),
        (8, 0, 3, True),
        (8, 3, 6, False),
        (8, 6, 8, False),
    ]
    single = get_protocol("single").units(4, unit_size=3, drift_edits=2)
    assert [unit.drift for unit in single] == [True, False, True, True, False, False], "the base and two edits"


def test_what_is_no_protocol():
    with pytest.raises(UnknownNameError):
        get_protocol("sequental")
    for wrong in ({"batch": 0}, {"every": 0}):
        with raises(InputError, "setting_too_small"):
            get_protocol("sequential", **wrong)
