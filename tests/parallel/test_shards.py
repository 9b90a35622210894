"""Models whose weights several processes share are edited like whole ones."""

from __future__ import annotations

from tests import tiny
from tests.parallel.forked import run_jobs


def test_sharded_models_are_edited(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "model")
    codes = run_jobs("tests.parallel.shards", {"fsdp": 2, "tensor_parallel": 2}, tmp_path)
    errors = "\n".join(file.read_text()[-2_000:] for file in sorted(tmp_path.glob("*/err-*")))
    assert codes == {"fsdp": [0, 0], "tensor_parallel": [0, 0]}, errors
