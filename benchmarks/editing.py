"""Quality and speed of editing on CounterFact records: every method, any number of facts.

    python -m benchmarks.editing --facts counterfact.json --text held.txt --n 100 600 1000 --methods memit emmet

Facts are those of the file whose true object the unedited model prefers to the new one. Each row edits the
base model with the method's defaults, measures, and undoes the edit. Scores are those of the papers: ES, PS
and NS compare length-normalised likelihoods of the new and the true object on the prompt, the paraphrases and
the neighbours, S is their harmonic mean, EA and PA ask for every target token to come first. Perplexity is on
the given text. JSON goes to benchmarks/results/editing.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, machine
from rebind.edit.editor import Editor, Progress
from rebind.edit.facts import Fact
from rebind.edit.ledger import Ledger
from rebind.edit.reading import read_facts


@dataclass(frozen=True)
class Result:
    """One edit, measured."""

    method: str
    facts: int
    seconds: float  # everything but the moments, which are computed once a model
    phases: dict[str, float]
    lam: float | None
    ES: float
    PS: float
    NS: float
    S: float
    EA: float
    PA: float
    perplexity: float
    memory_gib: float  # peak on the GPU; 0 on a CPU


class Clock(Progress):
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        object.__setattr__(self, "spent", {})
        object.__setattr__(self, "_now", (None, 0.0))
        super().__init__(phase=self._enter)

    def _enter(self, name: str | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, (before, begin) = time.perf_counter(), self._now  # type: ignore[attr-defined]
        if before is not None:
            self.spent[before] = self.spent.get(before, 0.0) + now - begin  # type: ignore[attr-defined]
        object.__setattr__(self, "_now", (name, now))


def prompts_of(facts: Sequence[Fact], texts: Sequence[Sequence[str]], target: str) -> list[Fact]:
    """Facts that ask each text for the new ("target") or the true ("old") object; the subject is a place holder."""
    asked = []
    for fact, rows in zip(facts, texts, strict=True):
        for text in rows:
            escaped = text.strip().replace("{", "{{").replace("}", "}}")
            first, _, rest = escaped.partition(" ")
            asked.append(Fact("{} " + rest if rest else "{}", first, getattr(fact, target)))
    return asked


def compare(editor: Editor, facts: Sequence[Fact], texts: Sequence[Sequence[str]]) -> tuple[float, float]:
    """How often the new object is likelier than the true one, and how often the new one is said."""
    new = editor.score(prompts_of(facts, texts, "target"))
    true = editor.score(prompts_of(facts, texts, "old"))
    likelier = statistics.fmean(n.nll < t.nll for n, t in zip(new, true, strict=True))
    return likelier, statistics.fmean(n.exact for n in new)


def measure(editor: Editor, facts: Sequence[Fact]) -> dict[str, float]:
    ES, EA = compare(editor, facts, [[fact.text] for fact in facts])
    PS, PA = compare(editor, facts, [fact.paraphrases[:1] for fact in facts])
    disturbed, _ = compare(editor, facts, [fact.neighbours[:10] for fact in facts])
    NS = 1 - disturbed
    S = 3 / sum(1 / max(score, 1e-9) for score in (ES, PS, NS))
    return {"ES": ES, "PS": PS, "NS": NS, "S": S, "EA": EA, "PA": PA}


@torch.no_grad()
def perplexity(editor: Editor, text: str, tokens: int = 50_000, window: int = 512) -> float:
    ids = editor.tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    rows = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    start = torch.tensor(editor.loaded.start or (ids[0],)).expand(len(rows), -1)
    total = 0.0
    for part in torch.cat([start, rows], dim=1).split(16):
        part = part.to(editor.trunk.device)
        said = torch.log_softmax(editor.model(part).logits[:, :-1].float(), dim=-1)
        total -= float(said.gather(-1, part[:, 1:, None]).sum())
    return math.exp(total / rows.numel())


def known(editor: Editor, facts: Sequence[Fact]) -> list[Fact]:
    """Facts with everything that is measured, whose true object the model prefers; of one prompt's the first."""
    first = {
        fact.text.casefold(): fact for fact in reversed(facts) if fact.old and fact.paraphrases and fact.neighbours
    }
    whole = [fact for fact in facts if first.get(fact.text.casefold()) is fact]
    new = editor.score(prompts_of(whole, [[fact.text] for fact in whole], "target"))
    true = editor.score(prompts_of(whole, [[fact.text] for fact in whole], "old"))
    return [fact for fact, n, t in zip(whole, new, true, strict=True) if t.nll < n.nll]


