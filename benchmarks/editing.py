"""Quality and speed of editing on CounterFact records: every method, any number of facts.

    python -m benchmarks.editing --facts counterfact.json --text held.txt --n 100 600 1000 --methods memit emmet
    python -m benchmarks.editing --facts counterfact.json --text held.txt --made 10000

Facts are those of the file whose true object the unedited model prefers to the new one. Each row edits the
base model with the method's defaults (or with what --layers, --lam and --steps say), measures, and undoes the
edit. Scores are those of the papers: ES, PS and NS compare length-normalised likelihoods of the new and the true
object on the prompt, the paraphrases and the neighbours, S is their harmonic mean, EA and PA ask for every target
token to come first. Perplexity is on the given text; drift is KL(base ‖ edited) of the next token on unrelated
prompts, growth the largest ‖ΔW‖/‖W‖. With --made, neighbours of the records are facts too (benchmarks/made.py):
these rows are for time and memory, of scores they have ES and EA. JSON goes to benchmarks/results/editing.json.

Of the phases, *keys* are the subjects' keys and states at the edited layers, *checks* the facts' scores before and
after. With --repeats an edit is made and undone so many times and the last one told: the first loads kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.made import made_facts
from benchmarks.report import RESULTS
from rebind.bench.machine import machine
from rebind.cli.options import parse_layers
from rebind.edit import spread
from rebind.edit.editor import Editor, Progress
from rebind.edit.edits import Edit
from rebind.edit.facts import Fact
from rebind.edit.methods import METHODS
from rebind.edit.reading import read_facts
from rebind.edit.scores import FactScore, score_facts
from rebind.edit.subjects import Subjects
from rebind.evals.records import read_records
from rebind.files import write_atomically

SCORES = ("ES", "PS", "NS", "S", "EA", "PA")
PHASES = ("contexts", "moments", "targets", "keys", "solve", "writing", "checks")
GPU_TOKENS = 65_536  # asked at once


@dataclass(frozen=True)
class Result:
    """One edit, measured."""

    method: str
    facts: int
    made: bool  # whether neighbours of records were made facts too: then ES and EA alone are given
    seconds: float  # everything but the moments, which are computed once a model
    phases: dict[str, float]
    layers: tuple[int, ...]
    lam: float | None
    scores: dict[str, float | None]  # by the names in SCORES
    perplexity: float
    drift: float  # nats
    growth: float
    memory_gib: float  # peak: of the GPU, or of the process on a CPU


@dataclass(frozen=True)
class Choices:
    """What is not left to the method's defaults."""

    layers: tuple[int, ...] | None = None
    lam: float | None = None
    steps: int | None = None


