"""`rebind ledger compact`: squash old edits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rebind.cli import options as opt
from rebind.cli.commands.learn import is_terminal
from rebind.cli.session import find_ledger
from rebind.cli.ui import Terminal
from rebind.cli.ui.tables import counted
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.ledger.compact import Compaction

COMPACT_EXAMPLES = opt.examples(
    "rebind ledger compact --keep-last 100",
    "rebind ledger compact --before e0500 --yes",
    note="The edits before ID, or all but the last N, are stored together. Active edits among them can no longer be "
    "undone one by one, and undone edits are removed. Facts, keys and values stay, so the model and its exports do not "
    "change, to the last bit. The command shows what it will do and asks for confirmation. To be able to go back, copy "
    "the folder first.",
)


def compact(
    before: Annotated[str | None, opt.value("ID", "Compact the edits before this one.")] = None,
    keep_last: Annotated[int | None, opt.value("N", "Compact all edits but the last N.")] = None,
    yes: Annotated[bool, opt.flag("--yes", "Compact without asking.", "-y")] = False,
    *,
    source: opt.LedgerOptions,
    terminal: Terminal,
) -> None:
    """Squash old edits that need not be undone one by one any more; the model does not change."""
    folder = find_ledger(source)
    from rebind.edit.ledger.ledger import Ledger

    ledger = Ledger.open(folder)
    plan = ledger.compact(before=before, keep_last=keep_last, dry_run=True)
    if not yes and not _is_confirmed(terminal, plan):
        terminal.hint("nothing was changed")
        return
    compaction = ledger.compact(before=before, keep_last=keep_last)
    after = compaction.bytes_after or 0
    if yes:
        terminal.print(_consequences(compaction, "can no longer be undone one by one", "gone"))
    terminal.print(f"log and tensors: {_size(compaction.bytes_before)} before, {_size(after)} now")
    document = {"ledger": str(folder), "sealed": list(compaction.sealed), "dropped": list(compaction.dropped)}
    terminal.result({**document, "bytes_before": compaction.bytes_before, "bytes_after": after}, str(after))


def _is_confirmed(terminal: Terminal, plan: Compaction) -> bool:
    """Print the consequences of a compaction, and ask for confirmation."""
    if terminal.quiet or terminal.as_json or not is_terminal():
        raise InputError(
            "The compaction cannot be confirmed without a terminal",
            advice="Compact without asking with {yes}",
            settings={"yes": True},
            code="cannot_ask",
        )
    terminal.print(_consequences(plan, "will no longer be undoable one by one", "will be gone"))
    return terminal.out.input("Compact them? [y/N] ", markup=False).strip().lower() in ("y", "yes")


def _consequences(plan: Compaction, sealed: str, dropped: str) -> str:
    """Return a description of what a compaction gives up."""
    lines = []
    if plan.sealed:
        span = f"{plan.sealed[0]} to {plan.sealed[-1]}" if len(plan.sealed) > 1 else plan.sealed[0]
        lines.append(
            f"{counted(len(plan.sealed), 'active edit')} ({span}) {sealed}; scores and versions go, facts stay"
        )
    if plan.dropped:
        lines.append(f"{counted(len(plan.dropped), 'undone edit')} {dropped}")
    return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"
