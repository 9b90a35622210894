"""Evaluations on a tiny model: exact restoration, resumption to the same bytes, and what the folder says."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rebind.cli.commands import eval as cli_module
from rebind.edit import editor as editor_module
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.lock import Lock
from rebind.errors import InputError, LedgerError, RebindError, UnknownNameError
from rebind.evals import choosing as choosing_module
from rebind.evals import report
from rebind.evals import run as run_module
from rebind.evals.answers import Asking
from rebind.evals.choosing import known, usable
from rebind.evals.protocols import get_protocol
from rebind.evals.records import Record, Records, read_records
from rebind.evals.run import Progress
from tests import tiny

from .runs import LASTING, RAW, TEXT, Killed, contents, die_asking, every_protocol, lines, new_editor, run, trial

pytestmark = pytest.mark.usefixtures("quick")


@every_protocol
def test_the_model_is_given_back_byte_for_byte(name, tmp_path):
    editor = new_editor(ledger=tmp_path / "ledger")
    before, guard, ledger = tiny.weights(editor.model), editor.guard, editor.ledger
    run(tmp_path / "out", name, editor)
    assert tiny.weights(editor.model) == before
    assert editor.guard is guard
    assert editor.ledger is ledger, "what is written later must not be lost with a ledger in memory"
    assert not editor.ledger.edits


def test_single_edits_start_from_the_base_each(tmp_path):
    """Each record's answers are those it has when it is the only one."""
    run(tmp_path / "all")
    together = [row for row in lines(tmp_path / "all") if row["edits"]]
    assert [row["record"] for row in together] == [0, 1, 2, 3, 4]
    run(tmp_path / "one", raw=RAW[2:3])
    (alone,) = [row for row in lines(tmp_path / "one") if row["edits"]]
    for part in ("prompt", "neighbours", "free", "texts"):
        assert together[2][part] == alone[part]


@every_protocol
def test_same_seed_same_bytes(name, tmp_path, whole):
    again = contents(run(tmp_path / "a", name).folder)
    assert again == whole(name)
    assert again.keys() == LASTING
    other = run(tmp_path / "b", name, new_editor(seed=1))
    assert contents(other.folder)["records.jsonl"] != again["records.jsonl"]


def test_figures_too_are_the_same_bytes(tmp_path):
    first, again = (contents(run(tmp_path / name, "sequential", figures=True).folder) for name in "ab")
    assert first == again
    assert first.keys() == LASTING | {"scores.png", "edits.png", "nll.png"}


@pytest.fixture(scope="module")
def whole(quick, tmp_path_factory):
    """What an undisturbed run leaves, for each protocol."""

    @functools.cache
    def made(name: str) -> dict[str, bytes]:
        return contents(run(tmp_path_factory.mktemp("whole") / "out", name).folder)

    return made


@every_protocol
@pytest.mark.parametrize("after", [1, 4])
def test_a_killed_run_goes_on_to_the_same_bytes(name, after, tmp_path, monkeypatch, whole):
    expected, real = whole(name), run_module.Lines.append

    def append(self, rows):
        real(self, rows)
        if self.path.name == "records.jsonl" and len(self.rows) >= 2 * after:
            with self.path.open("ab") as file:
                file.write(b'{"edits": 1, "rec')  # half a line, as a kill leaves it
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_module.Lines, "append", append)
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    assert (tmp_path / "out" / "work").exists()
    done = []
    run(tmp_path / "out", name, progress=Progress(unit=lambda number, total, stage, scores: done.append(number)))
    assert contents(tmp_path / "out") == expected
    assert done[0] > 1, "not from the beginning"
    # and once more: nothing is left to do
    done.clear()
    run(tmp_path / "out", name, progress=Progress(unit=lambda number, total, stage, scores: done.append(number)))
    assert (contents(tmp_path / "out"), done) == (expected, [])


