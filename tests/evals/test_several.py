"""Records that write several facts: all of them are asked, and runs of them go on to the same bytes."""

from __future__ import annotations

import json

import pytest

from rebind.errors import InputError

from .runs import RAW, Killed, contents, die_asking, every_protocol, lines, run

pytestmark = pytest.mark.usefixtures("quick")
TWO = {
    **RAW[0],
    "also": [
        {"prompt": "{Madrid} is the capital of", "target": "France", "old": "Spain", "paraphrases": ["Madrid is"]}
    ],
}


def test_every_fact_that_is_written_is_asked(tmp_path):
    result = run(tmp_path / "out", raw=[TWO, *RAW[1:]], figures=True)
    base, *_ = rows = lines(tmp_path / "out")
    after = next(row for row in rows if row["edits"])
    for row in (base, after):
        (other,) = row["also"]
        assert set(other["prompt"]) == {"new", "true"}
        assert len(other["paraphrases"]) == len(other["free"]["paraphrases"]) == 1
        assert isinstance(other["free"]["prompt"], str)
    assert after["also"][0]["prompt"]["new"]["nll"] < base["also"][0]["prompt"]["new"]["nll"]
    assert result.config["data"]["facts"] == 6
    assert result.summary["states"][1]["scores"]["ES"]["records"] == 4
    alone, *_ = lines(run(tmp_path / "alone", raw=TWO["also"]).folder)
    (other,) = base["also"]
    assert other["prompt"]["new"]["nll"] == pytest.approx(alone["prompt"]["new"]["nll"], abs=1e-4)
    assert other["prompt"]["true"]["nll"] == pytest.approx(alone["prompt"]["true"]["nll"], abs=1e-4)
    assert other["free"]["prompt"] == alone["free"]["prompt"]


def test_records_of_one_fact_are_told_as_ever(tmp_path):
    run(tmp_path / "out", raw=[TWO, *RAW[1:]])
    run(tmp_path / "plain")
    mixed, plain = lines(tmp_path / "out"), lines(tmp_path / "plain")
    assert [list(row) for row in mixed if row["record"]] == [list(row) for row in plain if row["record"]]
    assert list(plain[0]) == [
        "edits",
        "record",
        "id",
        "prompt",
        "paraphrases",
        "neighbours",
        "consequences",
        "free",
        "texts",
    ]
    assert list(plain[0]["free"]) == ["prompt", "paraphrases", "consequences"]
    assert "facts" not in json.loads((tmp_path / "plain" / "config.json").read_text())["data"]


@every_protocol
def test_a_killed_run_of_several_facts_goes_on_to_the_same_bytes(name, tmp_path, monkeypatch):
    raw = [TWO, *RAW[1:3]]
    expected = contents(run(tmp_path / "whole", name, raw=raw).folder)
    with monkeypatch.context() as patch:
        die_asking(patch, portion=3)  # after two of the base model
        with pytest.raises(Killed):
            run(tmp_path / "out", name, raw=raw)
    run(tmp_path / "out", name, raw=raw)
    assert contents(tmp_path / "out") == expected


def test_a_run_that_asked_the_first_fact_only_is_not_gone_on_with(tmp_path):
    run(tmp_path / "out", raw=[TWO])
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    del config["data"]["facts"]  # as it was before all of them were asked
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"differs in data.facts \(None, now 2\)"):
        run(tmp_path / "out", raw=[TWO])
