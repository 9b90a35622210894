"""Evaluations of a tiny model: exact restoration, resumption to the same bytes, and the contents of the folder."""

from __future__ import annotations

import functools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rebind.edit.facts.fact import Fact
from rebind.edit.settings import save_measured_layers
from rebind.errors import InputError, RebindError, StorageError, UnknownNameError
from rebind.evals import run as run_module
from rebind.evals.answers import QuestionSettings
from rebind.evals.protocols import get_protocol
from rebind.evals.reading import read_records
from rebind.evals.records import Record, Records
from rebind.evals.run import EvalProgress, default_folder
from rebind.evals.selection import known_records, usable_records
from rebind.storage import JsonLines, lock
from tests import tiny

from .runs import LASTING, RAW, Killed, contents, dies_after, every_protocol, lines, new_editor, run

SINGLE, BATCH = get_protocol("single"), get_protocol("batch")
LONG = {**RAW[1], "id": "long", "prompt": "very " * 120 + "{Ada} is"}


@every_protocol
def test_the_model_is_restored_byte_for_byte(name, tmp_path):
    editor = new_editor(ledger=tmp_path / "ledger")
    before, guard, ledger = tiny.weights(editor.model), editor.guard, editor.ledger
    run(tmp_path / "out", name, editor)
    assert tiny.weights(editor.model) == before
    assert editor.guard is guard
    assert editor.ledger is ledger
    assert not editor.ledger.edits


