"""A folder that cannot be written."""

from __future__ import annotations

import os

import pytest

from rebind.storage import RunFolder


@pytest.fixture
def read_only(tmp_path):
    folder = tmp_path / "read-only"
    with RunFolder.open(folder, "evaluation", {"n": 1}) as run:
        run.rows("rows.jsonl").append({"n": 1})
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write('{"torn')
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    yield folder
    folder.chmod(0o755)
