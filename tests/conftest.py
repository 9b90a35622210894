"""Shared by all tests: seeded tensors and a comparison that says by how much it failed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.bounds import watched
from tests.interpreter import quick

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported, which is later

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing goes into the data folder of the user who runs the tests."""
    os.environ["REBIND_DATA"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_stay_inside() -> Iterator[None]:
    """Wherever kernels are interpreted, they are watched, and interpreted without repeated work."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0") or importlib.util.find_spec("triton") is None:
        yield
        return
    with watched(), quick():
        yield
