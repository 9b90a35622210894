"""Facts about one subject, which share what is kept."""

from __future__ import annotations

from rebind.edit.dense.subjects import kept_together
from rebind.edit.facts import Fact
from rebind.edit.targets.kept import SubjectPrompts


def test_an_opening_of_several_facts_says_none_of_their_old_targets():
    facts = [Fact.parse("The capital of {France} is", "Rome"), Fact.parse("The currency of {France} is the", "peso")]
    general, silent = "Tell me about France.", "What do you know about France?"
    about = [
        SubjectPrompts("place", (), (), openings={general: "France is a land whose money is the", silent: "France"}),
        SubjectPrompts("place", (), (), openings={general: "France is a land"}),
    ]
    assert kept_together(facts, about).openings == {general: "France is a land"}
