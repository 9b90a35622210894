"""Evaluations of a tiny model: exact restoration, resumption to the same bytes, and the contents of the folder."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rebind.edit.ledger.ledger import Ledger
from rebind.edit.settings import save_measured_layers
from rebind.errors import InputError, StorageError, UnknownNameError
from rebind.evals import QuestionSettings, read_records
from rebind.evals import run as run_module
from rebind.evals.run import default_folder
from rebind.storage import JsonLines, lock
from tests import tiny
from tests.evals.runs import FILES, RAW, contents, lines, new_editor, run
from tests.support import raises

PROTOCOLS = ["single", "batch", "sequential"]
every_protocol = pytest.mark.parametrize("name", PROTOCOLS)


@every_protocol
def test_the_model_is_restored_byte_for_byte(name, finished):
    editor = finished(name).editor
    assert tiny.weights(editor.model) == tiny.weights(tiny.llama())
    assert editor.guard is not None
    assert editor.ledger.path is not None, "the editor has its own ledger again"
    assert not editor.ledger.edits


@every_protocol
def test_same_seed_same_bytes(name, tmp_path, finished):
    again = contents(run(tmp_path / "a", name).folder)
    assert again == finished(name).contents
    assert again.keys() == FILES


def test_another_seed_gives_other_bytes(tmp_path, finished):
    other = run(tmp_path, "batch", new_editor(seed=1))
    assert contents(other.folder)["records.jsonl"] != finished("batch").contents["records.jsonl"]


def test_figures_and_baselines_have_the_same_bytes(tmp_path):
    options = {"raw": RAW[:3], "figure": True, "baselines": True}
    first, again = (contents(run(tmp_path / name, "sequential", **options).folder) for name in "ab")
    assert first == again
    assert first.keys() == FILES | {"report.png", "baselines.jsonl"}


# Kills


class Killed(BaseException):
    """Nobody catches it."""


def kill(monkeypatch: pytest.MonkeyPatch, owner: object, function: str, dying: object, folder: Path, name: str) -> None:
    """Start a run that is killed by a changed function."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, dying)
        with pytest.raises(Killed):
            run(folder, name)


def resume(folder: Path, name: str, expected: dict[str, bytes]) -> None:
    """Resume a killed run; it must not start over, and a further call has nothing to do."""
    numbers: list[int] = []
    for _ in range(2):
        run(folder, name, on_unit=lambda number, *_: numbers.append(number))
        assert contents(folder) == expected
    assert numbers[0] > 1
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize(("name", "stored"), [("single", 1), *((name, 4) for name in PROTOCOLS)])
def test_a_killed_run_resumes_to_the_same_bytes(name, stored, tmp_path, monkeypatch, finished):
    expected, append = finished(name).contents, JsonLines.append

    def dying(self, rows, **options):
        append(self, rows, **options)
        if self.path.name == "records.jsonl" and len(self.read()) >= 2 * stored:
            with self.path.open("ab") as file:
                file.write(b'{"edits": 1, "rec')  # half a line, as a kill leaves it
            raise Killed

    kill(monkeypatch, JsonLines, "append", dying, tmp_path, name)
    resume(tmp_path, name, expected)


@every_protocol
def test_killed_between_an_edit_and_its_answers(name, tmp_path, monkeypatch, finished):
    expected, answer, calls = finished(name).contents, run_module.answer_records, []

    def dying(*args, **options):
        calls.append(1)
        if len(calls) > 3:  # three units of the base model
            raise Killed
        return answer(*args, **options)

    kill(monkeypatch, run_module, "answer_records", dying, tmp_path, name)
    if name != "single":  # where edits accumulate in a ledger on disk
        assert len(Ledger.open(tmp_path / "work" / "ledger").edits) == 1
    resume(tmp_path, name, expected)


@pytest.mark.parametrize(("name", "edits"), [("single", 2), ("sequential", 0), ("sequential", 1)])
def test_killed_between_the_ledger_and_the_log_of_an_edit(name, edits, tmp_path, monkeypatch, finished):
    expected, append = finished(name).contents, JsonLines.append

    def dying(self, rows, **options):
        if self.path.name == "edits.jsonl" and len(self.read()) == edits:
            raise Killed
        append(self, rows, **options)

    kill(monkeypatch, JsonLines, "append", dying, tmp_path, name)
    resume(tmp_path, name, expected)