@every_protocol
def test_killed_between_the_edit_and_its_answers(name, tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        die_asking(patch, portion=4)  # after three of the base model
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    assert len(lines(tmp_path / "out", "edits.jsonl")) == 1
    run(tmp_path / "out", name)
    assert contents(tmp_path / "out") == whole(name)


@pytest.mark.parametrize(("name", "at"), [("single", 2), ("batch", 0), ("sequential", 0), ("sequential", 1)])
def test_killed_between_the_ledger_and_the_line_of_the_edit(name, at, tmp_path, monkeypatch, whole):
    real = run_module.Lines.append

    def append(self, rows):
        if self.path.name == "edits.jsonl" and len(self.rows) == at:
            raise Killed
        real(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(run_module.Lines, "append", append)
        with pytest.raises(Killed):
            run(tmp_path / "out", name)
    run(tmp_path / "out", name)
    assert contents(tmp_path / "out") == whole(name)


def test_sequential_writes_on_top_and_asks_all_again(tmp_path):
    result = run(tmp_path / "out", "sequential")
    rows = lines(tmp_path / "out")
    assert [(row["edits"], row["record"]) for row in rows] == [
        *((0, i) for i in range(5)),
        *((2, i) for i in range(2)),
        *((4, i) for i in range(4)),
        *((5, i) for i in range(5)),
    ]
    early, late = (next(r for r in rows if r["edits"] == n and r["record"] == 0) for n in (2, 5))
    assert early["prompt"] != late["prompt"], "later batches are felt by the first"
    assert [row["records"] for row in lines(tmp_path / "out", "edits.jsonl")] == [[0, 2], [2, 4], [4, 5]]
    assert [state["edits"] for state in result.summary["states"]] == [0, 2, 4, 5]
    assert not (tmp_path / "out" / "work").exists()


def test_what_the_folder_says(tmp_path):
    editor = new_editor()
    result = run(tmp_path / "out", editor=editor)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"]["fingerprint"] == editor.fingerprint
    assert config["data"]["digest"] == read_records(RAW).digest
    assert (config["seed"], config["method"], config["settings"]["steps"]) == (0, "memit", 2)
    assert set(config["versions"]) >= {"rebind", "torch", "transformers", "python", "numpy"}
    base, after = result.summary["states"]
    assert (base["edits"], after["edits"]) == (0, 1)
    scores = after["scores"]
    assert set(scores) >= {"S", "ES", "PS", "NS", "EA", "PA", "EM", "GE", "RS", "free", "portability", "kept", "tokens"}
    assert scores["ES"]["records"] == 4, "one record has no true target"
    assert scores["NS"]["records"] == 1, "those with neighbours that the true target answers"
    assert scores["RS"]["records"] == 1
    assert scores["tokens_neighbours"]["records"] == 1
    assert all(one["low"] <= one["value"] <= one["high"] for one in scores.values())
    drift = lines(tmp_path / "out", "drift.jsonl")
    assert [row["records"] for row in drift] == [None, [0, 1], [1, 2]], "the base and two of the edits"
    assert base["drift"]["kl"] == base["drift"]["growth"] == 0
    assert after["drift"]["kl"] > 0
    assert after["drift"]["growth"] == pytest.approx(sum(row["growth"] for row in drift[1:]) / 2, abs=1e-6)
    assert set(drift[1]["sites"]) == set(lines(tmp_path / "out", "edits.jsonl")[0]["sites"])
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| before | 5 |" in table
    assert "harmonic mean of ES, PS and NS" in table
    assert {row["edits"] for row in lines(tmp_path / "out", "timings.jsonl")} == {0, 1}


def test_edits_are_seen_in_the_answers(tmp_path):
    run(tmp_path / "out", "batch", raw=RAW[:3], steps=8)
    rows = lines(tmp_path / "out")
    before, after = ([row["prompt"]["new"]["nll"] for row in part] for part in (rows[:3], rows[3:]))
    assert all(new < old for old, new in zip(before, after, strict=True))


def test_several_facts_of_one_record_are_written_together(tmp_path):
    also = (Fact.parse("{Rome} lies in", "Spain"),)
    records = Records((Record(Fact.parse("The capital of {France} is", "Rome"), "two", also=also),))
    run(tmp_path / "out", raw=records)
    with_both = lines(tmp_path / "out")[-1]["prompt"]
    run(tmp_path / "one", raw=Records((Record(records[0].fact, "one"),)))
    assert lines(tmp_path / "one")[-1]["prompt"] != with_both


def test_little_can_be_asked(tmp_path):
    run(tmp_path / "out", "batch", raw=RAW[:1], asking=Asking(0, 0))
    (_, row) = lines(tmp_path / "out")
    assert not {"free", "texts"} & row.keys()
    for wrong in ({"free_tokens": -1}, {"texts": -1}, {"text_tokens": 0}, {"top_k": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Asking(**wrong)


def test_a_folder_at_home_is_one_folder(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = run(Path("~/runs/x"), "batch", raw=RAW[:1])
    assert result.folder == tmp_path / "home" / "runs" / "x"
    assert contents(result.folder).keys() == LASTING
    assert not list(here.iterdir())


# Refusals


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    run(tmp_path / "out", raw=RAW[:1])
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match=r"differs in data.digest .*, settings.steps \(2, now 3\)"):
        run(tmp_path / "out", raw=RAW[:2], steps=3)
    assert contents(tmp_path / "out") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="holds no evaluation"):
        run(tmp_path / "full")
    for config in ({"model_type": "llama"}, []):  # a model's, another program's
        (tmp_path / "full" / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match="holds no evaluation"):
            run(tmp_path / "full")
    assert json.loads((tmp_path / "full" / "config.json").read_text()) == []


def test_a_run_of_other_layers_is_not_gone_on_with(tmp_path, monkeypatch):
    """The choice that `rebind layers` leaves on the machine may change between a kill and the same command again."""
    result = run(tmp_path / "out", "sequential", raw=RAW[:1], steps=3)
    used = result.config["used"]
    assert used["search"] == "float32"
    assert used["layers"] == lines(tmp_path / "out", "edits.jsonl")[0]["layers"]
    assert used["targets"] == lines(tmp_path / "out", "edits.jsonl")[0]["targets"]
    assert used["targets"]["steps"] == 3
    monkeypatch.setattr(editor_module, "chosen_layers", lambda fingerprint: (0, 2))
    assert used["layers"] != [0, 2]
    with pytest.raises(InputError, match=rf"differs in used.layers \({re.escape(str(used['layers']))}, now \[0, 2\]\)"):
        run(tmp_path / "out", "sequential", raw=RAW[:1], steps=3)
    other = run(tmp_path / "other", "sequential", raw=RAW[:1], steps=3)
    assert other.config["used"]["layers"] == [0, 2]
    assert run_module.default_folder(other.config) != run_module.default_folder(result.config)


def test_layers_chosen_meanwhile_are_not_for_this_run(tmp_path, monkeypatch):
    def choose(*told: object) -> None:
        monkeypatch.setattr(editor_module, "chosen_layers", lambda fingerprint: (0, 2))

    used = run(tmp_path / "out", "sequential", progress=Progress(unit=choose)).config["used"]
    assert used["layers"] != [0, 2]
    assert [edit["layers"] for edit in lines(tmp_path / "out", "edits.jsonl")] == [used["layers"]] * 3


@pytest.mark.parametrize(("name", "facts"), [("single", 2), ("batch", 6), ("sequential", 3)])
def test_settings_are_those_for_the_facts_of_the_largest_batch(name, facts, tmp_path, monkeypatch):
    asked, real = [], Editor.settings
    monkeypatch.setattr(
        Editor,
        "settings",
        lambda self, *args, **options: asked.append(options["facts"]) or real(self, *args, **options),
    )
    two = {**RAW[2], "also": [{"prompt": "{Rome} lies in", "target": "Spain"}]}
    editor, records = new_editor(), read_records([*RAW[:2], two, *RAW[3:]])
    config = run_module._Run(editor, records, trial(name), run_module.Held(editor, TEXT), Progress()).config()
    assert asked[-1] == max(asked) == facts
    assert config["used"]["layers"]


def test_two_runs_do_not_share_a_folder(tmp_path):
    (tmp_path / "out" / "work").mkdir(parents=True)
    with Lock(tmp_path / "out" / "work" / "lock").held(0):
        (tmp_path / "out" / "config.json").write_text(json.dumps({"format": run_module.FORMAT}))
        with pytest.raises(InputError, match="differs"):
            run(tmp_path / "out")
        (tmp_path / "out" / "config.json").write_bytes(contents(run(tmp_path / "other").folder)["config.json"])
        with pytest.raises(LedgerError, match="is held by process"):
            run(tmp_path / "out")


def test_a_kill_before_there_is_a_config_ends_no_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".config.json.0a1b2c3d4e5f.tmp").touch()
    assert run(tmp_path / "out", raw=RAW[:1]).folder == tmp_path / "out"


def test_a_damaged_file_is_named(tmp_path):
    run(tmp_path / "out", raw=RAW[:1])
    file = tmp_path / "out" / "records.jsonl"
    file.write_bytes(b"rubbish\n" + file.read_bytes())
    with pytest.raises(InputError, match=r"line 1 of .*records.jsonl is not a row"):
        run(tmp_path / "out", raw=RAW[:1])


def test_an_editor_with_edits_of_its_own_is_refused(tmp_path):
    editor = new_editor(guard=None)
    editor.rewrite("The capital of {France} is", "Rome")
    with pytest.raises(InputError, match="1 active edits, expected none"):
        run(tmp_path / "out", editor=editor)
    with pytest.raises(UnknownNameError):
        run(tmp_path / "out", method="memitt")


def test_a_model_that_is_not_restored_is_noticed(tmp_path, monkeypatch):
    editor = new_editor()
    real = editor.use

    def leaky(ledger):
        real(ledger)
        with torch.no_grad():
            editor.model.model.layers[3].mlp.down_proj.weight[0, 0] += 0.5

    monkeypatch.setattr(editor, "use", leaky)
    with pytest.raises(RebindError, match="still holds something of the edit before"):
        run(tmp_path / "out", editor=editor)


def test_records_that_do_not_fit_are_named_or_skipped():
    long = {**RAW[1], "id": "long", "prompt": "very " * 120 + "{Ada} is"}
    wide = {**RAW[2], "id": "wide", "neighbours": ["old " * 120 + "is"]}
    records = read_records([RAW[0], long, wide])
    with pytest.raises(InputError, match="record long: fact .* tokens with its context, the model takes 96"):
        usable(new_editor(), records, get_protocol("single"), skip_bad=False)
    kept = usable(new_editor(), records, get_protocol("single"), skip_bad=True)
    assert [record.id for record in kept] == ["0"]
    assert [reason.split(":")[0] for reason in kept.skipped] == ["record long", "record wide"]
    with pytest.raises(InputError, match="no record can be used"):
        usable(new_editor(), read_records([long]), get_protocol("single"), skip_bad=True)


def test_no_more_are_looked_at_than_are_wanted(monkeypatch):
    """Of bad records those before the last one used are counted, and no others; the rest is not even encoded."""
    long = {**RAW[1], "id": "long", "prompt": "very " * 120 + "{Ada} is"}
    again = {**RAW[0], "id": "again", "target": "Madrid"}
    broken = {"prompt": "no subject", "target": "x"}
    raw = [broken, RAW[0], long, again, broken, RAW[2], broken, RAW[3], long]
    seen, real = [], choosing_module.questions
    monkeypatch.setattr(choosing_module, "questions", lambda record: seen.append(record.id) or real(record))
    records = read_records(raw, skip_bad=True)
    kept = usable(new_editor(), records, get_protocol("batch"), skip_bad=True, limit=2)
    assert [record.fact.target for record in kept] == ["Rome", "Spain"]
    assert [reason.split(":")[0][:12] for reason in kept.skipped] == [
        "record 0",
        "record 4",
        "record long",
        "record again",
    ]
    assert "7" not in seen
    for limit in (None, 9):
        kept = usable(new_editor(), records, get_protocol("batch"), skip_bad=True, limit=limit)
        assert (len(kept), len(kept.skipped)) == (3, 6), "all of them"
    assert len(usable(new_editor(), records, get_protocol("single"), skip_bad=True, limit=2)) == 2


def test_contradictions_matter_only_where_records_meet():
    other = {**RAW[0], "id": "other", "target": "Madrid"}
    records = read_records([RAW[0], other])
    assert usable(new_editor(), records, get_protocol("single"), skip_bad=False) == records
    with pytest.raises(InputError, match="record other asks for 'Madrid'"):
        usable(new_editor(), records, get_protocol("batch"), skip_bad=False)
    assert len(usable(new_editor(), records, get_protocol("batch"), skip_bad=True)) == 1


@every_protocol
def test_a_record_that_contradicts_itself_is_named_or_skipped(name):
    also = [{"prompt": "The capital of {France} is", "target": "Madrid"}]
    same = {**RAW[1], "id": "same", "also": [{name: RAW[1][name] for name in ("prompt", "target")}]}
    records = read_records([{**RAW[0], "id": "odd", "also": also}, same, RAW[2]])
    with pytest.raises(
        InputError, match="record odd: it asks for 'Rome' and 'Madrid' after 'The capital of France is'"
    ):
        usable(new_editor(), records, get_protocol(name), skip_bad=False)
    kept = usable(new_editor(), records, get_protocol(name), skip_bad=True)
    assert [record.id for record in kept] == ["same", "2"]
    assert [reason.split(":")[0] for reason in kept.skipped] == ["record odd"]


def test_so_many_records_are_measured_where_bad_ones_are_skipped(tmp_path, monkeypatch):
    file, out = tmp_path / "records.jsonl", tmp_path / "out"
    long = {**RAW[1], "id": "long", "prompt": "very " * 120 + "{Ada} is"}
    file.write_text("\n".join(map(json.dumps, [RAW[0], long, *RAW[2:]])))
    monkeypatch.setattr(cli_module, "open_editor", lambda *args, **options: new_editor())
    monkeypatch.setattr(report, "_figures", lambda: None)
    words = ["--facts", str(file), "--n", "2", "--skip-bad", "--steps", "1", "--texts", "0", "--out", str(out)]
    told = CliRunner().invoke(cli_module.app, words)
    assert told.exit_code == 0, told.output
    assert [row["id"] for row in lines(out) if row["edits"]] == ["0", "2"]
    assert "skipped: record long" in told.stderr


def test_known_records_are_those_whose_true_target_is_preferred():
    editor = new_editor()
    swapped = {**RAW[0], "id": "swapped", "target": "Paris", "old": "Rome"}
    kept = known(editor, read_records([RAW[0], swapped, RAW[2]]))
    new, true = editor.score([Fact("{}", "The capital of France is", target) for target in ("Rome", "Paris")])
    assert [record.id for record in kept] == ["0" if true.nll < new.nll else "swapped"]
    with pytest.raises(InputError, match="prefers the true target in none of 1 records"):
        known(editor, read_records([swapped if true.nll < new.nll else RAW[0]]))
    with pytest.raises(InputError, match="none of 1 records has a true target, .*leave out --known"):
        known(editor, read_records([RAW[2]]))


def test_the_running_score_is_told(tmp_path):
    told = []
    run(tmp_path / "out", progress=Progress(unit=lambda number, total, stage, scores: told.append(scores)))
    assert told[0] == {}, "the base model has none"
    assert set(told[-1]) == {"ES", "PS", "NS"}
    assert all(math.isfinite(value) for value in told[-1].values())
