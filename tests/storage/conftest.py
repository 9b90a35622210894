"""A folder that cannot be written."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def read_only(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "config.json").write_text('{"kind": "evaluation", "n": 1}')
    (folder / "rows.jsonl").write_text('{"n": 1}\n{"torn')
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    yield folder
    folder.chmod(0o755)
