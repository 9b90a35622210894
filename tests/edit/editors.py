"""Editors of tiny models: opened and used in milliseconds."""

from __future__ import annotations

from typing import Any

from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.ledger import Edit
from rebind.edit.targets import ContextSettings, TargetSettings
from tests import tiny

CONTEXTS = ContextSettings(first_words=("The", "I"), tokens=4)
QUICK = TargetSettings(steps=6, rate=0.5, clamp=2.0)  # too few steps to make a random model say a fact
FACTS = [
    Fact.parse("The capital of {France} is", "Rome"),
    Fact.parse("The mother tongue of {Danielle Darrieux} is", "Italian"),
    Fact.parse("{Berlin} is the capital of", "Spain"),
]


def open_editor(model: Any = None, ledger: Any = None, **options: Any) -> Editor:
    options = {"corpus": tiny.texts(), "moment_tokens": 1500, "guard": None, "contexts": CONTEXTS, **options}
    return Editor(tiny.llama() if model is None else model, tiny.tokenizer(), ledger=ledger, **options)


def rewrite(editor: Editor, *facts: Fact, **options: Any) -> Edit:
    """Write facts into the weights, or by another method."""
    return editor.rewrite_many(list(facts), **{"method": "memit", "targets": QUICK, **options})
