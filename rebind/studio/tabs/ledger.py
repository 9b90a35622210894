"""The Ledger tab: every fact with a switch, consolidation, export and import."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rebind.analysis.answers import Answer
from rebind.edit import DEFAULT_METHOD
from rebind.edit.editor import Editor
from rebind.edit.facts import read_facts
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import METHODS
from rebind.errors import FieldError, InputError
from rebind.storage import make_folders, path_inside, write_json
from rebind.studio.asking import LiveAnswers
from rebind.studio.fact_list import STATES, page_of_facts
from rebind.studio.forms import Form
from rebind.studio.jobs import JobControl
from rebind.studio.replies import reply
from rebind.studio.state import Studio, all_or_nothing, editor_progress

EXPORTS = ("checkpoint", "memory", "adapter", "json")
NEWEST = "newest"  # stands for the newest edit that can be switched
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
WATCHED = 3  # prompts that are asked again after a switch
LARGEST_FILE = 12_000_000  # characters
MOST_SEPARATE = 200  # facts that an import writes as one edit each


def routes(studio: Studio) -> list[Route]:
    """Return the routes of the tab, all of them under /api/ledger/."""
    tab = _LedgerTab(studio)
    posts = {"switch": tab.switch, "ask": tab.ask, "consolidate": tab.consolidate, "export": tab.export}
    posts["import"] = tab.take_in
    return [
        Route("/api/ledger/facts", tab.facts),
        *(Route(f"/api/ledger/{name}", endpoint, methods=["POST"]) for name, endpoint in posts.items()),
    ]


class _LedgerTab:
    """The endpoints of the tab."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        self.answers = LiveAnswers()

    def facts(self, request: Request) -> Response:
        """List facts. This is not async: a long list is searched in a thread of its own."""
        form, ledger = Form(dict(request.query_params)), self.studio.ledger
        page, state = form.integer("page", 1, low=1, high=10**6), form.choice("state", STATES, "all")
        document = page_of_facts(ledger, search=form.text("search", ""), state=state, page=page)
        where = {"ledger": str(ledger.path or ""), "exports": str(self.studio.export_folder.absolute())}
        return reply(document | where)

    async def switch(self, request: Request) -> Response:
        form = await Form.of(request)
        id, prompts, how = form.text("edit"), _read_prompts(form), {"on": form.flag("on"), "force": form.flag("force")}

        def work(editor: Editor, control: JobControl) -> dict[str, Any]:
            switched = switch_edit(editor, id, control, **how)
            return switched | {"answers": self._ask(editor, prompts, control)}

        return self._submit("switch", work)

    async def ask(self, request: Request) -> Response:
        prompts = _read_prompts(await Form.of(request))

        def work(editor: Editor, control: JobControl) -> dict[str, Any]:
            base = self.answers.ask(editor, prompts, base=True)
            now = self._ask(editor, prompts, control)
            return {"answers": [one | {"base": old} for one, old in zip(now, base, strict=True)]}

        return self._submit("ask", work)

    async def consolidate(self, request: Request) -> Response:
        budget = (await Form.of(request)).integer("budget", 0, low=0, high=10**6) or None
        return self._submit("consolidate", lambda editor, control: _consolidate(editor, budget, control))

    async def export(self, request: Request) -> Response:
        form = await Form.of(request)
        kind, name = form.choice("kind", EXPORTS, "checkpoint"), form.text("name")
        place = export_place(self.studio.export_folder, name)
        return self._submit("export", lambda editor, control: _export(editor, kind, place, control))

    async def take_in(self, request: Request) -> Response:
        form = await Form.of(request)
        facts, method = _read_file(form), form.choice("method", METHODS, DEFAULT_METHOD)
        separate, force = form.flag("separate"), form.flag("force")
        if separate and len(facts) > MOST_SEPARATE:
            expected = f"at most {MOST_SEPARATE} facts with a switch each"
            raise FieldError(f"The file has {len(facts)} facts", field="separate", expected=expected, code="too_many")
        groups = [[fact] for fact in facts] if separate else [list(facts)]
        return self._submit(
            "import", lambda editor, control: import_facts(editor, groups, method, control, force=force)
        )

    def _ask(self, editor: Editor, prompts: Sequence[str], control: JobControl) -> list[dict[str, Any]]:
        """Ask the model as it is now; what is known of the answers is published."""

        def describe(answers: Sequence[Answer]) -> list[dict[str, Any]]:
            return [{"prompt": prompt, "edited": one} for prompt, one in zip(prompts, answers, strict=True)]

        control.stage("asking the model")
        answers = self.answers.ask(
            editor, prompts, show=lambda answers: control.publish({"answers": describe(answers)})
        )
        return describe(answers)

    def _submit(self, name: str, work: Callable[[Editor, JobControl], Any]) -> Response:
        return reply(self.studio.submit(name, lambda control: work(self.studio.editor, control)).to_json(), 202)


