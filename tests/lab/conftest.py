"""Every experiment's quick version, run once for all tests."""

from __future__ import annotations

import pytest

from rebind.lab import ExperimentResult, get_experiment, run_experiment


@pytest.fixture(scope="session")
def quick(tmp_path_factory):
    """Return a function that runs `rebind lab NAME --quick`."""
    results: dict[str, ExperimentResult] = {}

    def result(name: str) -> ExperimentResult:
        if name not in results:
            results[name] = run_experiment(get_experiment(name).quick(), tmp_path_factory.mktemp("lab") / name)
        return results[name]

    return result
