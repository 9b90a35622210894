"""The benchmark of ledgers runs, and its rows have what the figure draws."""

from __future__ import annotations

import json

import pytest

from benchmarks import ledger


@pytest.mark.parametrize("method", ["memit", "dense"])
def test_the_benchmark_measures_a_growing_ledger(tmp_path, method):
    out = tmp_path / "ledger.json"
    ledger.main(["--method", method, "--facts", "2", "--edits", "2", "12", "--out", str(out), "--compact"])
    results = json.loads(out.read_text())
    (rows,) = results["methods"].values()
    assert [(row["edits"], row["facts"]) for row in rows] == [(2, 4), (12, 24)]
    assert all(row[name] >= 0 for row in rows for name in (*ledger.SECONDS, *ledger.BYTES))
    (compacted,) = results["compacted"].values()
    assert compacted["bytes after"] < compacted["bytes before"]
    ledger.main(["--out", str(out), "--figure", str(tmp_path / "ledger.png")])
    assert (tmp_path / "ledger.png").stat().st_size > 10_000
