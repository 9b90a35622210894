"""`rebind ask`: compare the answers of the base model and the edited model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.session import describe, open_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import one_line, table
from rebind.edit.wording import percent
from rebind.limits import MAX_CHOICES

EXAMPLES = opt.examples(
    'rebind ask "The capital of France is"',
    'rebind ask "What is the capital of France?" --chat --tokens 30',
    'rebind ask "Paris is in" "Rome is in" --json',
)


def ask(
    prompts: Annotated[list[str], opt.argument("PROMPTS", "One or more prompts.")],
    top: Annotated[int, opt.value("N", "Show the N most likely next tokens.", min=1, max=MAX_CHOICES)] = 5,
    tokens: Annotated[int, opt.value("N", "Continue each prompt by at most N tokens.", min=1)] = 12,
    *,
    source: opt.EditorOptions,
    chat: opt.Chat = False,
    terminal: Terminal,
) -> None:
    """Compare the answers of the base model and the edited model."""
    from rebind.models.prompts import QUESTION_MARKS, require_text

    for prompt in prompts:
        require_text("prompt", prompt)
    with Phases(terminal) as phases:
        editor = open_editor(source, phases, chat=chat)
        from rebind.analysis.answers import ask as ask_model

        phases.begin("asking")
        with editor.base_model():
            base = ask_model(editor.language_model, prompts, tokens, top)
        document = describe(editor)
        active = document["active"]
        edited = ask_model(editor.language_model, prompts, tokens, top) if active else base
    answers = [
        {"prompt": prompt, "base": before, "edited": after}
        for prompt, before, after in zip(prompts, base, edited, strict=True)
    ]
    for answer in answers:
        _print(terminal, answer, ("base", "edited") if active else ("base",), chat=chat)
    edits = f"edits: {', '.join(active)} of {document['ledger']}"
    terminal.hint(edits if active else "no active edits: this is the base model")
    questions = [prompt for prompt in prompts if prompt.rstrip()[-1] in QUESTION_MARKS]
    if questions and not chat and editor.tokenizer.chat_template:
        command = opt.command_line("ask", *questions, options=opt.as_typed(source, chat=True))
        terminal.suggest("ask as in a chat", command)
    terminal.result(document | {"answers": answers}, "\n".join(" ".join(answer["says"].split()) for answer in edited))


def _print(terminal: Terminal, answer: dict[str, Any], models: Sequence[str], *, chat: bool) -> None:
    """Print the first choices after a prompt, and the prompt with each continuation; in a chat, only the answer."""
    terminal.print(Text(answer["prompt"], style="bold"))
    unnamed = [" " * index for index in range(len(models))]  # headings of the columns of probabilities
    grid = table(*(name for pair in zip(models, unnamed, strict=True) for name in pair), right=unnamed)
    for choices in zip(*(answer[model]["top"] for model in models), strict=True):
        grid.add_row(*(cell for choice in choices for cell in (repr(choice["token"]), percent(choice["probability"]))))
    terminal.print(grid)
    for model in models:
        text = answer[model]["says"]
        style = "cyan" if text == answer["base"]["says"] else "bold green"
        beginning = "" if chat else f"{answer['prompt'].rstrip()} "
        terminal.print(Text.assemble((f"{model:<8}", "dim"), beginning, (one_line(text, longest=1_000), style)))
