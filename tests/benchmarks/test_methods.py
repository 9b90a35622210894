"""The table of methods: targets are shared, sequences decay as they should, rows are kept and not measured twice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.methods.__main__ import main
from benchmarks.methods.jobs import Results, jobs, run
from benchmarks.methods.protocols import batch, sequential
from benchmarks.methods.remembered import Memory
from benchmarks.methods.shared import impossible
from benchmarks.methods.states import MADE_OF, Amount, Bench, evenly, mix
from benchmarks.report import RESULTS
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import METHODS, get_method
from rebind.edit.settings import EditSettings, default_settings
from rebind.edit.targets.kept import subject_prompts
from rebind.evals.records import Question, Record
from tests import tiny

SUBJECTS = ("France", "Spain", "Norway", "Italy", "Mostar", "Dante")
OTHERS = ("Germany", "Berlin", "Madrid", "Ada", "Lovelace", "Darrieux")
MORE = ("rain", "summer", "chess", "leaves", "lamp", "bridge")


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
            neighbors=(Question(f"The capital of {other} is", "Paris"), Question(f"I saw {more} in", "Paris")),
        )
        for number, (subject, other, more) in enumerate(zip(SUBJECTS, OTHERS, MORE, strict=True))
    ]


class ShortSearches(Editor):
    """An editor whose searches take a third of the steps: what is asked here does not depend on how far they come."""

    def settings(self, *args: Any, **options: Any) -> EditSettings:
        chosen = super().settings(*args, **options)
        return replace(chosen, targets=replace(chosen.targets, steps=8))


@pytest.fixture
def bench() -> Bench:
    editor = ShortSearches(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256, guard=None)
    known = records()
    return Bench(editor, known, known, " ".join(tiny.SENTENCES), Amount(free=2))


def test_methods_share_targets_and_the_model_is_put_back(bench):
    before = tiny.weights(bench.editor.model)
    first, second = batch(bench, "memit", 6), batch(bench, "recursive", 6)
    assert (first.searched, second.searched) == (6, 0)
    assert first.scores == second.scores, "in one edit recursive is memit"
    assert first.growth == pytest.approx(second.growth, rel=1e-4)
    assert first.perplexity == pytest.approx(second.perplexity, rel=1e-4)
    assert first.scores["free"]["records"] == 2
    assert batch(bench, "memit", 2).groups == 1
    alone = batch(bench, "memit", 1)
    assert alone.groups == 6, "as many groups as there are records for"
    assert alone.searched == 0, "for no group anew"
    assert alone.scores["free"]["records"] == 6, "each group is decoded"
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
        seen.append((len(keys), len(earlier)))
        return own(keys, old, lam, earlier)

    own = method.gain
    monkeypatch.setitem(method.__dict__, "gain", gain)
    list(sequential(bench, "recursive", "edited", 2, [4]))
    layers = len(bench.editor.settings("recursive").layers)
    assert len(seen) == 2 * layers
    assert [earlier for _, earlier in seen[layers:]] == [keys for keys, _ in seen[:layers]]
    assert min(keys for keys, _ in seen) > 2, "each of two facts has a key in every framing"


def test_more_facts_than_dimensions_have_no_exact_solution(bench):
    assert "48 dimensions" in impossible(bench.editor, get_method("emmet"), 49)
    assert not impossible(bench.editor, get_method("emmet"), 48)
    assert not impossible(bench.editor, get_method("memit"), 49)
    assert batch(bench, "rome", 100).why


OPTIONS = {"protocols": ["batch", "sequential"], "found": ["base", "edited"], "size": 3, "at": [3, 6]}


def test_rows_are_kept_and_a_second_run_measures_nothing(bench, tmp_path):
    from benchmarks.methods.figure import figure  # needs matplotlib

    ordered = jobs(bench, methods=["memit"], numbers=[2], **OPTIONS)
    path = tmp_path / "rows.json"
    told = []
    assert not run(bench, Results.open(path, {"seed": 0}), ordered, lambda row, seconds: told.append(row.name))
    assert len(told) == 1 + 1 + 2 + 2
    again = Results.open(path, {"seed": 0})
    run(bench, again, ordered, lambda row, seconds: pytest.fail(f"{row.name} was measured again"))
    assert len(json.loads(path.read_text())["rows"]) == 6
    with pytest.raises(SystemExit, match="remove it or name another"):
        Results.open(path, {"seed": 1})
    figure(again.rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_rows_are_measured_again_where_that_is_asked_for(bench, tmp_path):
    """As those without free decoding, of a file from before it was asked of single facts."""
    path, bench.records = tmp_path / "rows.json", bench.records[:2]
    options = OPTIONS | {"protocols": ["batch"]}
    ordered = jobs(bench, methods=["memit", "recursive"], numbers=[1, 2], **options)
    run(bench, Results.open(path, {}), ordered, lambda row, seconds: None)
    stored = json.loads(path.read_bytes())
    for row in stored["rows"]:
        row["scores"].pop("free")
    path.write_text(json.dumps(stored))
    single, measured = jobs(bench, methods=["memit", "recursive"], numbers=[1], **options), []
    run(bench, Results.open(path, {}), single, lambda row, seconds: pytest.fail(f"{row.name} was measured again"))
    run(bench, Results.open(path, {}), single, lambda row, seconds: measured.append(row.name), again=True)
    assert measured == [("memit", "batch", "base", 1), ("recursive", "batch", "base", 1)]
    rows = Results.open(path, {}).rows
    assert {row.name for row in rows if "free" in row.scores} == {*measured}
    assert len(rows) == 5


def test_the_most_telling_rows_come_first(bench):
    ordered = jobs(bench, methods=["memit", "rome"], numbers=[1, 9, 6], **(OPTIONS | {"at": [3, 6, 9, 12]}))
    assert [(job.method, job.protocol, job.found, job.stops) for job in ordered] == [
        ("memit", "batch", "base", (6,)),
        ("rome", "batch", "base", (6,)),
        ("memit", "sequential", "base", (3, 6)),
        ("rome", "sequential", "base", (3, 6)),
        ("memit", "sequential", "edited", (3, 6)),
        ("memit", "batch", "base", (1,)),
        ("rome", "batch", "base", (1,)),
        ("memit", "batch", "base", (9,)),
        ("rome", "batch", "base", (9,)),
        ("memit", "sequential", "base", (9,)),
        ("rome", "sequential", "base", (9,)),
        ("memit", "sequential", "base", (12,)),
        ("rome", "sequential", "base", (12,)),
    ]


def test_a_run_searches_once_for_each_layer_and_settings(bench, tmp_path):
    calls = []
    search = bench.memory.targets.search
    own = search.find
    search.find = lambda layer, requests, settings, *rest: (
        calls.append((layer, settings, len(requests))) or own(layer, requests, settings, *rest)
    )
    methods = ["memit", "alphaedit", "recursive", "rome", "emmet"]
    ordered = jobs(bench, methods=methods, numbers=[2, 6], **(OPTIONS | {"found": ["base"]}))
    run(bench, Results.open(tmp_path / "rows.json", {}), ordered, lambda row, seconds: None)
    sets = {(bench.settings(method, 6).layers[-1], bench.settings(method, 6).targets) for method in methods}
    assert len(calls) == len(sets) == 2
    assert {found for *_, found in calls} == {6}


def test_no_row_is_begun_after_the_time(bench, tmp_path):
    ordered = jobs(bench, methods=["memit"], numbers=[1, 2], **OPTIONS)
    results = Results.open(tmp_path / "rows.json", {})
    assert run(bench, results, ordered, lambda row, seconds: None, seconds=-1.0) == ordered
    assert [row.method for row in results.rows] == ["before"]


@pytest.mark.parametrize("found", ["base", "edited"])
def test_a_state_that_was_measured_is_not_measured_again(bench, tmp_path, found):
    """And would have been the same."""
    results = Results.open(tmp_path / "rows.json", {})
    ordered = jobs(bench, methods=["memit", "recursive"], numbers=[3], **(OPTIONS | {"found": [found]}))
    run(bench, results, ordered, lambda row, seconds: None)
    rows = {row.name: row for row in results.rows}
    assert rows["recursive", "batch", "base", 3].same == "memit, batch"
    copied = rows["recursive", "sequential", found, 3]
    assert copied.same
    assert not rows["recursive", "sequential", found, 6].same
    measured = next(iter(sequential(bench, "recursive", found, 3, [3])))
    assert copied.scores == measured.scores
    assert copied.growth == pytest.approx(measured.growth, rel=1e-4)


def test_what_is_remembered_changes_no_edit():
    def sequence(editor):
        for number in (0, 2, 4):
            editor.rewrite_many([record.fact for record in records()[number : number + 2]], method="recursive")
        return tiny.weights(editor.model)

    options = {"corpus": tiny.texts(), "moment_tokens": 256, "guard": None}
    made = [ShortSearches(tiny.llama(), tiny.tokenizer(), **options) for _ in range(2)]
    memory = Memory.of(made[0])
    layers, targets = (getattr(made[0].settings("recursive"), name) for name in ("layers", "targets"))
    facts = [record.fact for record in records()][:2]
    about = subject_prompts(made[0].language_model, facts)
    memory.targets.plan(layers[-1], targets, made[0].fact_prompts(facts, about))
    assert sequence(made[0]) == sequence(made[1])


def test_some_records_are_asked_about_all_and_the_others_about_the_fact(bench):
    bench.amount = Amount(around=2, neighbors=1, free=3)
    scores = bench.scores(bench.ask(bench.records))
    assert {name: one["records"] for name, one in scores.items()} == {
        "ES": 6,
        "PS": 2,
        "NS": 2,
        "EA": 6,
        "free": 3,
        "S": 2,
    }
    assert evenly(10, 3) == {0, 3, 6}
    assert evenly(3, 10) == {0, 1, 2}


COUNTS = {"a": 2, "b": 1, "c": 4}


def test_the_first_batches_of_a_mixed_sequence_are_like_the_last():
    groups = [[Record(Fact("{} is", f"{name}{n}", "Rome"), name) for n in range(most)] for name, most in COUNTS.items()]
    assert [one.fact.subject for one in mix(*groups)] == ["c0", "a0", "c1", "b0", "c2", "a1", "c3"]


@pytest.mark.parametrize("protocol", ["batch", "sequential"])
def test_rows_of_made_facts_ask_their_records_about_all(bench, protocol):
    bench.amount = Amount(around=2, neighbors=1, free=3)
    row = batch(bench, "memit", 14) if protocol == "batch" else next(sequential(bench, "memit", "base", 7, [14]))
    assert {name: one["records"] for name, one in row.scores.items()} == {
        "ES": 14,
        "PS": 2,
        "NS": 2,
        "EA": 14,
        "free": 3,
        "S": 2,
    }
    assert (row.made, row.made_of) == (True, MADE_OF)
    assert not batch(bench, "memit", 6).made


def test_the_same_is_asked_of_records_alone_and_among_made_facts(bench):
    """Their neighbors are not written, and they are spread over the sequence."""
    bench.amount = Amount(around=2, neighbors=1)
    (facts,) = bench.facts(16)
    assert facts == bench.facts(16, once=True)[0]
    assert {one.fact.subject for one in facts} == {*SUBJECTS, *OTHERS, *MORE} - {"Germany", "Ada"}
    alone, among = (
        [(one.fact, one.neighbors) for one, _ in bench.ask(some) if one.neighbors] for some in (bench.records, facts)
    )
    assert alone == among
    assert [fact.subject for fact, _ in among] == ["France", "Italy"]
    assert [one.fact.subject in SUBJECTS for one in facts[:8]].count(True) == 3
    with pytest.raises(SystemExit, match="6 records make 16 facts"):
        bench.facts(17)


def test_other_records_of_the_file_are_written_before_neighbors_are_made_facts(bench):
    short = Bench(bench.editor, bench.records[:3], bench.pool, bench.text, Amount(around=1, neighbors=1))
    assert {one.fact.subject for one in short.facts(6)[0]} == {*SUBJECTS}
    assert [one.fact.subject for one in short.facts(6)[0] if one.neighbors] == ["France"]
    assert short.row("memit", "batch", "base", 6).made


def test_rows_of_facts_made_in_the_former_way_are_measured_again(bench, tmp_path):
    bench.amount = Amount(around=2, neighbors=1, free=2)
    ordered = jobs(bench, methods=["memit", "rome"], numbers=[6, 9], **(OPTIONS | {"found": ["base"], "at": [3, 9]}))
    path = tmp_path / "rows.json"
    assert not run(bench, Results.open(path, {}), ordered, lambda row, seconds: None)
    assert Results.open(path, {}).former == 0
    stored = _former(path)
    again, measured = Results.open(path, {}), []
    assert again.former == 5
    run(bench, again, ordered, lambda row, seconds: measured.append(row.name))
    assert [(name, facts) for name, *_, facts in measured] == [
        ("before", 9),
        ("memit", 9),
        ("rome", 9),
        ("memit", 9),
        ("rome", 9),
    ]
    assert {tuple(row[name] for name in ("method", "protocol", "found", "facts")) for row in stored} == {
        row.name for row in Results.open(path, {}).rows
    }


def test_the_published_rows_of_records_are_gone_on_with(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes((RESULTS / "methods-h200.json").read_bytes())
    of = json.loads(path.read_bytes())["of"]
    real = [row for row in _former(path) if not row["made"]]
    results = Results.open(path, of)
    assert len(real) >= 45
    assert [row.name[-1] for row in results.rows] == [row["facts"] for row in real]
    assert max(row.facts for row in results.rows) == 1000
    assert not results.have(("memit", "batch", "base", 10_000))


def _former(path):
    """The file as it was written when made facts were subjects in other records' templates; its rows."""
    content = json.loads(path.read_bytes())
    content["rows"] = [{name: row[name] for name in row if name != "made_of"} for row in content["rows"]]
    path.write_text(json.dumps(content))
    return content["rows"]


