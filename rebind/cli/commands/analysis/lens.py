"""`rebind lens`: apply the output head of a model to every layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.session import describe, open_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.tables import table
from rebind.edit.wording import percent
from rebind.storage import check_writable

if TYPE_CHECKING:
    from torch import Tensor

    from rebind.analysis.lens import Lens

EXAMPLES = opt.examples(
    'rebind lens "The capital of France is"',
    'rebind lens "The capital of France is" --target Rome --out lens/',
    note="If the ledger has active edits, the base model and the edited model are shown side by side.",
)


def lens(
    prompt: Annotated[str, opt.argument("PROMPT", "The prompt to read.")],
    target: Annotated[str | None, opt.value("TEXT", "The answer to look for.", default="the model's answer")] = None,
    out: Annotated[Path | None, opt.value("DIR", "Write lens.png and lens.json into this folder.")] = None,
    *,
    source: opt.EditorOptions,
    chat: opt.Chat = False,
    terminal: Terminal,
) -> None:
    """Logit lens: show what the model would answer after each layer."""
    from rebind.models.prompts import require_text

    require_text("prompt", prompt)
    if target is not None:
        require_text("target", target)
    if out is not None:
        check_writable(out)
    with Phases(terminal) as phases:
        editor = open_editor(source, phases, chat=chat)
        from rebind.analysis import draw_lens, logit_lens

        phases.begin("asking")
        document = describe(editor)
        edited = base = logit_lens(editor.language_model, prompt, target)
        if document["active"]:
            with editor.base_model():
                base = logit_lens(editor.language_model, prompt, target, answer_id=edited.answer_id)
    document |= {"base": base.to_json(), "edited": edited.to_json()}
    lenses = {"base": base, "edited": edited} if document["active"] else {"": base}
    _print(terminal, lenses)
    files = []
    if out is not None:
        names = {name: (out / "lens-base.png" if name == "base" else out / "lens.png") for name in lenses}
        titles = {name: f"{prompt} ({name})" if name else prompt for name in lenses}
        figures = [draw_lens(lenses[name], path, title=titles[name]) for name, path in names.items()]
        files = terminal.save(document, out / "lens.json", figures)
    brief = "" if edited.appears is None else str(edited.appears)
    terminal.result(document | {"files": files}, brief)


def _print(terminal: Terminal, lenses: dict[str, Lens]) -> None:
    first = next(iter(lenses.values()))
    terminal.print(Text(first.prompt.text, style="bold"))
    terminal.hint(f"says: the first choice and its probability; P, rank: probability and rank of {first.answer!r}")
    terminal.print(layer_table(lenses))
    for name, lens in lenses.items():
        top = float(lens.probability.max())
        prefix = f"{name}: " if name else ""
        terminal.print(f"{prefix}probability of {lens.answer!r} after each token, by layer (full: {percent(top)})")
        rows = lens.probability.mT.tolist()
        terminal.print(*heatmap(lens.prompt.labels, rows, "lens", width=terminal.out.width, top=top))
        layer = lens.appears
        terminal.hint("never the first choice" if layer is None else f"the first choice from layer {layer} on")


def layer_table(lenses: dict[str, Lens]) -> Table:
    """Return one row per layer. A token that is too long ends in an ellipsis; numbers are never shortened."""
    numbers = ("%", "P %", "rank")
    columns = [column for name in lenses for column in (f"{name} says".strip(), *numbers)]
    grid = table("layer", *columns, right=("layer", *numbers))
    for layer in range(len(next(iter(lenses.values())).top)):
        cells: list[str | Text] = [str(layer)]
        for lens in lenses.values():
            rank = int(lens.rank[layer, -1])
            style = "bold green" if rank == 1 else ""
            cells += [
                Text(repr(lens.top[layer][-1]), style=style, no_wrap=True, overflow="ellipsis"),
                _number(lens.top_probability[layer, -1]),
                Text(_number(lens.probability[layer, -1]), style=style),
                Text(f"{rank:,}", style=style),
            ]
        grid.add_row(*cells)
    grid.padding = (0, 1, 0, 0)  # so that two models fit on a screen of 80 columns
    return grid


def _number(probability: Tensor) -> str:
    return percent(float(probability)).removesuffix("%")
