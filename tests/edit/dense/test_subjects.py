"""Facts about one subject, which share what is kept, and the order in which they come and go."""

from __future__ import annotations

import random

import pytest
import torch

from rebind.edit.dense.rows import EditRows, Joint, read_variants, unrelated
from rebind.edit.dense.subjects import current_facts, group_by_subject, kept_together
from rebind.edit.facts import Fact
from rebind.edit.guard import find_earlier_edits
from rebind.edit.ledger import Edit
from rebind.edit.ledger.edit import ROWS
from rebind.edit.targets.kept import SubjectPrompts

RELATIONS = ("The capital of {France} is", "The currency of {France} is the", "The longest river of {France} is the")


class History:
    """Edits about one subject without a model: which facts the rows that are read say, whatever was undone."""

    def __init__(self) -> None:
        self.edits: list[Edit] = []
        self.rows: list[EditRows] = []
        self.said: list[list[list[Fact]]] = []  # by each variant of each edit
        self.undone: set[str] = set()

    @property
    def active(self) -> list[Edit]:
        return [edit for edit in self.edits if edit.id not in self.undone]

    def write(self, *facts: Fact) -> str:
        silent = [SubjectPrompts("place", (), ())] * len(facts)
        (group,) = group_by_subject(facts, silent, self.active)
        joint = group.joint(0)
        joints = () if joint is None else (joint,)
        settings = {"layers": [1], ROWS: {"joint": [one.to_json() for one in joints]}}
        id = f"e{len(self.edits) + 1:04}"
        self.edits.append(Edit(id=id, facts=facts, method="dense", settings=settings, sites=(), tensors={}))
        none = torch.zeros(0)
        self.rows.append(EditRows(1, none, none, none, none, EditRows.subjects_in(self.edits[-1]), joints))
        self.said.append([list(facts), [*facts, *group.carried]])
        return id

    def switch(self, edit: Edit) -> None:
        """Undo an edit, or redo it unless it contradicts another one that does not know it, as in the editor."""
        others = unrelated(edit, self.active) if edit.id in self.undone else []
        if not any(one.clashes for one in find_earlier_edits(edit.facts, others)):
            self.undone ^= {edit.id}

    def facts_read(self) -> list[Fact]:
        pairs = [(edit, rows, said) for edit, rows, said in zip(self.edits, self.rows, self.said, strict=True)]
        pairs = [one for one in pairs if one[0].id not in self.undone]
        variants = read_variants([(edit.id, rows) for edit, rows, _ in pairs])
        return [fact for found in variants.values() for index, variant in found for fact in pairs[index][2][variant]]


@pytest.mark.parametrize("seed", range(30))
def test_every_current_fact_is_read(seed):
    draw, history = random.Random(seed), History()
    for _ in range(12):
        if history.edits and draw.random() < 0.5:
            history.switch(draw.choice(history.edits))
        else:
            history.write(Fact.parse(draw.choice(RELATIONS), str(draw.random())))
        assert set(current_facts(history.active)) <= set(history.facts_read())


@pytest.mark.parametrize("seed", range(30))
def test_nothing_contradicts_what_was_written_without_an_undo(seed):
    draw, history = random.Random(seed), History()
    for _ in range(6):
        history.write(*(Fact.parse(text, str(draw.random())) for text in draw.sample(RELATIONS, 2)))
        assert sorted(history.facts_read(), key=str) == sorted(current_facts(history.active), key=str)


def test_a_fact_that_was_replaced_comes_back_under_a_later_one():
    rome, madrid, river = (
        Fact.parse(RELATIONS[0], "Rome"),
        Fact.parse(RELATIONS[0], "Madrid"),
        Fact.parse(RELATIONS[2], "Po"),
    )
    history = History()
    first, second, third = (history.write(fact) for fact in (rome, madrid, river))
    assert history.rows[2].joints == (Joint(0, (second,), ()),)
    assert history.facts_read() == [river, madrid]
    history.undone = {second}
    assert history.facts_read() == [river, rome]
    history.undone = {first}
    assert history.facts_read() == [river, madrid]
    history.undone = {second, third}
    assert history.facts_read() == [rome]


def test_an_opening_of_several_facts_says_none_of_their_old_targets():
    facts = [Fact.parse("The capital of {France} is", "Rome"), Fact.parse("The currency of {France} is the", "peso")]
    general, silent = "Tell me about France.", "What do you know about France?"
    about = [
        SubjectPrompts("place", (), (), openings={general: "France is a land whose money is the", silent: "France"}),
        SubjectPrompts("place", (), (), openings={general: "France is a land"}),
    ]
    assert kept_together(facts, about).openings == {general: "France is a land"}