def run(editor: Editor, facts: Sequence[Fact], method: str, text: str) -> Result:
    clock = Clock()
    editor.progress = clock
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    edit = editor.rewrite_many(list(facts), method=method)
    clock._enter(None)
    seconds = time.perf_counter() - begin - clock.spent.get("moments", 0.0)  # type: ignore[attr-defined]
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    scores = measure(editor, facts)
    held = perplexity(editor, text)
    editor.undo(edit.id)
    lam: Any = edit.settings["lam"]
    return Result(
        method=method,
        facts=len(facts),
        seconds=seconds,
        phases=dict(clock.spent),  # type: ignore[attr-defined]
        lam=float(lam),
        perplexity=held,
        memory_gib=memory,
        **scores,
    )


def one_at_a_time(editor: Editor, facts: Sequence[Fact], method: str, text: str) -> Result:
    """Each fact alone, undone before the next: the protocol of ROME's paper."""
    alone = [run(editor, [fact], method, text[:20_000]) for fact in facts]
    mean = {name: statistics.fmean(getattr(row, name) for row in alone) for name in ("ES", "PS", "NS", "EA", "PA")}
    mean["S"] = 3 / sum(1 / max(mean[name], 1e-9) for name in ("ES", "PS", "NS"))
    return Result(
        method=f"{method}, one at a time",
        facts=len(facts),
        seconds=statistics.median(row.seconds for row in alone),
        phases={},
        lam=None,
        perplexity=statistics.fmean(row.perplexity for row in alone),
        memory_gib=max(row.memory_gib for row in alone),
        **mean,
    )


def show(rows: Sequence[Result]) -> None:
    table = Table(title="editing", title_justify="left", title_style="bold")
    for column in ("method", "facts", "seconds", "ES", "PS", "NS", "S", "EA", "PA", "perplexity", "GiB"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        scores = (f"{getattr(row, name):.3f}" for name in ("ES", "PS", "NS", "S", "EA", "PA"))
        table.add_row(
            row.method, str(row.facts), f"{row.seconds:.2f}", *scores, f"{row.perplexity:.2f}", f"{row.memory_gib:.1f}"
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", required=True, help="CounterFact records, nested or flat")
    parser.add_argument("--text", required=True, help="held-out text for perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, nargs="+", default=[100])
    parser.add_argument("--methods", nargs="+", default=["memit"])
    parser.add_argument("--alone", type=int, default=0, help="also ROME on so many facts, one at a time")
    parser.add_argument("--out", default=str(RESULTS / "editing.json"))
    options = parser.parse_args()
    editor = Editor(options.model, device=options.device)
    text = Path(options.text).read_text(encoding="utf-8")
    facts = known(editor, list(read_facts(options.facts, skip_bad=True)))
    before = measure(editor, facts[: min(options.n)])
    held = perplexity(editor, text)
    base = Result("before", min(options.n), 0.0, {}, None, perplexity=held, memory_gib=0.0, **before)
    run(editor, facts[:2], options.methods[0], text)  # moments, contexts and warm-up
    rows = [base]
    for method in options.methods:
        for n in options.n:
            if n <= len(facts):
                rows.append(run(editor, facts[:n], method, text))
                show(rows[-1:])
    if options.alone:
        rows.append(one_at_a_time(editor, facts[: options.alone], "rome", text))
    editor.ledger = Ledger.in_memory(editor.fingerprint)
    show(rows)
    content = {"machine": machine(), "model": editor.loaded.name, "rows": [asdict(row) for row in rows]}
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
