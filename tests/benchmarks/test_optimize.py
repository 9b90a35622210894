"""The benchmark of `rebind.optimize` runs, and compares the losses of both ways."""

from __future__ import annotations

from benchmarks.optimize import MODELS, main
from rebind.storage import read_json_object


def test_every_model_is_measured(tmp_path, capsys):
    out = tmp_path / "result.json"
    main(["--widths", "32", "--tokens", "12", "--rounds", "1", "--out", str(out)])
    rows = read_json_object(out)["rows"]
    assert [row["model"] for row in rows[::3]] == list(MODELS)
    assert all(row["transformers"] > 0 and row["rebind"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
