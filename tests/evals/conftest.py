"""Tests run without a network and with a cache of their own; finished runs that several files look at."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's client, which reads it once

import huggingface_hub.constants
import pytest

from tests.evals.runs import FinishedRun, new_editor, run


@pytest.fixture(scope="session", autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests here: they share second moments, which take longer than the evaluations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # doctests may have imported it before
        patch.setenv("REBIND_CACHE", str(tmp_path_factory.mktemp("rebind-cache")))
        yield


@pytest.fixture(scope="session")
def finished(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], FinishedRun]:
    """Return an undisturbed run by a protocol."""

    @functools.cache
    def finish(name: str) -> FinishedRun:
        folder = tmp_path_factory.mktemp(name)
        editor, reports = new_editor(ledger=folder / "ledger"), []
        result = run(folder / "out", name, editor, on_unit=lambda *report: reports.append(report))
        return FinishedRun(result, editor, reports)

    return finish
