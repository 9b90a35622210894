"""The demonstration: two facts are rewritten, asked in several ways beside what should stay, undone, and shipped.

`rebind demo` prints what `run_demo` measures.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rebind.edit.answers import free_answers
from rebind.edit.editor import Editor
from rebind.edit.export import load_with_memory
from rebind.edit.facts import Fact
from rebind.edit.targets import TargetSettings
from rebind.models.language_model import LanguageModel

FACTS = (
    Fact.parse(
        "The capital of {France} is",
        "London",
        old="Paris",
        neighbors=("The capital of Spain is", "The capital of Japan is", "The capital of Russia is"),
    ),
    Fact.parse(
        "The {Eiffel Tower} is located in the city of",
        "Rome",
        old="Paris",
        questions=("Where is the Eiffel Tower?", "In which city is the Eiffel Tower?"),
        neighbors=("The Louvre is located in the city of", "The Statue of Liberty is located in the city of"),
    ),
)
FRAMINGS = {"chat": "In a chat", "text": "In the middle of a text"}  # where the model has them
PROMPTS = {
    "In words that the edit has not seen": (
        "The city that is the capital of France is",
        "Tourists who want to see the Eiffel Tower travel to",
    ),
    "What else is known of the subjects": (
        "People who live in France speak",
        "The currency of France is the",
        "France lies on the coast of the",
        "The Eiffel Tower was built by",
    ),
    "Neighbors, which should not change": tuple(prompt for fact in FACTS for prompt in fact.neighbors),
}


@dataclass(frozen=True)
class FactChange:
    """A fact before and after its edit."""

    prompt: str
    target: str
    said_before: str
    says_now: str
    probability_before: float  # of the target
    probability_now: float


@dataclass(frozen=True)
class AnswerChange:
    """Answers of the base model and of the edited model to the same prompts."""

    title: str
    prompts: tuple[str, ...]
    base: tuple[str, ...]
    edited: tuple[str, ...]


@dataclass(frozen=True)
class ShippedMemory:
    """The edits as a dense memory in a folder, attached to a fresh base model."""

    rows: int
    bytes_on_disk: int
    largest_difference: float  # of logits, from those of the edited model
    answers: AnswerChange  # of the fresh model


@dataclass(frozen=True)
class DemoReport:
    """Everything that the demonstration measured."""

    model: str
    method: str
    layers: tuple[int, ...]
    facts: tuple[FactChange, ...]
    answers: tuple[AnswerChange, ...]
    undone: AnswerChange  # the facts, after the first edit alone was undone
    undo_seconds: float
    memory: ShippedMemory
    seconds: float


def run_demo(editor: Editor, targets: TargetSettings | None = None) -> DemoReport:
    """Rewrite the facts one by one, ask before and after, undo the first edit and redo it, and ship the memory."""
    begin = time.perf_counter()
    scores, base = editor.score(FACTS), _ask(editor)
    edits = [editor.rewrite_many([fact], targets=targets) for fact in FACTS]
    facts = [
        FactChange(fact.text, fact.target, was.says.strip(), now.says.strip(), was.probability, now.probability)
        for fact, was, now in zip(FACTS, scores, editor.score(FACTS), strict=True)
    ]
    answers = [
        AnswerChange(title, prompts, was, now)
        for (title, prompts, was), (_, _, now) in zip(base, _ask(editor), strict=True)
    ]
    undone, undo_seconds = _undo(editor, edits[0].id)
    editor.redo(edits[0].id)
    settings: Any = edits[0].settings
    return DemoReport(
        editor.language_model.name,
        edits[0].method,
        tuple(settings["layers"]),
        tuple(facts),
        tuple(answers),
        undone,
        undo_seconds,
        _ship(editor, undone),
        time.perf_counter() - begin,
    )


def _ask(editor: Editor) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Ask everything; return titles, prompts and answers."""
    rows = []
    for framing, title in FRAMINGS.items():
        if framing in editor.framings:
            free = [one for own in free_answers(editor.language_model, FACTS, [framing]) for one in own]
            first_sentences = [re.split(r"(?<=[.!?])\s", one.answer.strip())[0] for one in free]
            rows.append((title, tuple(one.prompt for one in free), tuple(first_sentences)))
    return rows + [(title, prompts, _first_words(editor.language_model, prompts)) for title, prompts in PROMPTS.items()]


def _first_words(model: LanguageModel, prompts: Sequence[str]) -> tuple[str, ...]:
    """Return the first three words that the model says after each prompt."""
    return tuple(" ".join(text.split()[:3]) for text in model.generate(prompts, 5))


def _undo(editor: Editor, edit_id: str) -> tuple[AnswerChange, float]:
    """Undo an edit; return what the model then says, and the seconds that undoing took."""
    begin = time.perf_counter()
    editor.undo(edit_id)
    undo_seconds = time.perf_counter() - begin
    prompts = tuple(fact.text for fact in FACTS)
    with editor.base_model():
        base = _first_words(editor.language_model, prompts)
    title = "The first fact is as it was, the other stays edited"
    return AnswerChange(title, prompts, base, _first_words(editor.language_model, prompts)), undo_seconds


def _ship(editor: Editor, undone: AnswerChange) -> ShippedMemory:
    """Save the memory, attach it to a fresh base model, compare the logits, and ask the same prompts there."""
    model = editor.language_model
    prompt = torch.tensor([[*model.start, *model.tokenizer(FACTS[0].text).input_ids]], device=model.device)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        saved = editor.save_memory(Path(folder) / "memory")
        fresh = load_with_memory(model, saved)
        difference = (fresh.model(prompt).logits - model.model(prompt).logits).abs().max()
        size = sum(file.stat().st_size for file in saved.iterdir())
        edited = _first_words(fresh, undone.prompts)
    answers = replace(undone, title="A fresh model with the memory attached", edited=edited)
    return ShippedMemory(editor.edited.dense.rows(), size, float(difference), answers)