@pytest.mark.parametrize("name", ["single", "batch"])
def test_killed_between_baselines(name, tmp_path, monkeypatch, finished):
    """Baselines can be asked for later, and continue where they stopped."""
    expected = contents(run(tmp_path / "a", name, raw=RAW[:2], baselines=True).folder)
    tune, calls = run_module.fine_tuned, []

    def dying(*args, **options):
        calls.append(1)
        if len(calls) == (2 if name == "single" else 1):
            raise Killed
        return tune(*args, **options)

    run(tmp_path / "b", name, raw=RAW[:2])
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "fine_tuned", dying)
        with pytest.raises(Killed):
            run(tmp_path / "b", name, raw=RAW[:2], baselines=True)
    assert len(lines(tmp_path / "b", "baselines.jsonl")) == (3 if name == "single" else 2)
    result = run(tmp_path / "b", name, raw=RAW[:2], baselines=True)
    assert contents(tmp_path / "b") == expected
    assert [one["name"] for one in result.summary["baselines"]] == ["prompt", "lora"]


# Contents


def test_single_edits_start_from_the_base_model(tmp_path, finished):
    together = [row for row in lines(finished("single").folder) if row["edits"]]
    assert [row["record"] for row in together] == [0, 1, 2, 3, 4]
    run(tmp_path, raw=RAW[2:3])
    (alone,) = [row for row in lines(tmp_path) if row["edits"]]
    for part in ("facts", "neighbors", "kept", "texts"):
        assert together[2][part] == alone[part]


def test_sequential_edits_accumulate_and_everything_is_asked_again(finished):
    folder = finished("sequential").folder
    rows = lines(folder)
    assert [(row["edits"], row["record"]) for row in rows] == [
        *((0, i) for i in range(5)),
        *((2, i) for i in range(2)),
        *((4, i) for i in range(4)),
        *((5, i) for i in range(5)),
    ]
    early, late = (next(r for r in rows if r["edits"] == n and r["record"] == 0) for n in (2, 5))
    assert early["facts"] != late["facts"], "later batches change the answers to the first"
    assert [row["records"] for row in lines(folder, "edits.jsonl")] == [[0, 2], [2, 4], [4, 5]]
    assert [state["edits"] for state in finished("sequential").result.summary["states"]] == [0, 2, 4, 5]
    assert not (folder / "work").exists()
    ages = finished("sequential").result.summary["retention"]
    assert [group["records"] for group in ages] == [[0, 2], [2, 4], [4, 5]]
    assert all(set(group["scores"]) == {"free", "EA"} for group in ages)
    assert finished("single").result.summary["retention"] == []


def test_contents_of_the_folder(finished):
    folder, summary = finished("single").folder, finished("single").result.summary
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["fingerprint"] == finished("single").editor.language_model.fingerprint
    assert (config["data"]["digest"], config["data"]["facts"]) == (read_records(RAW).digest, 6)
    assert (config["seed"], config["method"], config["settings"]["steps"]) == (0, "memit", 2)
    assert set(config["versions"]) >= {"rebind", "torch", "transformers", "python", "numpy"}
    base, after = summary["states"]
    assert (base["edits"], after["edits"]) == (0, 1)
    scores = after["scores"]
    assert set(scores) >= {"S", "ES", "PS", "NS", "EA", "PA", "GE", "RS", "free", "portability", "locality"}
    assert set(scores) >= {"free_plain", "EA_text", "choice", "free_reversed", "locality_kl"}
    assert "free_chat" not in scores, "the tokenizer has no chat template"
    assert "locality" not in base["scores"], "there is nothing to compare with"
    assert scores["ES"]["records"] == 4, "one record has no true target"
    assert scores["NS"]["records"] == 1, "records with neighbors that the true target answers"
    assert scores["RS"]["records"] == 1
    assert all(one["low"] <= one["value"] <= one["high"] for one in scores.values())
    drift = lines(folder, "drift.jsonl")
    assert [row["records"] for row in drift] == [None, [0, 1], [1, 2]], "the base model and two of the edits"
    assert base["drift"]["kl"] == base["drift"]["growth"] == 0
    assert after["drift"]["kl"] > 0
    assert after["drift"]["growth"] == pytest.approx(sum(row["growth"] for row in drift[1:]) / 2, abs=1e-6)
    assert set(drift[1]["sites"]) == set(lines(folder, "edits.jsonl")[0]["sites"])
    table = (folder / "table.md").read_text()
    assert "| after | text |" in table
    assert "harmonic mean of ES, PS and NS" in table
    assert {row["edits"] for row in lines(folder, "timings.jsonl")} == {0, 1}


def test_edits_show_in_the_answers(tmp_path):
    run(tmp_path, "batch", raw=RAW[:3], steps=8)
    rows = lines(tmp_path)
    for framing in ("start", "plain"):
        before, after = (
            [row["facts"][0][framing]["prompt"]["new"]["nll"] for row in part] for part in (rows[:3], rows[3:])
        )
        assert all(new < old for old, new in zip(before, after, strict=True)), framing
    kept = [one for row in rows[3:] for one in row["kept"]["neighbors"]]
    assert any(one["kl"] > 0 for one in kept)


