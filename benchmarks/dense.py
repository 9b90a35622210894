"""Facts in the dense memory beside facts in the weights: quality, what else changes, time, and the cost of a read.

    python -m benchmarks.dense --device cuda --facts counterfact.json --text held.txt --n 1000 3000
    python -m benchmarks.dense --device cuda --facts counterfact.json --text held.txt --n 3000 --layers 8 11 --tau .7 .8
    python -m benchmarks.dense --device cuda --facts counterfact.json --text held.txt --n 10000 --made --batch 100

The facts are those of a CounterFact file whose true object the base model prefers, each about a subject of its own.
For every number of facts and every method, all of them are written in one edit (with --batch, in edits of that size),
measured, and undone:

- EA (every target token is the first choice) in the framings start, plain, text and chat; ES, PS, NS and their harmonic
  mean S with and without the start tokens; for the first facts of a sequence, EA start of the first batch;
- same subject: the share of held-out relations of the first 100 subjects with the same first word as before;
- perplexity, as a relative change, on those paragraphs of the text that mention an edited subject and on the others;
- fires: the share of tokens of those other paragraphs that read the dense memory;
- seconds by phase, of undoing the edit, and of undoing one more fact beside all of them;
- on a GPU, the read as a share of a forward pass of 8 rows of 256 tokens, and of one step of decoding with 8 rows
  (`benchmarks.dense_scale` measures it on a CPU).

`base` is the model without edits: NS can hardly be better than there. `dense, τ x` are the same rows with one threshold
for all of them instead of calibrated ones. `grace, r` stores the state of the last token of each prompt as its key and
changes states within a plain distance, as GRACE does: r is a share of the median distance between a key and the nearest
other one. With --made, neighbors of the records are facts, too, but for those of the first 700 records, of which
paraphrases and neighbors are asked. Targets are searched once per layer and settings, and with --targets they are
stored, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Clock, told_apart
from benchmarks.framings import NEIGHBORS, Bench, known_facts
from benchmarks.made import made_facts
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit import Editor, Fact
from rebind.edit.dense.layers import FIRES
from rebind.edit.outcome import MAX_FACTS, Probe
from rebind.edit.progress import Progress
from rebind.edit.solve import SubjectStates
from rebind.edit.targets import FactPrompts, TargetStore
from rebind.edit.targets.kept import subject_prompts
from rebind.evals.reading import read_records
from rebind.models.caches import borrow_cache
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens
from rebind.storage import write_json

METHODS = ("base", "dense", "memit", "alphaedit", "grace")
WINDOW = 256
REPEATS = 7
SPARED = 700  # records whose neighbors are not made into facts, so that they can be asked


@dataclass(eq=False)
class Text:
    """A text in two parts: paragraphs that mention an edited subject, and the others."""

    editor: Editor
    mentioning: str
    other: str
    tokens: int
    before: dict[str, float] = field(default_factory=dict)

    @classmethod
    def split(cls, editor: Editor, text: str, facts: Sequence[Fact], tokens: int) -> Text:
        subjects = {fact.subject for fact in facts}
        parts: dict[bool, list[str]] = {True: [], False: []}
        for paragraph in text.split("\n"):
            if paragraph.strip():
                parts[any(subject in paragraph for subject in subjects)].append(paragraph)
        split = cls(editor, "\n".join(parts[True]), "\n".join(parts[False]), tokens)
        split.before = split.perplexities()
        return split

    def perplexities(self) -> dict[str, float]:
        found = {}
        for name, text in (("mentioning", self.mentioning), ("other", self.other)):
            if text:
                nll, tokens = self.editor.language_model.text_nll(text, max_tokens=self.tokens)
                found[name] = math.exp(nll / tokens)
        return found

    def change(self) -> dict[str, float]:
        after = self.perplexities()
        return {f"perplexity {name}": after[name] / before - 1 for name, before in self.before.items()}

    def windows(self) -> Tensor:
        """Return the other paragraphs as rows of token ids behind the start tokens, [rows, WINDOW]."""
        model = self.editor.language_model
        ids = model.tokenizer(self.other, add_special_tokens=False, verbose=False)["input_ids"][: self.tokens]
        body = WINDOW - len(model.start)
        rows = [[*model.start, *ids[begin : begin + body]] for begin in range(0, len(ids) - body, body)]
        return torch.tensor(rows or [[*model.start, *ids]], device=model.device)

    @torch.no_grad()
    def fires(self) -> float:
        """Return the share of tokens of the other paragraphs that read the dense memory."""
        model, memories = self.editor.language_model, self.editor.edited.dense.memories
        count = total = 0
        for ids in self.windows().split(8):
            tokens = Tokens.right_padded(ids.tolist(), model.device)
            for layer, memory in memories.items():
                with self.editor.base_model():
                    states = model.trunk.after(layer, tokens)[:, max(1, len(model.start)) :]
                weights, _ = memory.weights(self.editor.edited.dense.whitening(layer)(states.float()))
                count, total = count + int((weights.sum(-1) > FIRES).sum()), total + states.shape[0] * states.shape[1]
        return count / max(total, 1)


class SharedTargets(TargetStore):
    """Targets that stay where they are when an edit is written, for the methods and numbers of facts that follow."""

    def clear(self) -> None:
        pass


@dataclass(eq=False)
class Comparison:
    """A number of facts, and everything that is asked about them."""

    bench: Bench
    facts: list[Fact]  # as they are written
    records: list[Fact]  # with paraphrases and neighbors
    text: Text | None
    batch: int | None = None
    layers: Sequence[int] | None = None
    keep: float | None = None  # weight of the kept prompts in the search; None: the default
    search_as: int = 1  # search with the settings for at least this many facts
    store: TargetStore = field(default_factory=lambda: TargetStore(None))

    def __post_init__(self) -> None:
        self.editor, model = self.bench.editor, self.bench.model
        about = subject_prompts(model, self.facts[:MAX_FACTS])
        self.probe = Probe(model, self.facts[:MAX_FACTS], about, ("start",))

    def measure(self) -> dict[str, Any]:
        """Ask the model as it stands."""
        row: dict[str, Any] = self.bench.ask(self.facts, self.records)
        row["same subject"] = self.probe.measure().subject
        if self.batch is not None:
            first = [score.exact for score in self.editor.score(self.facts[: self.batch])]
            row["EA first batch"] = sum(first) / len(first)
        return row | (self.text.change() if self.text else {})

    def edited(self, method: str) -> Iterator[dict[str, Any]]:
        """Write the facts with a method of the editor, and yield a row, for dense facts one per kind of threshold."""
        editor, clock = self.editor, Clock()
        editor.progress = clock.progress
        size, layers = self.batch or len(self.facts), self.layers if method == "dense" else None
        targets = editor.settings(method, facts=max(size, self.search_as)).targets
        targets = targets if self.keep is None else replace(targets, keep=self.keep)
        begin = time.perf_counter()
        with told_apart(editor, clock):
            edits = [
                editor.rewrite_many(facts, method=method, layers=layers, targets=targets, force=True)
                for facts in (self.facts[start : start + size] for start in range(0, len(self.facts), size))
            ]
        clock.enter(None)
        seconds = time.perf_counter() - begin - clock.spent.get("moments", 0.0)
        editor.progress = Progress()
        row: dict[str, Any] = {"method": method, "seconds": seconds, "phases": clock.spent, **self.measure()}
        row["layers"] = edits[-1].settings["layers"]
        if method == "dense":
            row |= {"rows": editor.edited.dense.rows()}
            row |= self.cost_of_reads() if self.bench.model.device.type == "cuda" else {}
            row["fires"] = self.text.fires() if self.text else None
            extra = editor.rewrite("The color of the {Qzxv stone} is", "red", method="dense", force=True)
            row["undo one"] = self.timed(lambda: editor.undo(extra.id))
        yield row
        row = {"undo": self.timed(lambda: editor.ledger.switch([edit.id for edit in edits], on=False))}
        row["undo"] += self.timed(editor.refresh)
        yield row

    def with_threshold(self, tau: float) -> dict[str, Any]:
        """Ask the dense memory as it stands, with one threshold for all rows."""
        dense = self.editor.edited.dense
        calibrated = dense.memories
        with_tau = {
            layer: replace(memory, thresholds=torch.full_like(memory.thresholds, tau))
            for layer, memory in calibrated.items()
        }
        dense.set(with_tau)
        try:
            row = {"method": f"dense, τ {tau:g}", **self.measure()}
            row["fires"] = self.text.fires() if self.text else None
        finally:
            dense.set(calibrated)
        return row

    def cost_of_reads(self) -> dict[str, float]:
        """Return the time of the dense read as a share of a forward pass, and of a step of decoding."""
        model = self.bench.model
        ids = torch.randint(5, model.model.config.vocab_size, (8, WINDOW), device=model.device)
        cache = model.model(ids, use_cache=True).past_key_values

        def decode() -> None:
            model.model(ids[:, :1], past_key_values=borrow_cache(cache), use_cache=True)

        row = {}
        for name, run in (("read, forward", lambda: model.model(ids)), ("read, decode", decode)):
            with_memory = self.timed_often(run)
            with self.editor.edited.dense.off():
                row[name] = with_memory / self.timed_often(run) - 1
        return row

    @torch.no_grad()
    def timed_often(self, run: Callable[[], Any]) -> float:
        run()
        return median(self.timed(run) for _ in range(REPEATS))

    def timed(self, run: Callable[[], Any]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        if self.bench.model.device.type == "cuda":
            torch.cuda.synchronize()

    def grace(self, radii: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Ask a memory with GRACE's keys: the last token of the prompt, and a plain distance."""
        editor, model = self.editor, self.bench.model
        settings = editor.settings("dense", facts=len(self.facts), layers=self.layers)
        layer, begin = settings.layers[0], time.perf_counter()
        prompts = []
        for start in (True, False) if model.start and not model.adds_start else (True,):
            encoded = model.encode([fact.as_prompt() for fact in self.facts], start=start)
            prompts.append(
                [replace(one, subject_last=len(one.ids) - 1, mentions=(len(one.ids) - 1,)) for one in encoded]
            )
        asked = [FactPrompts(tuple(own)) for own in zip(*prompts, strict=True)]
        search = replace(settings.targets, keep=0.0)
        targets = editor.target_search.find(layer, asked, search, self.store)
        subjects = SubjectStates(model.trunk, asked, several_keys=True)
        keys, values = subjects.states_after(layer).float(), (targets.states - targets.initial).float()
        owner = subjects.owner.to(keys.device)
        seconds = time.perf_counter() - begin
        scale = _nearest_distance(keys, owner)
        for radius in radii:
            with nearest_key(model, layer, keys, values[owner], radius * scale):
                yield {"method": f"grace, {radius:g}", "seconds": seconds, "layers": [layer], **self.measure()}


