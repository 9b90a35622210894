"""`rebind ask`: compare the answers of the base model and the edited model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from rebind.cli import options
from rebind.cli.options import EditorOptions, argument, examples, option
from rebind.cli.session import open_editor
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import one_line, table
from rebind.cli.ui.terminal import Terminal
from rebind.edit.wording import percent

if TYPE_CHECKING:
    from rebind.models import LanguageModel

EXAMPLES = examples(
    'rebind ask "The capital of France is"',
    'rebind ask "What is the capital of France?" --chat --tokens 30',
    'rebind ask "Paris is in" "Rome is in" --json',
)


@dataclass(frozen=True)
class Choice:
    """A token that may come next."""

    token: str
    probability: float


@dataclass(frozen=True)
class Answer:
    """What a model says to a prompt: the most likely next tokens, and how it continues."""

    top: tuple[Choice, ...]
    says: str


def ask(
    prompts: Annotated[list[str], argument("PROMPTS", "One or more prompts.")],
    top: Annotated[int, option("N", "Show the N most likely next tokens.", min=1)] = 5,
    tokens: Annotated[int, option("N", "Continue each prompt by N tokens.", min=1)] = 12,
    chat: options.Chat = False,
    *,
    source: EditorOptions,
    terminal: Terminal,
) -> None:
    """Compare the answers of the base model and the edited model to the same prompts."""
    from rebind.models.prompts import require_text

    for prompt in prompts:
        require_text("prompt", prompt)
    phases = Phases(terminal)
    with phases.shown():
        editor = open_editor(source, phases, chat=chat)
        phases.start("asking")
        with editor.lifted():
            base = _answers(editor.language_model, prompts, top, tokens)
        active = [edit.id for edit in editor.ledger.active]
        edited = _answers(editor.language_model, prompts, top, tokens) if active else base
    rows = list(zip(prompts, base, edited, strict=True))
    for prompt, before, after in rows:
        _print(terminal, prompt, before, after if active else None)
    place = f" of {editor.ledger.path}" if editor.ledger.path else ""
    terminal.hint(f"edits: {', '.join(active)}{place}" if active else "no active edits: there is only the base model")
    document = {
        "model": editor.language_model.name,
        "ledger": None if editor.ledger.path is None else str(editor.ledger.path),
        "active": active,
        "answers": [
            {"prompt": prompt, "base": asdict(before), "edited": asdict(after)} for prompt, before, after in rows
        ],
    }
    terminal.result(document, "\n".join(" ".join(after.says.split()) for after in edited))


def _answers(model: LanguageModel, prompts: Sequence[str], top: int, tokens: int) -> list[Answer]:
    probabilities = model.next_token_log_probs(prompts).exp()
    best = probabilities.topk(min(top, probabilities.shape[-1]))
    answers = []
    for ids, shares, says in zip(
        best.indices.tolist(), best.values.tolist(), model.generate(prompts, tokens), strict=True
    ):
        texts = (str(model.tokenizer.decode([token])) for token in ids)
        answers.append(Answer(tuple(map(Choice, texts, shares)), says))
    return answers


def _print(terminal: Terminal, prompt: str, base: Answer, edited: Answer | None) -> None:
    answers = {"base": base} if edited is None else {"base": base, "edited": edited}
    terminal.print(Text(prompt, style="bold"))
    shares = [" " * place for place in range(len(answers))]  # columns without a name
    tokens = table(*(column for pair in zip(answers, shares, strict=True) for column in pair), right=shares)
    for choices in zip(*(one.top for one in answers.values()), strict=True):
        tokens.add_row(*(cell for one in choices for cell in (repr(one.token), percent(one.probability))))
    terminal.print(tokens)
    for name, one in answers.items():
        is_new = name == "edited" and one.says != base.says
        text = (one_line(one.says, 10_000), "bold green" if is_new else "cyan")
        terminal.print(Text.assemble((f"{name:<8}", "dim"), prompt, " ", text))