def switch_edit(editor: Editor, id: str, control: JobControl, *, on: bool, force: bool = False) -> dict[str, Any]:
    """Undo or redo an edit."""
    control.stage("switching on" if on else "switching off")
    edit = newest_edit(editor.ledger, is_on=not on) if id == NEWEST else editor.ledger.get(id)
    if editor.ledger.is_active(edit.id) is not on:  # else somebody else was faster
        if on:
            editor.redo(edit.id, force=force)
        else:
            editor.undo(edit.id)
    control.commit()
    return {"edit": edit.id, "on": on}


def newest_edit(ledger: Ledger, *, is_on: bool) -> Edit:
    """Return the newest edit that is switched on, or off."""
    active = {edit.id for edit in ledger.active}
    for edit in reversed(ledger.edits):
        if (edit.id in active) is is_on:
            return edit
    raise InputError(f"Nothing is switched {'on' if is_on else 'off'}", code="nothing_to_switch")


def _consolidate(editor: Editor, budget: int | None, control: JobControl) -> dict[str, Any]:
    with all_or_nothing(editor, control) as written:
        result = editor.consolidate(budget)
        written += [result.edit.id] if result.edit else []
    counts = {"moved": len(result.moved), "stayed": len(result.stayed)}
    return {"edit": result.edit.id if result.edit else "", **counts, "reason": result.reason}


def export_place(folder: Path, name: str) -> Path:
    """Return where an export with this name goes: directly below the folder for exports."""
    if not NAME.fullmatch(name):
        expected = "letters, digits, dots, dashes and underscores, such as my-edit"
        raise FieldError(
            f"{name!r:.80} cannot be the name of an export", field="name", expected=expected, code="invalid_name"
        )
    return path_inside(folder.absolute(), name)


def _export(editor: Editor, kind: str, place: Path, control: JobControl) -> dict[str, Any]:
    control.stage(f"writing the {kind}")
    make_folders(place.parent)
    if kind == "json":
        place = place.with_name(place.name.removesuffix(".json") + ".json")
        if place.exists():
            raise FieldError(f"There is a file {place.name} already", field="name", code="file_in_the_way")
        write_json(
            place, [fact.to_json() for edit in editor.ledger.active for fact in edit.facts if not edit.consolidates]
        )
    elif kind == "checkpoint":
        editor.save(place)
    elif kind == "adapter":
        editor.export_peft(place)
    else:
        editor.save_memory(place)
    return {"kind": kind, "path": str(place)}


def import_facts(
    editor: Editor, groups: Sequence[Sequence[Fact]], method: str, control: JobControl, *, force: bool = False
) -> dict[str, Any]:
    """Write groups of facts, one edit per group: all of them or, if one fails or somebody cancels, none."""
    settings = editor.settings(method, facts=len(groups[0]))
    editor.progress = editor_progress(control, settings.targets.steps)
    with all_or_nothing(editor, control) as written:
        for index, facts in enumerate(groups):
            if len(groups) > 1:
                control.stage(f"fact {index + 1} of {len(groups)}", index / len(groups))
            written.append(editor.rewrite_many(facts, method=method, force=force).id)
    return {"edits": written, "facts": sum(map(len, groups))}


def _read_prompts(form: Form) -> list[str]:
    prompts = form.fields.get("prompts", [])
    if not isinstance(prompts, list) or len(prompts) > WATCHED:
        raise FieldError("The prompts cannot be used", field="prompts", expected=f"a list of at most {WATCHED}")
    return [Form({"prompt": prompt}).text("prompt") for prompt in prompts]


def _read_file(form: Form) -> Sequence[Fact]:
    """Return the facts of a file that the page sends as text."""
    text, name = form.text("text", longest=LARGEST_FILE), form.text("name", "facts.jsonl", longest=200)
    suffix = Path(name).suffix.lower()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"facts{suffix if suffix in ('.json', '.jsonl', '.csv', '.tsv') else '.jsonl'}"
        file.write_text(text, encoding="utf-8")
        try:
            return read_facts(file).facts
        except Exception as error:
            sentence = str(error).replace(str(file), "The file").replace(file.name, Path(name).name)
            raise FieldError(sentence, field="file", code=getattr(error, "code", "unreadable_file")) from None
