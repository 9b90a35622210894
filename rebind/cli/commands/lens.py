"""`rebind lens`: what each layer would say if the model ended there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rebind.cli import options
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import table
from rebind.cli.ui.terminal import Screen, screen, strict_json
from rebind.edit.facts.fact import require_text
from rebind.edit.wording import percent
from rebind.files import require_writable, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from rebind.analysis.lens import Lens

EXAMPLES = """[bold]Examples[/bold]

rebind lens "The capital of France is"

rebind lens "The capital of France is" --target Rome --out lens/

With active edits in the ledger, the base model and the edited one stand side by side."""


def lens(
    prompt: Annotated[str, typer.Argument(help="What to look at.")],
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The answer to look for. Default: what the model says.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write lens.png and lens.json here.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Read every layer through the final norm and the head: where does the answer appear?"""
    with screen(as_json, quiet, debug) as shown:
        require_text("a prompt", prompt)
        if target is not None:
            require_text("--target", target)
        if out is not None:
            require_writable(out, "name another with --out")
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, ledger, device, dtype, corpus=corpus, moment_tokens=moment_tokens)
            editor = open_editor(wanted, bars)
            bars.phase("asking")
            active = [edit.id for edit in editor.ledger.active]
            edited = _looked(editor, prompt, target)
            base = edited
            if active:
                with editor.lifted():
                    base = _looked(editor, prompt, target, answer_id=edited.answer_id)
        document = {
            "model": editor.loaded.name,
            "fingerprint": editor.fingerprint,
            "active": active,
            "base": base.to_json(),
            "edited": edited.to_json(),
        }
        _show(shown, base, edited if active else None)
        files = _written(base, edited, document, out)
        for file in files:
            shown.hint(f"wrote {file}")
        shown.result(
            document | {"files": [str(file) for file in files]}, "" if edited.appears is None else str(edited.appears)
        )


def _looked(editor: Any, prompt: str, target: str | None, **options: Any) -> Lens:
    from rebind.analysis.lens import look

    return look(editor.trunk, editor.tokenizer, editor.loaded.start, prompt, target, **options)


def _written(base: Lens, edited: Lens, document: dict[str, Any], out: Path | None) -> list[Path]:
    if out is None:
        return []
    from rebind.analysis.plots import draw_lens

    title = base.question.text
    files = [draw_lens(edited, out / "lens.png", title=f"{title} (edited)" if edited is not base else title)]
    if edited is not base:
        files.append(draw_lens(base, out / "lens-base.png", title=f"{title} (base)"))
    write_atomically(out / "lens.json", strict_json(document).encode())
    return [*files, out / "lens.json"]


def _table(both: list[tuple[str, Lens]]) -> Table:
    """A row a layer. Numbers stay whole; a token gives way, and shows that it does."""
    numbers = ("%", "P %", "rank")
    made = table(
        "layer", *(head for name, _ in both for head in (f"{name} says".strip(), *numbers)), right=("layer", *numbers)
    )
    for layer in range(len(both[0][1].top)):
        cells: list[str | Text] = [str(layer)]
        for _, one in both:
            rank = int(one.rank[layer, -1])
            style = "bold green" if rank == 1 else ""
            cells += [
                Text(repr(one.top[layer][-1]), style=style, no_wrap=True, overflow="ellipsis"),
                _bare(one.top_probability[layer, -1]),
                Text(_bare(one.probability[layer, -1]), style=style),
                Text(f"{rank:,}", style=style),
            ]
        made.add_row(*cells)
    made.padding = (0, 1, 0, 0)  # two side by side on a screen of 80
    return made


def _bare(probability: Tensor) -> str:
    return percent(float(probability)).removesuffix(" %")


def _show(shown: Screen, base: Lens, edited: Lens | None) -> None:
    both = [("", base)] if edited is None else [("base", base), ("edited", edited)]
    shown.show(Text(base.question.text, style="bold"))
    shown.hint(f"says: its first choice, and how likely; P: how likely {base.answer!r} is, and its rank")
    shown.show(_table(both))
    for name, one in both:
        top = float(one.probability.max())
        which = f"{name}: " if edited else ""
        shown.show(f"{which}probability of {one.answer!r} after each token, by layer (full is {percent(top)})")
        shown.show(*heatmap(one.question.labels, one.probability.mT.tolist(), "lens", width=shown.out.width, top=top))
        first = one.appears
        shown.hint(f"first choice from layer {first} on" if first is not None else "not the first choice at the end")
