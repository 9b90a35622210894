"""Settings of training with sequences that are split over processes; `test_processes` runs it."""

from __future__ import annotations

import pytest

from rebind.errors import InputError
from tests.nn.training_runs import config, corpus
from tests.support import raises


@pytest.mark.parametrize("changes", [{"length": 15}, {"carry": True}, {"compile": True}])
def test_what_cannot_be_split_is_refused(tmp_path, changes):
    with raises(InputError, "invalid_context_parallel"):
        config(corpus(tmp_path), context_parallel=2, **changes)


def test_processes_must_be_a_multiple(tmp_path):
    run = config(corpus(tmp_path), context_parallel=2)
    assert run.sequences_at_once(4) == 2
    with raises(InputError, "indivisible_processes"):
        run.sequences_at_once(1)