def test_single_edits_start_from_the_base_model(tmp_path):
    run(tmp_path / "all")
    together = [row for row in lines(tmp_path / "all") if row["edits"]]
    assert [row["record"] for row in together] == [0, 1, 2, 3, 4]
    run(tmp_path / "one", raw=RAW[2:3])
    (alone,) = [row for row in lines(tmp_path / "one") if row["edits"]]
    for part in ("prompt", "neighbors", "free", "texts"):
        assert together[2][part] == alone[part]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of an undisturbed run, for each protocol."""

    @functools.cache
    def files(name: str) -> dict[str, bytes]:
        return contents(run(tmp_path_factory.mktemp("undisturbed") / "out", name).folder)

    return files


@every_protocol
def test_same_seed_same_bytes(name, tmp_path, undisturbed):
    again = contents(run(tmp_path / "a", name).folder)
    assert again == undisturbed(name)
    assert again.keys() == LASTING
    other = run(tmp_path / "b", name, new_editor(seed=1))
    assert contents(other.folder)["records.jsonl"] != again["records.jsonl"]


def test_figures_have_the_same_bytes(tmp_path):
    first, again = (contents(run(tmp_path / name, "sequential", figures=True).folder) for name in "ab")
    assert first == again
    assert first.keys() == LASTING | {"scores.png", "edits.png", "nll.png"}


@every_protocol
@pytest.mark.parametrize("stored", [1, 4])
def test_a_killed_run_resumes_to_the_same_bytes(name, stored, tmp_path, monkeypatch, undisturbed):
    expected, append = undisturbed(name), JsonLines.append

    def dying(self, rows, **options):
        append(self, rows, **options)
        if self.path.name == "records.jsonl" and len(self.read()) >= 2 * stored:
            with self.path.open("ab") as file:
                file.write(b'{"edits": 1, "rec')  # half a line, as a kill leaves it
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", dying)
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    numbers = []
    progress = EvalProgress(unit=lambda number, total, stage, scores: numbers.append(number))
    run(tmp_path / "out", name, progress=progress)
    assert contents(tmp_path / "out") == expected
    assert numbers[0] > 1, "not from the beginning"
    numbers.clear()
    run(tmp_path / "out", name, progress=progress)
    assert (contents(tmp_path / "out"), numbers) == (expected, []), "nothing is left to do"


@every_protocol
def test_killed_between_an_edit_and_its_answers(name, tmp_path, monkeypatch, undisturbed):
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "answer_records", dies_after(3, run_module.answer_records))  # three of the base model
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    assert len(lines(tmp_path / "out", "edits.jsonl")) == 1
    run(tmp_path / "out", name)
    assert contents(tmp_path / "out") == undisturbed(name)


@pytest.mark.parametrize(("name", "edits"), [("single", 2), ("batch", 0), ("sequential", 0), ("sequential", 1)])
def test_killed_between_the_ledger_and_the_log_of_an_edit(name, edits, tmp_path, monkeypatch, undisturbed):
    append = JsonLines.append

    def dying(self, rows, **options):
        if self.path.name == "edits.jsonl" and len(self.read()) == edits:
            raise Killed
        append(self, rows, **options)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "append", dying)
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    run(tmp_path / "out", name)
    assert contents(tmp_path / "out") == undisturbed(name)


def test_sequential_edits_accumulate_and_everything_is_asked_again(tmp_path):
    result = run(tmp_path / "out", "sequential")
    rows = lines(tmp_path / "out")
    assert [(row["edits"], row["record"]) for row in rows] == [
        *((0, i) for i in range(5)),
        *((2, i) for i in range(2)),
        *((4, i) for i in range(4)),
        *((5, i) for i in range(5)),
    ]
    early, late = (next(r for r in rows if r["edits"] == n and r["record"] == 0) for n in (2, 5))
    assert early["prompt"] != late["prompt"], "later batches change the answers to the first"
    assert [row["records"] for row in lines(tmp_path / "out", "edits.jsonl")] == [[0, 2], [2, 4], [4, 5]]
    assert [state["edits"] for state in result.summary["states"]] == [0, 2, 4, 5]
    assert not (tmp_path / "out" / "work").exists()


def test_contents_of_the_folder(tmp_path):
    editor = new_editor()
    result = run(tmp_path / "out", editor=editor)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"]["fingerprint"] == editor.language_model.fingerprint
    assert config["data"]["digest"] == read_records(RAW).digest
    assert (config["seed"], config["method"], config["settings"]["steps"]) == (0, "memit", 2)
    assert set(config["versions"]) >= {"rebind", "torch", "transformers", "python", "numpy"}
    base, after = result.summary["states"]
    assert (base["edits"], after["edits"]) == (0, 1)
    scores = after["scores"]
    assert set(scores) >= {"S", "ES", "PS", "NS", "EA", "PA", "EM", "GE", "RS", "free", "portability", "locality"}
    assert scores["ES"]["records"] == 4, "one record has no true target"
    assert scores["NS"]["records"] == 1, "records with neighbors that the true target answers"
    assert scores["tokens_neighbors"]["records"] == scores["RS"]["records"] == 1
    assert all(one["low"] <= one["value"] <= one["high"] for one in scores.values())
    drift = lines(tmp_path / "out", "drift.jsonl")
    assert [row["records"] for row in drift] == [None, [0, 1], [1, 2]], "the base model and two of the edits"
    assert base["drift"]["kl"] == base["drift"]["growth"] == 0
    assert after["drift"]["kl"] > 0
    assert after["drift"]["growth"] == pytest.approx(sum(row["growth"] for row in drift[1:]) / 2, abs=1e-6)
    assert set(drift[1]["sites"]) == set(lines(tmp_path / "out", "edits.jsonl")[0]["sites"])
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| before | 5 |" in table
    assert "harmonic mean of ES, PS and NS" in table
    assert {row["edits"] for row in lines(tmp_path / "out", "timings.jsonl")} == {0, 1}


def test_edits_show_in_the_answers(tmp_path):
    run(tmp_path / "out", "batch", raw=RAW[:3], steps=8)
    rows = lines(tmp_path / "out")
    before, after = ([row["prompt"]["new"]["nll"] for row in part] for part in (rows[:3], rows[3:]))
    assert all(new < old for old, new in zip(before, after, strict=True))


def test_facts_of_one_record_are_written_together(tmp_path):
    also = (Fact.parse("{Rome} lies in", "Spain"),)
    records = Records((Record(Fact.parse("The capital of {France} is", "Rome"), "two", also=also),))
    run(tmp_path / "out", raw=records)
    with_both = lines(tmp_path / "out")[-1]["prompt"]
    run(tmp_path / "one", raw=Records((Record(records[0].fact, "one"),)))
    assert lines(tmp_path / "one")[-1]["prompt"] != with_both


def test_questions_can_be_left_out(tmp_path):
    run(tmp_path / "out", "batch", raw=RAW[:1], questions=QuestionSettings(0, 0))
    (_, row) = lines(tmp_path / "out")
    assert not {"free", "texts"} & row.keys()
    for wrong in ({"free_tokens": -1}, {"texts": -1}, {"text_tokens": 0}, {"top_k": 0}):
        with pytest.raises(InputError):
            QuestionSettings(**wrong)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = run(Path("~/runs/x"), "batch", raw=RAW[:1])
    assert result.folder == tmp_path / "home" / "runs" / "x"


# Refusals


def test_the_folder_of_another_run_is_left_alone(tmp_path):
    run(tmp_path / "out", raw=RAW[:1])
    before = contents(tmp_path / "out")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", raw=RAW[:2], steps=3)
    assert caught.value.code == "run_folder_differs"
    assert contents(tmp_path / "out") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError) as caught:
        run(tmp_path / "full")
    assert caught.value.code == "not_a_run_folder"


def test_a_run_does_not_resume_with_other_measured_layers(tmp_path):
    editor = new_editor()
    result = run(tmp_path / "out", "sequential", editor, raw=RAW[:1], steps=3)
    used = result.config["used"]
    first = lines(tmp_path / "out", "edits.jsonl")[0]
    assert (used["layers"], used["targets"]) == (first["layers"], first["targets"])
    assert used["targets"]["steps"] == 3
    save_measured_layers(editor.language_model.fingerprint, (0, 2))
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", "sequential", raw=RAW[:1], steps=3)
    assert caught.value.code == "run_folder_differs"
    other = run(tmp_path / "other", "sequential", raw=RAW[:1], steps=3)
    assert other.config["used"]["layers"] == [0, 2]
    assert default_folder(other.config) != default_folder(result.config)


def test_layers_measured_during_a_run_do_not_affect_it(tmp_path):
    editor = new_editor()
    progress = EvalProgress(unit=lambda *_: save_measured_layers(editor.language_model.fingerprint, (0, 2)))
    used = run(tmp_path / "out", "sequential", editor, progress=progress).config["used"]
    assert used["layers"] != [0, 2]
    assert [edit["layers"] for edit in lines(tmp_path / "out", "edits.jsonl")] == [used["layers"]] * 3


def test_two_runs_do_not_share_a_folder(tmp_path):
    run(tmp_path / "out", raw=RAW[:1])
    with lock(tmp_path / "out" / ".lock", 0), ThreadPoolExecutor(1) as other, pytest.raises(StorageError) as caught:
        other.submit(run, tmp_path / "out", raw=RAW[:1]).result()
    assert caught.value.code == "locked"


def test_a_damaged_file_is_refused(tmp_path):
    run(tmp_path / "out", raw=RAW[:1])
    file = tmp_path / "out" / "records.jsonl"
    file.write_bytes(b"rubbish\n" + file.read_bytes())
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", raw=RAW[:1])
    assert caught.value.code == "damaged_row"


def test_an_editor_with_edits_is_refused(tmp_path):
    editor = new_editor(guard=None)
    editor.rewrite("The capital of {France} is", "Rome")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "out", editor=editor)
    assert caught.value.code == "editor_has_edits"
    with pytest.raises(UnknownNameError):
        run(tmp_path / "out", method="memitt")


def test_a_model_that_is_not_restored_is_noticed(tmp_path, monkeypatch):
    editor = new_editor()
    use = editor.use_ledger

    def leaky(ledger):
        use(ledger)
        with torch.no_grad():
            editor.model.model.layers[3].mlp.down_proj.weight[0, 0] += 0.5

    monkeypatch.setattr(editor, "use_ledger", leaky)
    with pytest.raises(RebindError) as caught:
        run(tmp_path / "out", editor=editor)
    assert caught.value.code == "base_not_restored"


# Selecting records


def test_records_that_do_not_fit_are_named_or_skipped():
    wide = {**RAW[2], "id": "wide", "neighbors": ["old " * 120 + "is"]}
    records = read_records([RAW[0], LONG, wide])
    with pytest.raises(InputError) as caught:
        usable_records(new_editor(), records, SINGLE, skip_bad=False)
    assert caught.value.code == "bad_record"
    assert "long" in caught.value.problem
    usable = usable_records(new_editor(), records, SINGLE, skip_bad=True)
    assert [record.id for record in usable] == ["0"]
    assert [reason.split(":")[0] for reason in usable.skipped] == ["Record long", "Record wide"]
    with pytest.raises(InputError) as caught:
        usable_records(new_editor(), read_records([LONG]), SINGLE, skip_bad=True)
    assert caught.value.code == "no_usable_record"


def test_records_after_the_limit_are_not_counted():
    again = {**RAW[0], "id": "again", "target": "Madrid"}
    broken = {"prompt": "no subject", "target": "x"}
    raw = [broken, RAW[0], LONG, again, broken, RAW[2], broken, RAW[3], LONG]
    records = read_records(raw, skip_bad=True)
    usable = usable_records(new_editor(), records, BATCH, skip_bad=True, limit=2)
    assert [record.fact.target for record in usable] == ["Rome", "Spain"]
    assert len(usable.skipped) == 4
    for limit in (None, 9):
        usable = usable_records(new_editor(), records, BATCH, skip_bad=True, limit=limit)
        assert (len(usable), len(usable.skipped)) == (3, 6), "all of them"
    assert len(usable_records(new_editor(), records, SINGLE, skip_bad=True, limit=2)) == 2


def test_contradictions_matter_only_where_records_meet():
    other = {**RAW[0], "id": "other", "target": "Madrid"}
    records = read_records([RAW[0], other])
    assert usable_records(new_editor(), records, SINGLE, skip_bad=False) == records
    with pytest.raises(InputError) as caught:
        usable_records(new_editor(), records, BATCH, skip_bad=False)
    assert caught.value.code == "conflicting_records"
    assert len(usable_records(new_editor(), records, BATCH, skip_bad=True)) == 1


@every_protocol
def test_a_record_that_contradicts_itself_is_named_or_skipped(name):
    also = [{"prompt": "The capital of {France} is", "target": "Madrid"}]
    same = {**RAW[1], "id": "same", "also": [{name: RAW[1][name] for name in ("prompt", "target")}]}
    records = read_records([{**RAW[0], "id": "odd", "also": also}, same, RAW[2]])
    with pytest.raises(InputError):
        usable_records(new_editor(), records, get_protocol(name), skip_bad=False)
    usable = usable_records(new_editor(), records, get_protocol(name), skip_bad=True)
    assert [record.id for record in usable] == ["same", "2"]
    assert [reason.split(":")[0] for reason in usable.skipped] == ["Record odd"]


def test_known_records_are_those_whose_true_target_is_preferred():
    editor = new_editor()
    swapped = {**RAW[0], "id": "swapped", "target": "Paris", "old": "Rome"}
    known = known_records(editor, read_records([RAW[0], swapped, RAW[2]]))
    new, true = editor.score([Fact.parse("The capital of {France} is", target) for target in ("Rome", "Paris")])
    assert [record.id for record in known] == ["0" if true.nll < new.nll else "swapped"]
    with pytest.raises(InputError) as caught:
        known_records(editor, read_records([swapped if true.nll < new.nll else RAW[0]]))
    assert caught.value.code == "no_known_record"
    with pytest.raises(InputError) as caught:
        known_records(editor, read_records([RAW[2]]))
    assert caught.value.code == "no_true_targets"


def test_running_scores_are_reported(tmp_path):
    reported = []
    run(tmp_path / "out", progress=EvalProgress(unit=lambda number, total, stage, scores: reported.append(scores)))
    assert reported[0] == {}, "the base model has none"
    assert set(reported[-1]) == {"ES", "PS", "NS"}
    assert all(math.isfinite(value) for value in reported[-1].values())


# Records with several facts

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
    alone, *_ = lines(run(tmp_path / "alone", raw=TWO["also"]).folder)
    (other,) = base["also"]
    for target in ("new", "true"):
        assert other["prompt"][target]["nll"] == pytest.approx(alone["prompt"][target]["nll"], abs=1e-4)
    assert other["free"]["prompt"] == alone["free"]["prompt"]


@every_protocol
def test_a_killed_run_of_several_facts_resumes_to_the_same_bytes(name, tmp_path, monkeypatch):
    raw = [TWO, *RAW[1:3]]
    expected = contents(run(tmp_path / "undisturbed", name, raw=raw).folder)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "answer_records", dies_after(2, run_module.answer_records))
        with pytest.raises(Killed):
            run(tmp_path / "out", name, raw=raw)
    run(tmp_path / "out", name, raw=raw)
    assert contents(tmp_path / "out") == expected
