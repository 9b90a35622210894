"""The Edit tab: write one fact, see the model before and after it, and talk to both models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rebind.edit import DEFAULT_METHOD
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.methods import METHODS
from rebind.edit.targets.kept import subject_prompts
from rebind.errors import FieldError
from rebind.studio.asking import ask_about, chat, compare
from rebind.studio.forms import Form, printable
from rebind.studio.jobs import JobControl
from rebind.studio.replies import reply
from rebind.studio.state import Studio, all_or_nothing, editor_progress

TURNS = 20  # of a conversation that the page may send back
EXAMPLES = (
    ("The capital of {France} is", "London"),
    ("{Marie Curie} was born in", "Egypt"),
    ("The currency of {Germany} is the", "peso"),
    ("The capital of {Japan} is", "Kyoto"),
)


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/edit/."""

    async def options(request: Request) -> Response:
        methods = [{"name": name, "summary": method.summary} for name, method in METHODS.items()]
        examples = [{"sentence": sentence, "target": target} for sentence, target in EXAMPLES]
        return reply({"methods": methods, "method": DEFAULT_METHOD, "examples": examples})

    async def write(request: Request) -> Response:
        form = await Form.of(request)
        fact, method, layers = read_fact(form), form.choice("method", METHODS, DEFAULT_METHOD), form.layers()
        choices: dict[str, Any] = {"layers": layers, "force": form.flag("force")}
        job = studio.submit("edit", lambda control: write_fact(studio.editor, fact, method, control, **choices))
        return reply(job.to_json(), 202)

    async def talk(request: Request) -> Response:
        form = await Form.of(request)
        question, history = form.text("question"), _read_history(form)
        return reply(
            studio.submit("chat", lambda control: _talk(studio.editor, history, question, control)).to_json(), 202
        )

    return [
        Route("/api/edit/options", options),
        Route("/api/edit/write", write, methods=["POST"]),
        Route("/api/edit/chat", talk, methods=["POST"]),
    ]


def read_fact(form: Form) -> Fact:
    """Return the fact of a form: braces in the sentence mark the subject, or a field names it."""
    sentence, target, subject = form.text("sentence"), form.text("target", longest=400), form.text("subject", "")
    return Fact.parse(sentence, target, subject=subject or None)


def write_fact(
    editor: Editor,
    fact: Fact,
    method: str,
    control: JobControl,
    *,
    layers: Sequence[int] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Ask, write, and ask again; the result is what changed."""
    model, settings, began = editor.language_model, editor.settings(method, layers=layers), time.perf_counter()
    control.stage("asking the model before the edit")
    with editor.base_model():
        about = subject_prompts(model, [fact])[0]
    before, asked_at = ask_about(model, fact, about, editor.framings), time.perf_counter()
    editor.progress = editor_progress(control, settings.targets.steps)
    with all_or_nothing(editor, control) as written_edits:
        edit = editor.rewrite_many([fact], method=method, layers=layers, force=force)
        written_edits.append(edit.id)
    written_at = time.perf_counter()
    control.stage("asking the edited model")
    after, drift = ask_about(model, fact, about, editor.framings), editor.drift()
    seconds = {"asking": asked_at - began + time.perf_counter() - written_at, "writing": written_at - asked_at}
    left, right = fact.parts
    parts = {"before": left, "subject": fact.subject, "after": right, "text": fact.text, "target": fact.target}
    return {"edit": _summary(edit), "fact": parts, "drift": asdict(drift), "seconds": seconds, **compare(before, after)}


def _summary(edit: Edit) -> dict[str, Any]:
    scores: Any = edit.scores
    failed = scores.get("guard", {}).get("failed", [])
    memory = "dense" if edit.has_rows else "weights"
    layers, lam = edit.settings.get("layers"), edit.settings.get("lam")
    about = {"id": edit.id, "method": edit.method, "memory": memory, "layers": layers, "lam": lam}
    return {**about, "forced": edit.forced, "failed": [one["says"] for one in failed]}


def _talk(editor: Editor, history: list[tuple[str, str, str]], question: str, control: JobControl) -> dict[str, str]:
    """Let the base model and the edited model answer, each with its own side of the conversation."""
    control.stage("the base model answers")
    with editor.base_model():
        base = chat(editor.language_model, [(earlier, answer) for earlier, answer, _ in history], question)
    control.publish({"base": base})
    if not editor.ledger.active:
        return {"base": base, "edited": base}
    control.stage("the edited model answers")
    edited = chat(editor.language_model, [(earlier, answer) for earlier, _, answer in history], question)
    return {"base": base, "edited": edited}


def _read_history(form: Form) -> list[tuple[str, str, str]]:
    turns = form.fields.get("history", [])
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise FieldError("The history is not a list of turns", field="question", code="invalid_history")
    texts = [{name: printable(text) for name, text in turn.items() if isinstance(text, str)} for turn in turns[-TURNS:]]
    fields = [Form(turn) for turn in texts]
    return [(turn.text("question"), turn.text("base", "…"), turn.text("edited", "…")) for turn in fields]
