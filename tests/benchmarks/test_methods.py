"""The table of methods: targets are shared, sequences decay as they should, rows are kept and not measured twice."""

from __future__ import annotations

import json

import pytest

from benchmarks.methods import Bench, Results, batch, figure, impossible, main, run, sequential
from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.methods import get_method
from rebind.evals.records import Question, Record
from tests.edit import tiny

SUBJECTS = ("France", "Spain", "Norway", "Italy", "Mostar", "Dante")


def records() -> list[Record]:
    return [
        Record(
            Fact(
                ("The capital of {} is", "I saw {} in")[number % 2],
                subject,
                "Rome",
                "Paris",
                paraphrases=(f"{subject} is",),
            ),
            subject,
            neighbours=(Question("The sea is", "Paris"),),
        )
        for number, subject in enumerate(SUBJECTS)
    ]


@pytest.fixture
def bench() -> Bench:
    editor = Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256, guard=None)
    known = records()
    return Bench(editor, known, [record.fact for record in known], " ".join(tiny.SENTENCES), free=2)


def test_methods_share_targets_and_the_model_is_put_back(bench):
    before = tiny.weights(bench.editor.model)
    first, second = batch(bench, "memit", 6), batch(bench, "recursive", 6)
    assert (first.searched, second.searched) == (6, 0)
    assert first.scores == second.scores, "in one edit recursive is memit"
    assert first.scores["free"]["records"] == 2
    assert batch(bench, "memit", 2).groups == 1
    assert batch(bench, "memit", 1).groups == 6, "as many groups as there are records for"
    assert tiny.weights(bench.editor.model) == before


@pytest.mark.parametrize("found", ["base", "edited"])
def test_a_sequence_is_asked_at_its_stops_and_taken_back(bench, found):
    before = tiny.weights(bench.editor.model)
    rows = list(sequential(bench, "alphaedit", found, 2, [2, 6]))
    assert [row.facts for row in rows] == [2, 6]
    assert [row.scores["ES"]["records"] for row in rows] == [2, 6]
    assert rows[1].growth > rows[0].growth > 0
    assert tiny.weights(bench.editor.model) == before


@pytest.mark.parametrize("method", ["memit", "recursive", "alphaedit"])
def test_a_first_batch_is_the_same_on_the_base_and_on_the_edited_model(bench, method):
    one, other = (next(iter(sequential(bench, method, found, 3, [3]))) for found in ("base", "edited"))
    assert one.lam == pytest.approx(other.lam)
    assert one.growth == pytest.approx(other.growth, rel=1e-4)
    assert one.perplexity == pytest.approx(other.perplexity, rel=1e-4)


def test_later_batches_differ_once_they_are_found_on_the_edited_model(bench):
    one, other = (list(sequential(bench, "memit", found, 3, [6]))[-1] for found in ("base", "edited"))
    assert one.growth != pytest.approx(other.growth, rel=1e-4)


def test_methods_that_remember_are_handed_earlier_keys_on_the_edited_model(bench, monkeypatch):
    method, seen = get_method("recursive"), []

    def gain(keys, old, lam, earlier):
        seen.append(len(earlier))
        return own(keys, old, lam, earlier)

    own = method.gain
    monkeypatch.setitem(method.__dict__, "gain", gain)
    list(sequential(bench, "recursive", "edited", 2, [4]))
    layers = len(bench.editor.settings("recursive")[1].layers)
    assert seen == [0] * layers + [2] * layers


def test_more_facts_than_dimensions_have_no_exact_solution(bench):
    assert "48 dimensions" in impossible(bench.editor, get_method("emmet"), 49, made=True)
    assert not impossible(bench.editor, get_method("emmet"), 48, made=True)
    assert "memit" in impossible(bench.editor, get_method("recursive"), 100, made=True)
    assert batch(bench, "rome", 100).why


def test_rows_are_kept_and_a_second_run_measures_nothing(bench, tmp_path):
    options = {
        "methods": ["memit"],
        "numbers": [2],
        "protocols": ["batch", "sequential"],
        "found": ["base", "edited"],
        "size": 3,
        "at": [3, 6],
    }
    path = tmp_path / "rows.json"
    told = []
    run(bench, Results.open(path, {"seed": 0}), told=lambda row, seconds: told.append(row.name), **options)
    assert len(told) == 1 + 1 + 2 + 2
    again = Results.open(path, {"seed": 0})
    run(bench, again, told=lambda row, seconds: pytest.fail(f"{row.name} was measured again"), **options)
    assert len(json.loads(path.read_text())["rows"]) == 6
    with pytest.raises(SystemExit, match="remove it or name another"):
        Results.open(path, {"seed": 1})
    figure(again.rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_reads_records_and_draws(tmp_path, capsys):
    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    lines = [json.dumps(record.to_json()) for record in records()]
    swapped = [line.replace('"Rome"', '"@"').replace('"Paris"', '"Rome"').replace('"@"', '"Paris"') for line in lines]
    (tmp_path / "facts.jsonl").write_text("\n".join([*lines[:3], *swapped[3:]]))
    (tmp_path / "text.txt").write_text(" ".join(tiny.SENTENCES))
    files = ["--facts", "facts.jsonl", "--text", "text.txt", "--out", "out.json", "--figure", "out.png"]
    paths = [str(tmp_path / word) if "." in word else word for word in files]
    sizes = ["--n", "1", "9", "--methods", "memit", "recursive", "--batch", "1", "--at", "1", "--found", "base"]
    main([*paths, *sizes, "--model", str(folder), "--device", "cpu"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["method"], row["protocol"], row["facts"], bool(row["why"])) for row in rows[1:]] == [
        ("memit", "batch", 1, False),
        ("recursive", "batch", 1, False),
        ("memit", "batch", 9, False),
        ("recursive", "batch", 9, True),
        ("memit", "sequential", 1, False),
        ("recursive", "sequential", 1, False),
    ]
    assert [row["made"] for row in rows if row["facts"] == 9] == [True, True]
    assert (tmp_path / "out.png").exists()
    assert "facts paired anew" in capsys.readouterr().out