def _nearest_distance(keys: Tensor, owner: Tensor) -> float:
    """Return the median distance of a key to the nearest key of another fact."""
    sample = torch.arange(0, len(keys), max(1, len(keys) // 1000), device=keys.device)
    distances = torch.cdist(keys[sample], keys)
    return float(distances.masked_fill(owner[sample].unsqueeze(-1) == owner, torch.inf).min(-1).values.median())


@contextmanager
def nearest_key(model: Any, layer: int, keys: Tensor, values: Tensor, radius: float) -> Iterator[None]:
    """Add the value of the nearest key to every state within a radius of it."""

    def read(_: Any, __: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        nearest = torch.cdist(states.float(), keys.expand(len(states), -1, -1)).min(-1)
        change = values[nearest.indices] * (nearest.values < radius).unsqueeze(-1)
        changed = states + change.to(states.dtype)
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    with module_at(model.model, model.sites[layer].block).register_forward_hook(read):
        yield


def rows_of(
    comparison: Comparison, methods: Sequence[str], taus: Sequence[float], radii: Sequence[float]
) -> Iterator[Any]:
    for method in methods:
        if method == "base":
            yield {"method": method, **comparison.measure()}
            continue
        if method == "grace":
            yield from comparison.grace(radii)
            continue
        written = comparison.edited(method)
        row = next(written)
        others = [comparison.with_threshold(tau) for tau in taus] if method == "dense" else []
        yield row | next(written)
        yield from others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, required=True, help="a CounterFact file")
    parser.add_argument("--text", type=Path, help="a text for perplexity, a paragraph per line")
    parser.add_argument("--n", type=int, nargs="+", default=[100], help="numbers of facts")
    parser.add_argument("--made", action="store_true", help="make facts of the records' neighbors, too")
    parser.add_argument("--batch", type=int, help="write the facts in edits of this many")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--layers", type=int, nargs="+", help="layers of the dense memory, one row each")
    parser.add_argument("--keep", type=float, help="weight of what else is known about subjects, in the search")
    parser.add_argument("--search-as", type=int, default=1, help="search with the settings for this many facts")
    parser.add_argument("--tau", type=float, nargs="*", default=[0.8], help="also one threshold for all rows")
    parser.add_argument("--radius", type=float, nargs="*", default=[0.3, 0.5, 0.7], help="of grace")
    parser.add_argument("--tokens", type=int, default=50_000, help="of each part of the text")
    parser.add_argument("--targets", type=Path, help="store targets in this folder; by default a temporary one")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "dense.json")
    options = parser.parse_args()
    editor = Editor(options.model, device=options.device, guard=None)
    with tempfile.TemporaryDirectory() as temporary:
        editor._target_store = SharedTargets(options.targets or Path(temporary))
        compare(editor, options)


def compare(editor: Editor, options: argparse.Namespace) -> None:
    if options.made:
        records = read_records(options.facts, skip_bad=True)
        spared = {record.id: [question.prompt for question in record.neighbors] for record in records[:SPARED]}
        made = made_facts(records, max(options.n), spared={text for own in spared.values() for text in own[:NEIGHBORS]})
        everything = [replace(one.fact, neighbors=spared.get(one.id, ())) for one in made]
    else:
        everything = known_facts(editor, options.facts, max(options.n))
    text = options.text.read_text(encoding="utf-8") if options.text else ""
    content: dict[str, Any] = {"machine": machine(), "model": options.model, "rows": []}
    for n in options.n:
        facts = [replace(fact, paraphrases=(), neighbors=()) for fact in everything[:n]]
        split = Text.split(editor, text, facts, options.tokens) if text else None
        for layer in options.layers or [None]:
            layers = None if layer is None else [layer]
            bench = Bench(editor, [], everything, "")
            asked = [fact for fact in everything[:n] if fact.paraphrases and fact.neighbors]
            search = (options.keep, options.search_as, editor._target_store)
            comparison = Comparison(bench, facts, asked, split, options.batch, layers, *search)
            methods = options.methods if layer is None or layer == options.layers[0] else ["dense"]
            for row in rows_of(comparison, methods, options.tau, options.radius):
                content["rows"].append({"facts": len(facts), **row})
                print(json.dumps(content["rows"][-1]), flush=True)
                write_json(options.out, content)


if __name__ == "__main__":
    main()
