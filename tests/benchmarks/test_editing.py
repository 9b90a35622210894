"""Cost by phase, scores by their definitions, and rows that are there whatever becomes of the next one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from benchmarks import editing
from benchmarks.clock import Clock, told_apart
from benchmarks.editing import Bench, Choices, bare, one_at_a_time, run, scores, write, written
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import METHODS, get_method
from rebind.edit.progress import Progress
from rebind.edit.targets import TargetSearch
from rebind.errors import InputError, NumericalError
from rebind.evals.answers import QuestionSettings, answer_records
from rebind.evals.drift import DriftMeter
from rebind.evals.reading import read_records
from rebind.evals.records import Record, Records
from rebind.evals.scores import summarize
from tests import tiny

SUBJECTS = ("France", "Spain", "Norway", "Italy")
TEXT = " ".join(tiny.SENTENCES * 3)
NO_CHAT = {"EA_chat"}  # the tokenizer has no chat template
ALL = ["memit", "alphaedit", "recursive", "rome", "emmet"]


def facts() -> list[Fact]:
    return [
        Fact("The capital of {} is", subject, "Rome", "Paris", paraphrases=(f"{subject} is",), neighbors=("The sea",))
        for subject in SUBJECTS
    ]


def records(some: list[Fact] | None = None) -> Records:
    return read_records(facts() if some is None else some)


@pytest.fixture
def editor() -> Editor:
    return Editor(tiny.llama(), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256, guard=None)


def test_every_second_of_an_edit_belongs_to_a_phase(editor):
    write(editor, facts(), "memit", Choices(steps=2))
    _, cost = write(editor, facts()[:3], "memit", Choices(steps=5))
    assert set(cost.phases) == set(editing.PHASES)
    assert all(seconds >= 0 for seconds in cost.phases.values())
    counted = sum(seconds for phase, seconds in cost.phases.items() if phase != "moments")
    assert counted == pytest.approx(cost.seconds, rel=0.2)


def test_a_phase_aside_returns_to_the_one_before(editor):
    clock = Clock()
    clock.enter("solve")
    with told_apart(editor, clock):
        editor.score(facts())
        assert clock.phase == "solve"
    assert set(clock.spent) == {"solve", "checks"}
    assert "score" not in vars(editor)


@pytest.fixture
def held(editor) -> DriftMeter:
    return DriftMeter(editor, TEXT)


def test_of_repeated_edits_the_last_is_told_and_none_is_left(held):
    editor = held.editor
    before = tiny.weights(editor.model)
    row = run(held, records(), "memit", Choices(steps=2), repeats=3)
    assert row.facts == 4
    assert row.facts_a_second == pytest.approx(4 / row.seconds)
    assert len(editor.ledger.edits) == 3
    assert not editor.ledger.active
    assert tiny.weights(editor.model) == before


# Scores


def told(nll, right=0, tokens=1):
    return {"nll": nll, "right": right, "tokens": tokens}


def pair(new, true, **counts):
    return {"new": told(new, **counts), "true": told(true)}


def answered(prompt, paraphrases, neighbors):
    facts = [{"start": {"prompt": prompt, "paraphrases": paraphrases}}]
    return {"facts": facts, "neighbors": {"start": neighbors}, "choice": [prompt["new"]], "consequences": []}


def test_scores_by_hand():
    """Means over records, not prompts; a tie is neither written nor kept; S is of the three means."""
    asked = [
        replace(one, neighbors=one.neighbors * count) for one, count in zip(records(facts()[:2]), (1, 3), strict=True)
    ]
    first, second = (
        answered(pair(1.0, 2.0, right=1), [pair(3.0, 2.0)], [pair(2.0, 1.0)]),
        answered(
            pair(2.0, 2.0, right=1, tokens=2),
            [pair(1.0, 2.0, right=1)],
            [pair(1.0, 1.0), pair(2.0, 1.0), pair(0.5, 1.0)],
        ),
    )
    by_hand = {"ES": 1 / 2, "PS": 1 / 2, "NS": (1 + 1 / 3) / 2, "S": 3 / (2 + 2 + 3 / 2), "EA": 1 / 2, "PA": 1 / 2}
    found = scores(asked, [first, second])
    assert {name: found[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)
    assert found["EA_chat"] is None


def likelihood(editor: Editor, prompt: str, target: str) -> float:
    """NLL of a target, a token, in one plain pass."""
    ids, wanted = (editor.tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, " " + target))
    start = list(editor.language_model.start)
    with torch.no_grad():
        logits = editor.model(torch.tensor([[*start, *ids, *wanted]])).logits[0].double().log_softmax(-1)
    begin = len(start) + len(ids) - 1
    return -fmean(float(logits[begin + step, token]) for step, token in enumerate(wanted))


def test_a_rows_scores_are_those_of_evals_on_the_same_edit(held):
    editor, chosen = held.editor, Choices(steps=3)
    some = [
        replace(one, neighbors=one.neighbors[:count])
        for one, count in zip(records(WITH_NEIGHBORS), (1, 3, 2, 1), strict=True)
    ]
    row = run(held, some, "memit", chosen)
    with written(editor, [one.written_facts[0] for one in some], "memit", chosen):
        said = answer_records(editor.language_model, some, QuestionSettings(free_tokens=0, texts=0))
        nll, tokens = editor.language_model.text_nll(TEXT)

        def likelier(one, prompt):
            return likelihood(editor, prompt, one.fact.target) < likelihood(editor, prompt, one.fact.old)

        by_hand = {
            "ES": fmean(likelier(one, one.fact.text) for one in some),
            "PS": fmean(fmean(likelier(one, prompt) for prompt in one.fact.paraphrases) for one in some),
            "NS": fmean(fmean(not likelier(one, other.prompt) for other in one.neighbors) for one in some),
        }
    found = summarize(some, said)
    assert row.scores == {name: found[name]["value"] if name in found else None for name in row.scores}
    assert {name for name, value in row.scores.items() if value is None} == NO_CHAT
    assert {name: row.scores[name] for name in by_hand} == pytest.approx(by_hand, abs=1e-6)
    assert 0 < by_hand["NS"] < 1
    assert row.perplexity == pytest.approx(math.exp(nll / tokens), abs=1e-5)


def test_what_is_not_asked_has_no_score_and_nothing_said_scores_zero(held):
    swapped = records([replace(fact, target="Paris", old="Rome") for fact in facts()])
    both = [scores(some, editing.ask(held.editor, some)) for some in (records(), swapped)]
    assert sorted(one["ES"] for one in both) == [0.0, 1.0], "the model prefers the same object for all"
    assert min(both, key=lambda one: one["ES"])["S"] == 0.0
    alone = [bare(record) for record in records()]
    found = scores(alone, editing.ask(held.editor, alone))
    assert {name for name, value in found.items() if value is None} == {"PS", "NS", "S", "PA"} | NO_CHAT


def test_nothing_is_asked_while_an_edit_is_timed(held, monkeypatch):
    def ask(editor, some):
        assert editor.progress == Progress()
        return own(editor, some)

    own = editing.ask
    monkeypatch.setattr(editing, "ask", ask)
    monkeypatch.setattr(held, "measure", lambda: ask(held.editor, []) or {"perplexity": 1.0, "kl": 0.0, "growth": 0.0})
    assert run(held, records(), "memit", Choices(steps=2)).perplexity == 1.0


def test_facts_alone_are_scored_together(held):
    row = one_at_a_time(held, records(), "rome", Choices(steps=2))
    assert (row.facts, row.lam, row.phases) == (4, None, {})
    assert row.facts_a_second == pytest.approx(1 / row.seconds)
    assert row.scores["ES"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert not held.editor.ledger.active


# Methods


@pytest.mark.parametrize("method", ALL)
def test_methods_are_given_what_they_take(method):
    several, exact = METHODS[method].several_layers, METHODS[method].exact
    taken = Choices((1, 2), 7.0, 3).taken_by(get_method(method))
    assert taken == Choices((1, 2) if several else None, None if exact else 7.0, 3)
    assert Choices((2,)).taken_by(get_method(method)).layers == (2,)


def bench(held: DriftMeter, some: Records, made: dict[int, list[Record]] | None = None) -> Bench:
    return Bench(held, some, made or {}, Choices(steps=2), repeats=1)


def test_an_edit_without_a_solution_is_not_tried(held):
    many = [Record(Fact("{} is", f"{subject} {n}", "Rome", "Paris"), str(n)) for n in range(13) for subject in SUBJECTS]
    opened = bench(held, records(), {49: many[:49]})
    for method in ("rome", "emmet"):
        row = opened.row(method, 49, made=True)
        assert "48 dimensions" in row.why
        assert (row.seconds, row.perplexity, set(row.scores.values())) == (None, None, {None})
    assert not held.editor.ledger.edits
    assert opened.row("memit", 5).why == "the model knows 4 of the facts"


def test_an_edit_that_fails_says_why_and_mistakes_are_raised(held, monkeypatch):
    before = tiny.weights(held.editor.model)

    def broken(*_):
        raise NumericalError("the moment is singular")

    monkeypatch.setitem(METHODS["emmet"].__dict__, "gain", broken)
    opened = bench(held, records())
    opened.warm_up(["emmet"])
    assert opened.row("emmet", 2).why == "the moment is singular."
    assert tiny.weights(held.editor.model) == before
    assert held.editor.progress == Progress()
    assert not opened.row("rome", 2).why
    with pytest.raises(InputError):
        replace(opened, chosen=Choices((99,))).row("memit", 2)


# The command

WITH_NEIGHBORS = [
    replace(fact, neighbors=("The sea", "The capital of Berlin is", "The capital of Spain is")) for fact in facts()
]


def half_swapped(some: list[Fact]) -> list[Fact]:
    """Whatever the model prefers, it is the true object of some."""
    return [*some[:2], *(replace(fact, target="Paris", old="Rome") for fact in some[2:])]


def command(folder, given, *options):
    """Runs it for the facts given."""
    tiny.llama().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "facts.jsonl").write_text("\n".join(json.dumps(fact.to_json()) for fact in given))
    (folder / "text.txt").write_text(" ".join(tiny.SENTENCES * 40))
    files = ["--facts", str(folder / "facts.jsonl"), "--text", str(folder / "text.txt")]
    model = ["--device", "cpu", "--model", str(folder / "model"), "--steps", "2", "--tokens", "200"]
    editing.main([*files, *model, *options, "--out", str(folder / "out.json")])


def rows_of(folder, given, *options):
    """What the command writes."""
    command(folder, given, *options)
    return json.loads((folder / "out.json").read_text())["rows"]


def test_the_command_tells_every_phase_of_every_method(tmp_path, capsys):
    rows = rows_of(tmp_path, half_swapped(facts()), "--n", "1", "2", "--repeats", "2")
    assert [(row["method"], row["facts"]) for row in rows[1:]] == [(name, n) for name in ALL for n in (1, 2)]
    for row in rows[1:]:
        assert set(row["phases"]) == set(editing.PHASES)
        assert row["facts_a_second"] == pytest.approx(row["facts"] / row["seconds"])
        measured = {*editing.SCORES, "perplexity", "drift", "growth", "memory_gib"} - NO_CHAT
        assert all(row[name] is not None for name in measured)
    assert (rows[0]["method"], rows[0]["seconds"], rows[0]["facts_a_second"]) == ("before", None, None)
    shown = capsys.readouterr().out
    assert "checks" in shown
    assert "facts/s" in shown
    told = (tmp_path / "out.json").read_text()
    assert str(tmp_path) not in told, "where files lie is of this machine"
    assert {"facts": "facts.jsonl", "text": "text.txt", "model": "model"}.items() <= json.loads(told)["options"].items()


def test_the_guard_is_timed_and_what_it_refuses_is_told(tmp_path, capsys):
    given = half_swapped(facts()), "--n", "2", "--methods", "memit", "--steps", "1"
    (_, without), (_, checked) = (rows_of(tmp_path, *given, *more) for more in ((), ("--guard",)))
    assert without["refused"] == []
    assert checked["refused"] == ["said"], "a step of search says nothing"
    assert checked["ES"] == without["ES"]
    assert "memit at 2 fails said" in capsys.readouterr().out


def test_each_dtype_to_search_in_has_its_rows(tmp_path):
    dtypes, own = ["bfloat16", "float32"], TargetSearch.dtype
    rows = rows_of(
        tmp_path, half_swapped(facts()), "--n", "1", "--methods", "memit", "--steps", "25", "--search", *dtypes
    )
    assert [row["search"] for row in rows] == ["", *dtypes]
    assert rows[1]["drift"] != rows[2]["drift"], "the same search twice"
    assert TargetSearch.dtype is own


def test_layers_and_lam_go_to_the_methods_that_take_them(tmp_path):
    given = ("--layers", "0,1", "--lam", "7", "--n", "1", "--methods", "memit", "rome")
    rows = rows_of(tmp_path, half_swapped(facts()), *given)
    assert [(row["layers"], row["lam"]) for row in rows[1:]] == [([0, 1], 7.0), ([1], None)]


def test_what_a_killed_run_measured_is_there(tmp_path, monkeypatch):
    def row(self, method, n, **options):
        if method == "rome":
            raise KeyboardInterrupt
        return own(self, method, n, **options)

    own = Bench.row
    monkeypatch.setattr(Bench, "row", row)
    with pytest.raises(KeyboardInterrupt):
        command(tmp_path, half_swapped(facts()), "--n", "1", "--methods", "memit", "rome")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["before", "memit"]


def test_neighbors_are_made_facts_for_the_cost(tmp_path, capsys):
    given = half_swapped(WITH_NEIGHBORS)
    rows = rows_of(tmp_path, given, "--n", "--made", "5", "--methods", "memit", "--alone", "1")
    assert [(row["method"], row["facts"], row["made"]) for row in rows[1:]] == [
        ("rome, one at a time", 1, False),
        ("memit", 5, True),
    ]
    assert rows[1]["S"] is not None
    assert {name for name in editing.SCORES if rows[2][name] is None} == {"PS", "NS", "S", "PA"} | NO_CHAT
    assert "neighbors of records are facts too" in capsys.readouterr().out
