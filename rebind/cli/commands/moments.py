"""`rebind moments`: learn ahead of time what a model's old keys look like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import options
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import seconds, size, table
from rebind.cli.ui.terminal import screen
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

EXAMPLES = """[bold]Examples[/bold]

rebind moments smollm2

rebind moments Qwen/Qwen3-0.6B --corpus wiki.txt --tokens 1000000 --layers 4-8

Stopped with Ctrl-C, it goes on where it was when it is run again. An edit uses what was computed if it is given the same --corpus and --moment-tokens."""  # noqa: E501


def moments(
    model: Annotated[str, typer.Argument(help="smollm2 (built in), a Hub id, a model folder or a GGUF file.")],
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="TEXT", help="Text file, documents parted by blank lines. Default: the model's samples."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many tokens to read. Default: what an edit would.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="As 2,3,4 or 2-6, or all. Default: those that memit writes.")
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Learn once what a model's old keys look like, so that edits need not wait for it."""
    with screen(as_json, quiet, debug) as shown:
        picked = None if layers == "all" else options.parse_layers(layers)
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, None, device, dtype, corpus=corpus, moment_tokens=tokens)
            editor = open_editor(wanted, bars, base_only=True)
            rows = _collect(editor, _layers(editor, picked, everything=layers == "all"), bars)
        made = table("site", "tokens", "width", "rank", "file", right=("tokens", "width", "rank"))
        for row in rows:
            found = "cached" if row["cached"] else "new"
            described = f"{found}, {size(row['bytes'])}"
            made.add_row(row["site"], f"{row['tokens']:,}", str(row["width"]), f"{row['rank']:.0f}", described)
        shown.show(made)
        shown.hint("rank: how many directions the keys spread over, tr(C)² / tr(C²)")
        shown.hint(seconds(sum(bars.seconds.values())))
        used = options.typed(model, device=device, dtype=dtype, corpus=corpus, moment_tokens=editor.moment_tokens)
        shown.suggest("used by", f"rebind edit …{used}")
        shown.result(
            {
                "model": editor.loaded.name,
                "fingerprint": editor.fingerprint,
                "corpus": editor.corpus.digest,
                "tokens": editor.moment_tokens,
                "moments": rows,
                "seconds": bars.seconds,
            },
            "\n".join(row["path"] for row in rows),
        )


def _layers(editor: Editor, picked: tuple[int, ...] | None, *, everything: bool) -> tuple[int, ...]:
    depth = len(editor.sites)
    if everything:
        return tuple(range(depth))
    chosen = picked or editor.settings("memit")[1].layers
    if outside := [layer for layer in chosen if layer >= depth]:
        raise InputError(f"layers {outside} are not there, expected some of 0 to {depth - 1}: choose among these")
    return chosen


def _collect(editor: Editor, layers: tuple[int, ...], bars: Bars) -> list[dict[str, Any]]:
    from rebind.edit.moments.collect import collect
    from rebind.models.sites import module_at

    bars.phase("moments")
    recipe = editor.recipe()
    names = [editor.sites[layer].name for layer in layers]
    there = {name: recipe.path(name).exists() for name in names}
    places = [(name, module_at(editor.model, name)) for name in names]
    found = collect(editor.trunk, editor.tokenizer, editor.loaded.start, places, recipe, on_tokens=bars.moments)
    rows = []
    for name in names:
        mean, path = found[name].mean(), recipe.path(name)
        rows.append(
            {
                "site": name,
                "tokens": found[name].tokens,
                "width": len(mean),
                "rank": float(mean.trace().square() / mean.square().sum()),
                "cached": there[name],
                "path": str(path),
                "bytes": path.stat().st_size,
            }
        )
    return rows
