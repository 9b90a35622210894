"""Every experiment's quick version, run once for all tests."""

from __future__ import annotations

import pytest

from rebind.lab.catalogue import get_experiment
from rebind.lab.run import Result, run


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """`quick(name)`: what `rebind lab NAME --quick` leaves."""
    done: dict[str, Result] = {}

    def result(name: str) -> Result:
        if name not in done:
            experiment = get_experiment(name)
            done[name] = run(experiment, experiment.quick, tmp_path_factory.mktemp("lab") / name)
        return done[name]

    return result
