"""The benchmark of a hundred thousand dense facts, with a few of them on a tiny model."""

from __future__ import annotations

from argparse import Namespace

from benchmarks.dense_many import invented_facts, recognition, rows_of
from rebind.edit import Fact
from rebind.evals.records import Record
from tests import tiny
from tests.edit.editors import QUICK, open_editor

RECORDS = [Record(Fact("The capital of {} is", "France", "Rome"), "1"), Record(Fact("{} is in", "Oslo", "Spain"), "2")]


def test_every_fact_is_about_a_name_of_its_own():
    facts = invented_facts(RECORDS, 100)
    assert len({fact.subject for fact in facts}) == 100
    assert [fact.target for fact in facts[:3]] == ["Rome", "Spain", "Rome"]
    assert facts[1].text == f"{facts[1].subject} is in"


def test_rows_come_after_every_second_edit_and_the_last(monkeypatch):
    editor = open_editor()
    settings = editor.settings("dense")
    monkeypatch.setattr(type(editor), "settings", lambda *_, **__: Namespace(**{**vars(settings), "targets": QUICK}))
    options = Namespace(tokens=200, batch=2, seconds=1e9)
    rows = list(rows_of(editor, invented_facts(RECORDS, 10), "\n".join(tiny.SENTENCES), options))
    assert [row["facts"] for row in rows] == [4, 8, 10]
    assert all(row["rows"] >= row["facts"] for row in rows)
    assert {"fires", "perplexity other", "undo one"} <= set(rows[-1])
    assert len(editor.ledger.active) == 5


def test_a_sharper_softmax_recognizes_more():
    blunt, sharp = recognition(open_editor(), invented_facts(RECORDS, 40), [1.0, 1000.0])
    assert 0 < blunt["weight"] < 0.1
    assert blunt["weight"] < sharp["weight"] <= 1
    assert sharp["at least .9"] > blunt["at least .9"] == 0
