"""`rebind moments`: collect the second moments of old keys ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli.options import ModelOptions, as_typed, examples, option, parse_layers
from rebind.cli.session import load_editor
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import seconds, size, table
from rebind.cli.ui.terminal import Terminal
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

EXAMPLES = examples(
    "rebind moments",
    "rebind moments --model Qwen/Qwen3-0.6B --corpus wiki.txt --moment-tokens 1000000 --layers 4-8",
    note="An interrupted run continues where it stopped. An edit uses the result if it has the same --corpus and "
    "--moment-tokens.",
)


def moments(
    layers: Annotated[
        str | None,
        option("LIST", "Layers such as 2,3,4 or 2-6, or all.", default="the layers that memit edits"),
    ] = None,
    *,
    source: ModelOptions,
    terminal: Terminal,
) -> None:
    """Collect the second moments of a model's old keys once, so that edits do not wait for them."""
    chosen = None if layers == "all" else parse_layers(layers)
    phases = Phases(terminal)
    with phases.shown():
        editor = load_editor(source, phases)
        rows = _collect(editor, _sites(editor, chosen, everything=layers == "all"), phases)
    made = table("site", "tokens", "d_k", "rank", "file", right=("tokens", "d_k", "rank"))
    for row in rows:
        file = f"{'cached' if row['cached'] else 'new'}, {size(row['bytes'])}"
        made.add_row(row["site"], f"{row['tokens']:,}", str(row["d_k"]), f"{row['rank']:.0f}", file)
    terminal.print(made)
    terminal.hint("rank: the number of directions that the keys spread over, tr(C)² / tr(C²)")
    terminal.hint(seconds(phases.total_seconds))
    terminal.suggest("used by", f"rebind edit … {as_typed(replace(source, moment_tokens=editor.moment_tokens))}")
    document = {
        "model": editor.language_model.name,
        "fingerprint": editor.fingerprint,
        "corpus": editor.corpus.digest,
        "tokens": editor.moment_tokens,
        "moments": rows,
        "seconds": phases.seconds,
    }
    terminal.result(document, "\n".join(row["path"] for row in rows))


def _sites(editor: Editor, layers: tuple[int, ...] | None, *, everything: bool) -> list[str]:
    depth = len(editor.sites)
    chosen = range(depth) if everything else layers or editor.settings("memit")[1].layers
    if missing := [layer for layer in chosen if layer >= depth]:
        raise InputError(f"The model has no layer {missing[0]}", expected=f"0 to {depth - 1}", code="unknown_layer")
    return [editor.sites[layer].name for layer in chosen]


def _collect(editor: Editor, names: list[str], phases: Phases) -> list[dict[str, Any]]:
    from rebind.edit.moments.collect import collect
    from rebind.models.sites import module_at

    phases.start("moments")
    recipe = editor.recipe()
    cached = {name: recipe.path(name).exists() for name in names}
    modules = [(name, module_at(editor.model, name)) for name in names]
    found = collect(
        editor.trunk, editor.tokenizer, editor.language_model.start, modules, recipe, on_tokens=phases.collect
    )
    rows = []
    for name in names:
        mean, path = found[name].mean(), recipe.path(name)
        rows.append(
            {
                "site": name,
                "tokens": found[name].tokens,
                "d_k": len(mean),
                "rank": float(mean.trace().square() / mean.square().sum()),
                "cached": cached[name],
                "path": str(path),
                "bytes": path.stat().st_size,
            }
        )
    return rows