def test_held_text_ends_after_its_tokens(bench):
    whole = bench.editor.tokenizer(bench.text, add_special_tokens=False).input_ids
    short = Bench(bench.editor, bench.records, bench.pool, bench.text, Amount(tokens=7))
    assert bench.text.startswith(short.held_text)
    assert bench.editor.tokenizer(short.held_text, add_special_tokens=False).input_ids == whole[:7]


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
    sizes = ["--n", "1", "9", "--methods", "memit", "recursive", "--batch", "1", "--at", "1", "9"]
    sizes += ["--around", "1", "--neighbors", "1"]
    main([*paths, *sizes, "--found", "base", "--model", str(folder), "--device", "cpu"])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["method"], row["protocol"], row["facts"], bool(row["why"])) for row in rows[1:]] == [
        ("memit", "sequential", 1, False),
        ("recursive", "sequential", 1, False),
        ("memit", "batch", 1, False),
        ("recursive", "batch", 1, False),
        ("before", "batch", 9, False),
        ("memit", "batch", 9, False),
        ("recursive", "batch", 9, False),
        ("memit", "sequential", 9, False),
        ("recursive", "sequential", 9, False),
    ]
    assert [row["made"] for row in rows if row["facts"] == 9] == [True] * 5
    assert (tmp_path / "out.png").exists()
    assert all({"S", "PS", "NS"} <= set(row["scores"]) for row in rows)
    assert "neighbors of records are facts too" in capsys.readouterr().out


@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_methods_of_several_layers_share_a_search_on_the_default_model(n):
    several = [method for method in METHODS.values() if method.several_layers]
    chosen = [default_settings(method, "smollm2", 30, n) for method in several]
    assert len({(one.layers[-1], one.targets) for one in chosen}) == 1
