"""`rebind ask`: the base model and the edited one, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.answers import Answer, answer, as_fact
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import spoken, table
from rebind.cli.ui.terminal import Screen, screen
from rebind.edit.facts.fact import require_text
from rebind.edit.wording import percent
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

EXAMPLES = """[bold]Examples[/bold]

rebind ask "The capital of France is"

rebind ask "What is the capital of France?" --chat --tokens 30

rebind ask "Paris is in" "Rome is in" --json"""


def ask(
    prompts: Annotated[list[str], typer.Argument(help="What to ask; several prompts are asked in turn.")],
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many next tokens to show.")] = 5,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the continuation.")] = 12,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    chat: options.Chat = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Ask the base model and the edited one the same thing."""
    with screen(as_json, quiet, debug, options.typed(model, ledger)) as shown:
        for prompt in prompts:
            require_text("a prompt", prompt)
        bars = Bars(shown)
        with bars.drawn():
            editor = open_editor(Wanted(model, ledger, device, dtype, chat, corpus, moment_tokens), bars)
            bars.phase("asking")
            _require_short(editor, prompts)
            with editor.lifted():
                base = [answer(editor, prompt, top=top, tokens=tokens) for prompt in prompts]
            active = [edit.id for edit in editor.ledger.active]
            edited = [answer(editor, prompt, top=top, tokens=tokens) for prompt in prompts] if active else base
        rows = list(zip(prompts, base, edited, strict=True))
        for prompt, before, after in rows:
            _show(shown, prompt, before, after, bool(active))
        many = f"{len(active)} edits" if len(active) > 1 else f"edit {active[0]}" if active else ""
        place = f"of {editor.ledger.path}" if editor.ledger.path else ""
        shown.hint(f"edited: {many} {place}" if active else "no active edits: both would say the same")
        shown.result(
            {
                "model": editor.loaded.name,
                "ledger": None if editor.ledger.path is None else str(editor.ledger.path),
                "active": active,
                "answers": [
                    {"prompt": prompt, "base": before.to_json(), "edited": after.to_json()}
                    for prompt, before, after in rows
                ],
            },
            "\n".join(spoken(after.says, 10_000) for after in edited),
        )


def _require_short(editor: Editor, prompts: list[str]) -> None:
    """Say of a prompt that is too long, and of nothing that was not typed."""
    from rebind.edit.facts.encoding import encode

    limit = editor.trunk.context
    for prompt in prompts:
        asked = encode(as_fact(prompt, "."), editor.tokenizer, editor.loaded.start, chat=editor.chat)
        if limit is not None and len(asked.ids) + len(asked.target) > limit:
            raise InputError(
                f"prompt {spoken(prompt)!r} is {len(asked.ids)} tokens, the model takes {limit} with its answer: "
                f"shorten the prompt"
            )


def _show(shown: Screen, prompt: str, before: Answer, after: Answer, edited: bool) -> None:
    shown.show(Text(prompt, style="bold"))
    made = table("base", "", *(("edited", " ") if edited else ()), right=("", " "))
    for first, second in zip(before.top, after.top, strict=True):
        cells = [repr(first.token), percent(first.probability)]
        made.add_row(*cells, *((repr(second.token), percent(second.probability)) if edited else ()))
    shown.show(made)
    shown.show(Text.assemble(("base    ", "dim"), prompt, (before.says.replace("\n", "⏎"), "cyan")))
    if edited:
        style = "bold green" if after.says != before.says else "cyan"
        shown.show(Text.assemble(("edited  ", "dim"), prompt, (after.says.replace("\n", "⏎"), style)))
