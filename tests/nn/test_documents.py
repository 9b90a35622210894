"""docs/models.md runs."""

from __future__ import annotations

import torch

from tests.test_docs import ROOT, run_blocks


def test_the_document_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert run_blocks(ROOT / "docs" / "models.md") > 5
