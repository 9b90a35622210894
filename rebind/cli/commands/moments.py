"""`rebind moments`: collect the second moments of old keys ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from rich.filesize import decimal

from rebind.cli import options as opt
from rebind.cli.session import describe, load_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import seconds, table
from rebind.edit import DEFAULT_METHOD

EXAMPLES = opt.examples(
    "rebind moments",
    "rebind moments --model Qwen/Qwen3-0.6B --corpus wiki.txt --moment-tokens 1000000 --method memit --layers 4-8",
    note="An interrupted run continues where it stopped. An edit uses the result if it has the same --corpus and "
    "--moment-tokens.",
)


def moments(
    method: opt.Method = DEFAULT_METHOD,
    layers: Annotated[
        str | None, opt.value("LIST", "Layers to collect for, such as 2,3,4 or 2-6, or all.", default="the method's")
    ] = None,
    *,
    source: opt.ModelOptions,
    terminal: Terminal,
) -> None:
    """Collect the second moments of old keys once, so that edits by a method do not wait for them."""
    from rebind.edit.methods import get_method

    dense = get_method(method).dense
    chosen_layers = None if layers == "all" else opt.parse_layers(layers)
    with Phases(terminal) as phases:
        editor = load_editor(source, phases)
        phases.begin("moments")
        one_or_several = method if chosen_layers is None else "memit"  # which takes any number of layers
        numbers = editor.settings(one_or_several, layers=chosen_layers).layers
        layer_sites = editor.sites if layers == "all" else [editor.sites[number] for number in numbers]
        sites = [site.block if dense else site.name for site in layer_sites]
        cached = {site: editor.moments.path(site).exists() for site in sites}
        collected = editor.moments.collect(sites)
        if not terminal.writes:
            return
        rows = []
        for site, moment in collected.items():
            mean, path = moment.mean(), editor.moments.path(site)
            row: dict[str, Any] = {"site": site, "tokens": moment.tokens, "d_k": len(mean), "cached": cached[site]}
            row["rank"] = float(mean.trace().square() / mean.square().sum())
            rows.append(row | {"path": str(path), "bytes": path.stat().st_size})
    grid = table("site", "tokens", "d_k", "rank", "file", right=("tokens", "d_k", "rank"))
    for row in rows:
        file = f"{'cached' if row['cached'] else 'new'}, {decimal(row['bytes'])}"
        grid.add_row(row["site"], f"{row['tokens']:,}", str(row["d_k"]), f"{row['rank']:.0f}", file)
    terminal.print(grid)
    terminal.hint("rank: the effective number of directions of the keys, tr(C)² / tr(C²)")
    terminal.hint(seconds(sum(phases.seconds.values())))
    options = opt.as_typed(replace(source, moment_tokens=editor.moments.tokens))
    terminal.suggest("used by", f"rebind edit … --method {method} {options}")
    document = {**describe(editor), **editor.moments.source, "moments": rows, "seconds": phases.seconds}
    terminal.result(document, "\n".join(row["path"] for row in rows))
