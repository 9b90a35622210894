"""`rebind consolidate`: move facts from the dense memory into the weights."""

from __future__ import annotations

from typing import Annotated

from rebind.cli import options as opt
from rebind.cli.commands.export import open_edited
from rebind.cli.session import describe
from rebind.cli.ui import Phases, Terminal, tables

EXAMPLES = opt.examples(
    "rebind consolidate",
    "rebind consolidate --budget 100 --batch 20",
    note="A fact moves only if the weights then say it wherever the dense memory said it, and while the guard is "
    "content with drift and growth. What does not fit stays. The result is one edit, and can be undone.",
)


def consolidate(
    budget: Annotated[
        int | None, opt.value("N", "Move at most N facts, the oldest first.", default="all", min=1)
    ] = None,
    batch: Annotated[int, opt.value("N", "Ask after every N subjects.", min=1)] = 100,
    method: opt.Method = "recursive",
    layers: opt.Layers = None,
    lam: opt.Lambda = None,
    *,
    source: opt.EditorOptions,
    terminal: Terminal,
) -> None:
    """Move facts from the dense memory into the weights, as far as they fit."""
    from rebind.edit.methods import get_method

    get_method(method)
    chosen_layers = opt.parse_layers(layers)
    with Phases(terminal) as phases:
        editor = open_edited(source, phases)
        result = editor.consolidate(budget, batch=batch, method=method, layers=chosen_layers, lam=lam)
        report = describe(editor)
    grid = tables.table("", "fact")
    moves = [("moved", fact) for fact in result.moved] + [("stayed", fact) for fact in result.stayed]
    for state, fact in moves[: tables.LISTED]:
        grid.add_row(state, f"{fact.text} → {fact.target}")
    rows = editor.edited.dense.rows()
    summary = [
        ("moved", f"{tables.counted(len(result.moved), 'fact')} into the weights"),
        ("stayed", f"{tables.counted(len(result.stayed), 'fact')}" + (f": {result.reason}" if result.reason else "")),
        ("memory", f"{tables.counted(rows, 'row')} left"),
        *(tables.drift_rows(result.edit.scores) if result.edit else []),
        ("time", tables.seconds(sum(phases.seconds.values()))),
    ]
    terminal.print(grid, tables.pairs(summary))
    id = None if result.edit is None else result.edit.id
    if id is not None:
        terminal.suggest("undo", opt.command_line("ledger undo", id, options=opt.as_typed(source)))
    facts = {"moved": result.moved, "stayed": result.stayed}
    report |= {name: [fact.to_json() for fact in some] for name, some in facts.items()}
    terminal.result(report | {"id": id, "reason": result.reason, "rows": rows, "seconds": phases.seconds}, id or "")