class Clock(Progress):
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        object.__setattr__(self, "spent", {})
        object.__setattr__(self, "_now", (None, 0.0))
        super().__init__(phase=self.enter)

    def enter(self, name: str | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, (before, begin) = time.perf_counter(), self._now  # type: ignore[attr-defined]
        if before is not None:
            self.spent[before] = self.spent.get(before, 0.0) + now - begin  # type: ignore[attr-defined]
        object.__setattr__(self, "_now", (name, now))

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Inside, another phase; the one before goes on after."""
        before = self._now[0]  # type: ignore[attr-defined]
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)


@contextmanager
def told_apart(editor: Editor, clock: Clock) -> Iterator[None]:
    """The editor counts keys to the solve, and the facts' scores to what goes on; here they are phases."""

    class Timed(Subjects):
        def keys(self, layer: int, module: nn.Module) -> Tensor:
            with clock.aside("keys"):
                return super().keys(layer, module)

        def states(self, layer: int) -> Tensor:
            with clock.aside("keys"):
                return super().states(layer)

    own = editor.score

    def score(facts: Sequence[Fact]) -> list[FactScore]:
        with clock.aside("checks"):
            return own(facts)

    with patch.object(spread, "Subjects", Timed), patch.object(editor, "score", score):
        yield


def prompts_of(facts: Sequence[Fact], texts: Sequence[Sequence[str]], target: str) -> list[Fact]:
    """Facts that ask each text for the new ("target") or the true ("old") object; the subject is a place holder."""
    asked = []
    for fact, rows in zip(facts, texts, strict=True):
        for text in rows:
            escaped = text.strip().replace("{", "{{").replace("}", "}}")
            first, _, rest = escaped.partition(" ")
            asked.append(Fact("{} " + rest if rest else "{}", first, getattr(fact, target)))
    return asked


def ask(editor: Editor, facts: Sequence[Fact]) -> list[FactScore]:
    """`Editor.score`, in fewer and larger passes on a GPU."""
    if editor.trunk.device.type != "cuda":
        return editor.score(facts)
    start = editor.loaded.start
    return score_facts(editor.trunk, editor.tokenizer, start, facts, chat=editor.chat, tokens_at_once=GPU_TOKENS)


def compare(editor: Editor, facts: Sequence[Fact], texts: Sequence[Sequence[str]]) -> tuple[float, float]:
    """How often the new object is likelier than the true one, and how often the new one is said."""
    new = ask(editor, prompts_of(facts, texts, "target"))
    true = ask(editor, prompts_of(facts, texts, "old"))
    likelier = statistics.fmean(n.nll < t.nll for n, t in zip(new, true, strict=True))
    return likelier, statistics.fmean(n.exact for n in new)


def measure(editor: Editor, facts: Sequence[Fact], made: bool = False) -> dict[str, float | None]:
    ES, EA = compare(editor, facts, [[fact.text] for fact in facts])
    if made:
        return {"ES": ES, "PS": None, "NS": None, "S": None, "EA": EA, "PA": None}
    PS, PA = compare(editor, facts, [fact.paraphrases[:1] for fact in facts])
    disturbed, _ = compare(editor, facts, [fact.neighbours[:10] for fact in facts])
    NS = 1 - disturbed
    return {"ES": ES, "PS": PS, "NS": NS, "S": harmonic(ES, PS, NS), "EA": EA, "PA": PA}


def harmonic(*scores: float) -> float:
    return len(scores) / sum(1 / max(score, 1e-9) for score in scores)


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
    new = ask(editor, prompts_of(whole, [[fact.text] for fact in whole], "target"))
    true = ask(editor, prompts_of(whole, [[fact.text] for fact in whole], "old"))
    return [fact for fact, n, t in zip(whole, new, true, strict=True) if t.nll < n.nll]


@dataclass(frozen=True)
class Cost:
    """What an edit took."""

    seconds: float
    phases: dict[str, float]
    memory_gib: float


def write(editor: Editor, facts: Sequence[Fact], method: str, chosen: Choices) -> tuple[Edit, Cost]:
    """Edit, phase by phase."""
    clock = Clock()
    editor.progress = clock
    search = editor.settings(method, facts=len(facts))[1].targets
    search = search if chosen.steps is None else replace(search, steps=chosen.steps)
    lam = None if METHODS[method].exact else chosen.lam
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with told_apart(editor, clock):
        edit = editor.rewrite_many(list(facts), method=method, layers=chosen.layers, lam=lam, targets=search)
    clock.enter(None)
    seconds = time.perf_counter() - begin - clock.spent.get("moments", 0.0)  # type: ignore[attr-defined]
    editor.progress = Progress()
    return edit, Cost(seconds, dict(clock.spent), peak_gib(editor))  # type: ignore[attr-defined]


def run(
    editor: Editor,
    facts: Sequence[Fact],
    method: str,
    text: str,
    chosen: Choices,
    *,
    made: bool = False,
    repeats: int = 1,
) -> Result:
    """Edit, measure, undo."""
    for _ in range(repeats - 1):
        edit, _ = write(editor, facts, method, chosen)
        editor.undo(edit.id)
    edit, cost = write(editor, facts, method, chosen)
    scores = measure(editor, facts, made)
    held, drift = perplexity(editor, text), editor.drift()
    editor.undo(edit.id)
    settings: Any = edit.settings
    return Result(
        method=method,
        facts=len(facts),
        made=made,
        seconds=cost.seconds,
        phases=cost.phases,
        layers=tuple(settings["layers"]),
        lam=float(settings["lam"]),
        scores=scores,
        perplexity=held,
        drift=drift.kl,
        growth=drift.growth,
        memory_gib=cost.memory_gib,
    )


def peak_gib(editor: Editor) -> float:
    """Of the GPU since it was last reset, or of this process since it began."""
    if editor.trunk.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def one_at_a_time(editor: Editor, facts: Sequence[Fact], method: str, text: str, chosen: Choices) -> Result:
    """Each fact alone, undone before the next: the protocol of ROME's paper."""
    alone = [run(editor, [fact], method, text[:20_000], chosen) for fact in facts]
    mean: dict[str, Any] = {name: statistics.fmean(row.scores[name] or 0.0 for row in alone) for name in SCORES}
    mean["S"] = harmonic(mean["ES"], mean["PS"], mean["NS"])
    return replace(
        alone[0],
        method=f"{method}, one at a time",
        facts=len(facts),
        seconds=statistics.median(row.seconds for row in alone),
        phases={},
        lam=None,
        scores=mean,
        perplexity=statistics.fmean(row.perplexity for row in alone),
        drift=statistics.fmean(row.drift for row in alone),
        growth=max(row.growth for row in alone),
        memory_gib=max(row.memory_gib for row in alone),
    )


def show(rows: Sequence[Result]) -> None:
    """Two tables: what became of the facts and of the model, and where the time went."""
    made = any(row.made for row in rows)
    note = "made: neighbours of records are facts too, for time and memory; ES and EA alone are given" if made else None
    quality = ("method", "facts", *SCORES, "perplexity", "drift", "growth")
    table = Table(title="editing", title_justify="left", title_style="bold", caption=note, caption_justify="left")
    cost = Table(title="seconds", title_justify="left", title_style="bold")
    for grid, columns in ((table, quality), (cost, ("method", "facts", "layers", "λ", "all", *PHASES, "peak GiB"))):
        for column in columns:
            grid.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        name, count = row.method + (", made" if row.made else ""), str(row.facts)
        scores = ("" if row.scores[score] is None else f"{row.scores[score]:.3f}" for score in SCORES)
        table.add_row(name, count, *scores, f"{row.perplexity:.2f}", f"{row.drift:.4f}", f"{row.growth:.3f}")
        if row.method != "before":
            spent = (f"{row.phases[phase]:.2f}" if phase in row.phases else "" for phase in PHASES)
            where, lam = ",".join(map(str, row.layers)), "" if row.lam is None else f"{row.lam:.0f}"
            cost.add_row(name, count, where, lam, f"{row.seconds:.2f}", *spent, f"{row.memory_gib:.1f}")
    console = Console(width=120)
    console.print(table)
    if cost.row_count:
        console.print(cost)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", required=True, help="CounterFact records, nested or flat")
    parser.add_argument("--text", required=True, help="held-out text for perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, nargs="*", default=[100], help="numbers of facts")
    parser.add_argument("--methods", nargs="+", default=["memit"])
    parser.add_argument("--layers", type=parse_layers, help="as 1,2,3 or 1-5; default: the method's for the model")
    parser.add_argument("--lam", type=float, help="λ; default: from the keys")
    parser.add_argument("--steps", type=int, help="most steps of the search; default: the method's for the model")
    parser.add_argument("--seed", type=int, default=0, help="of contexts and of sampled moments")
    parser.add_argument("--made", type=int, nargs="*", default=[], help="also so many facts, of neighbours too")
    parser.add_argument("--alone", type=int, default=0, help="also ROME on so many facts, one at a time")
    parser.add_argument("--repeats", type=int, default=1, help="edits a row, of which the last is told; default: 1")
    parser.add_argument("--out", default=str(RESULTS / "editing.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    chosen = Choices(options.layers, options.lam, options.steps)
    editor = Editor(options.model, device=options.device, seed=options.seed, guard=None)
    text = Path(options.text).read_text(encoding="utf-8")
    facts = known(editor, list(read_facts(options.facts, skip_bad=True)))
    first = facts[: min(options.n, default=100)]
    before = measure(editor, first)
    rows = [Result("before", len(first), False, 0.0, {}, (), None, before, perplexity(editor, text), 0.0, 0.0, 0.0)]
    for method in dict.fromkeys(options.methods):
        run(editor, facts[:2], method, text[:20_000], chosen)  # moments, contexts and warm-up
    jobs = [(method, facts[:n]) for method in options.methods for n in options.n if n <= len(facts)]
    for method, written in jobs:
        rows.append(run(editor, written, method, text, chosen, repeats=options.repeats))
        tell(rows, options, editor)
    if options.alone:
        rows.append(one_at_a_time(editor, facts[: options.alone], "rome", text, chosen))
        tell(rows, options, editor)
    pool = read_records(options.facts, skip_bad=True) if options.made else ()
    for method in options.methods:
        for n in options.made:
            written = [record.fact for record in made_facts(pool, n)]
            rows.append(run(editor, written, method, text, chosen, made=True, repeats=options.repeats))
            tell(rows, options, editor)
    show(rows)


def tell(rows: Sequence[Result], options: argparse.Namespace, editor: Editor) -> None:
    """The last row on the terminal, all of them in the file: what is measured is not lost."""
    show(rows[-1:])
    content = {
        "machine": machine(),
        "model": editor.loaded.name,
        "options": {name: value for name, value in vars(options).items() if name not in ("facts", "text", "out")},
        "rows": [
            {name: value for name, value in (asdict(row) | row.scores).items() if name != "scores"} for row in rows
        ],
    }
    write_atomically(Path(options.out), (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