def test_every_fact_of_a_record_is_written_and_asked(tmp_path, finished):
    base, *_ = rows = lines(finished("single").folder)
    after = next(row for row in rows if row["edits"])
    for row in (base, after):
        (_, other) = row["facts"]
        assert set(other["start"]["prompt"]) == {"new", "true"}
        assert len(other["start"]["paraphrases"]) == len(other["start"]["free_paraphrases"]) == 1
    first, second = (row["facts"][1]["start"]["prompt"]["new"]["nll"] for row in (base, after))
    assert second < first
    alone, *_ = lines(run(tmp_path, raw=RAW[0]["also"]).folder)
    other, alone = base["facts"][1]["start"], alone["facts"][0]["start"]
    for target in ("new", "true"):
        assert other["prompt"][target]["nll"] == pytest.approx(alone["prompt"][target]["nll"], abs=1e-4)
    assert other["free"] == alone["free"]


def test_what_is_asked_is_not_trained_on(monkeypatch, tmp_path):
    fact = {**RAW[0], "questions": ["What is the capital of France?"], "keep": ["France borders"]}
    record = read_records([fact])[0]
    assert [bare.to_json() for bare in record.written_facts] == [
        {"prompt": "The capital of {} is", "subject": "France", "target": "Rome", "old": "Paris"},
        {"prompt": "{} is the capital of", "subject": "Madrid", "target": "France", "old": "Spain"},
    ]
    editor, written = new_editor(), []
    rewrite_many = editor.rewrite_many
    monkeypatch.setattr(
        editor, "rewrite_many", lambda facts, **options: written.extend(facts) or rewrite_many(facts, **options)
    )
    run(tmp_path, "batch", editor, raw=[fact])
    assert written == list(record.written_facts)


def test_questions_can_be_left_out_and_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = run(Path("~/runs/x"), "batch", raw=RAW[:1], questions=QuestionSettings(0, 0))
    assert result.folder == tmp_path / "home" / "runs" / "x"
    (_, row) = lines(result.folder)
    assert not {"free_consequences", "texts"} & row.keys()
    assert set(row["facts"][0]["start"]) == {"prompt", "paraphrases"}


def test_running_scores_are_reported(finished):
    scores = [report[-1] for report in finished("single").reports]
    assert scores[0] == {}, "the base model has none"
    assert set(scores[-1]) == {"ES", "PS", "NS"}
    assert all(math.isfinite(value) for value in scores[-1].values())
    last = finished("sequential")
    after = last.result.summary["states"][-1]["scores"]
    assert last.reports[-1][-1] == {name: pytest.approx(after[name]["value"], abs=1e-6) for name in ("ES", "PS", "NS")}


# Refusals


def test_a_folder_is_used_only_by_its_own_run(tmp_path):
    run(tmp_path / "out", raw=RAW[1:2])
    before = contents(tmp_path / "out")
    with raises(InputError, "run_folder_differs"):
        run(tmp_path / "out", raw=RAW[1:3], steps=3)
    lock_file = tmp_path / "out" / ".lock"
    with lock(lock_file, 0), ThreadPoolExecutor(1) as other, raises(StorageError, "locked"):
        other.submit(run, tmp_path / "out", raw=RAW[1:2]).result()
    assert contents(tmp_path / "out") == before
    file = tmp_path / "out" / "records.jsonl"
    file.write_bytes(b"rubbish\n" + file.read_bytes())
    with raises(InputError, "damaged_row"):
        run(tmp_path / "out", raw=RAW[1:2])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with raises(InputError, "not_a_run_folder"):
        run(tmp_path / "full")


def test_a_run_has_the_layers_that_were_measured_before_it(tmp_path, monkeypatch):
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "cache"))
    editor = new_editor()

    def measure(*_: object) -> None:
        save_measured_layers(editor.language_model.fingerprint, (0, 2))

    result = run(tmp_path / "out", "sequential", editor, raw=RAW[1:4], on_unit=measure)
    used = result.config["used"]
    assert used["layers"] != [0, 2]
    for edit in lines(tmp_path / "out", "edits.jsonl"):
        assert (edit["layers"], edit["targets"]) == (used["layers"], used["targets"])
    with raises(InputError, "run_folder_differs"):
        run(tmp_path / "out", "sequential", raw=RAW[1:4])
    other = run(tmp_path / "other", "batch", raw=RAW[1:2])
    assert other.config["used"]["layers"] == [0, 2]
    assert default_folder(other.config) != default_folder(result.config)


def test_an_editor_with_edits_is_refused(tmp_path):
    editor = new_editor(guard=None)
    editor.rewrite("The capital of {France} is", "Rome")
    with raises(InputError, "editor_has_edits"):
        run(tmp_path, editor=editor)
    with pytest.raises(UnknownNameError):
        run(tmp_path, method="memitt")
