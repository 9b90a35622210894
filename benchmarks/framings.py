"""Which way of searching and keying facts makes them hold in every framing, and keeps the rest.

    python -m benchmarks.framings --split held
    python -m benchmarks.framings --split held --device cuda --facts counterfact.json --text held.txt --n 100 600
    python -m benchmarks.framings --split tune --limit 12 --variants "nothing kept" default "keep 4" "keep 8" --figure F

For each variant, everyday facts of a split are written one at a time into SmolLM2 and judged by free greedy decoding
(`benchmarks.everyday`). With --facts, the first facts of a CounterFact file whose true object the unedited model
prefers are written at once: EA (every target token first) in four framings, S with its parts with and without the
start token, and perplexity on the text. Variants change one thing each against the defaults. Targets of all everyday
facts are searched together, which changes nothing but the time: each fact has a δ of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch

from benchmarks.everyday import FILES, SAID, EverydayFact, answers, confidence, judge, summarize
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit import Editor, Fact, TargetSettings
from rebind.edit.methods import METHODS
from rebind.edit.solve import SubjectStates, choose_lambda, protected_states, solve_writes, weights_restored
from rebind.edit.targets import FRAMINGS, TargetSearch, TargetStore
from rebind.edit.targets.framings import framed_prompts
from rebind.edit.targets.kept import subject_prompts
from rebind.evals.reading import read_records
from rebind.memory import Write
from rebind.models.prompts import Prompt
from rebind.models.scoring import FactScore, score_prompts
from rebind.models.sites import memory_of, module_at, write_memory
from rebind.plotting import COLORS, panels, render
from rebind.storage import write_json

CONTEXT = "The weather was fine that day, and we went for a walk along the river. "
NEIGHBORS = 3  # per record


@dataclass(frozen=True)
class Variant:
    """One way of editing."""

    framings: tuple[str, ...] = FRAMINGS
    several_keys: bool = True
    layers: tuple[int, ...] | None = None  # by default those of the model
    search: dict[str, float] = field(default_factory=dict)  # what differs from the default search
    protect: bool = True  # whether the write leaves other subjects alone
    construct: str = "spread"  # how layers get their targets: see `Bench.edit_alone`
    method: str = "memit"  # or dense, which is written by the editor alone


VARIANTS = {
    "default": Variant(),
    "before: start and text, mean key": Variant(("start", "text"), False, search={"keep": 0.0, "end": 0.0}),
    "all framings, mean key": Variant(several_keys=False),
    "nothing kept": Variant(search={"keep": 0.0}),
    "keep 1": Variant(search={"keep": 1.0}),
    "keep 4": Variant(search={"keep": 4.0}),
    "keep 8": Variant(search={"keep": 8.0}),
    "40 steps of rate .3": Variant(search={"steps": 40, "rate": 0.3}),
    "clamp .5": Variant(search={"clamp": 0.5}),
    "layers 1 to 5": Variant(layers=(1, 2, 3, 4, 5)),
    "layers 4 to 8": Variant(layers=(4, 5, 6, 7, 8)),
    "nobody protected": Variant(protect=False),
    "norm of the state kept": Variant(construct="anchor"),
    "forward replay": Variant(construct="replay"),
    "first and last layer, two searches": Variant(construct="twice"),
    "dense": Variant(method="dense"),
}


@dataclass(eq=False)
class Bench:
    """A base model and what it answers."""

    editor: Editor
    everyday: list[EverydayFact]
    facts: list[Fact]
    text: str

    def __post_init__(self) -> None:
        self.model = self.editor.language_model
        self.before = answers(self.model, self.everyday)
        self.sure = confidence(self.model, self.everyday) if self.everyday else []
        self.perplexity = self.measure_perplexity() if self.text else math.nan

    def measure_perplexity(self) -> float:
        nll, tokens = self.model.text_nll(self.text, max_tokens=12_000)
        return math.exp(nll / tokens)

    def settings(self, variant: Variant, facts: int) -> tuple[tuple[int, ...], TargetSettings]:
        chosen = self.editor.settings("memit", facts=facts, layers=variant.layers)
        return chosen.layers, replace(chosen.targets, **variant.search)

    def search(
        self, variant: Variant, facts: Sequence[Fact], count: int, layer: int | None = None
    ) -> tuple[Any, torch.Tensor]:
        """Return the prompts and δ of some facts, with the settings for `count` facts in one edit.

        By default, δ belongs to the last layer of these settings.
        """
        layers, targets = self.settings(variant, count)
        self.editor.framings = tuple(name for name in FRAMINGS if name in variant.framings)
        about = subject_prompts(self.model, facts, chat="chat" in variant.framings)
        prompts = self.editor.fact_prompts(facts, about, keep=targets.keep > 0)
        at = layers[-1] if layer is None else layer
        found = self.editor.target_search.find(at, prompts, targets, TargetStore(None))
        if variant.construct == "anchor":  # the state keeps its norm and only turns
            scale = torch.linalg.vector_norm(found.initial, dim=-1) / torch.linalg.vector_norm(found.states, dim=-1)
            return prompts, found.states * scale.unsqueeze(-1) - found.initial
        return prompts, found.states - found.initial

    def write(
        self, variant: Variant, prompts: Any, delta: torch.Tensor, layers: Sequence[int] | None = None
    ) -> dict[str, Write]:
        layers = layers or self.settings(variant, len(prompts))[0]
        weights, sites = self.editor.weights, [self.editor.sites[layer] for layer in layers]
        names = [site.name for site in sites]
        weights.remember_base(names)
        weights.load_old_keys(names)
        subjects = SubjectStates(self.model.trunk, prompts, several_keys=variant.several_keys)
        lam = choose_lambda(subjects.keys(sites[0]), weights.old_keys[names[0]], len(prompts))
        protected = protected_states(self.model.trunk, prompts, METHODS["memit"]) if variant.protect else None
        return solve_writes(subjects, sites, delta, METHODS["memit"], weights.old_keys, lam, protected)

    def apply(self, writes: dict[str, Write]) -> None:
        for name, write in writes.items():
            module = module_at(self.model.model, name)
            write_memory(module, Write(*(part.double() for part in write.tensors())).apply(memory_of(module).double()))

    def singles(self, variant: Variant) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Write each everyday fact alone, and judge what the model says then: the shares, and all answers."""
        edited = self.dense_edits(variant) if variant.method == "dense" else self.weight_edits(variant)
        texts = [answers(self.model, [one])[0] for one, _ in zip(self.everyday, edited, strict=False)]
        edited.close()
        rows = list(zip(self.everyday, self.before, self.sure, texts, strict=True))
        answered = [{"prompt": one.fact.text, "before": before, "after": after} for one, before, _, after in rows]
        return summarize([judge(*row) for row in rows]), answered

    def weight_edits(self, variant: Variant) -> Generator[None]:
        """Put each everyday fact into the weights, until the next one is asked for."""
        layers, _ = self.settings(variant, 1)
        first = layers[0] if variant.construct in ("replay", "twice") else None
        prompts, delta = self.search(variant, [one.fact for one in self.everyday], 1, first)
        for index, one in enumerate(self.everyday):
            with weights_restored([module_at(self.model.model, self.editor.sites[layer].name) for layer in layers]):
                self.edit_alone(variant, one.fact, prompts[index : index + 1], delta[index : index + 1])
                yield

    def edit_alone(self, variant: Variant, fact: Fact, prompts: Any, delta: torch.Tensor) -> None:
        """Write one fact into the weights.

        By default each layer takes a share of what is missing at the last one. `twice` searches and writes at the first
        layer, then again at the last one on the edited model. `replay` searches at the first layer only, and lets each
        later layer have the states of a run with δ as its own target.
        """
        layers, _ = self.settings(variant, 1)
        if variant.construct == "twice":
            self.apply(self.write(variant, prompts, delta, layers[:1]))
            base = self.editor.target_search
            self.editor.target_search = TargetSearch(base.trunk, base.fingerprint, base.word_parts)
            self.apply(self.write(variant, *self.search(variant, [fact], 1, layers[-1]), layers[-1:]))
            self.editor.target_search = base
        elif variant.construct == "replay":
            targets = self.replay(prompts, delta, layers)
            for layer, target in zip(layers, targets, strict=True):
                missing = target - self.states(prompts, layer)
                self.apply(self.write(variant, prompts, missing.mean(0, keepdim=True), [layer]))
        else:
            self.apply(self.write(variant, prompts, delta))

    def replay(self, prompts: Any, delta: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """Return the states of the subjects after each layer, in a run with δ behind the first one."""
        block = self.model.trunk.blocks[layers[0]]

        def add(_: Any, __: Any, out: Any) -> Any:
            states = (out[0] if isinstance(out, tuple) else out).clone()
            states[:, -1] += delta[0].to(states)  # prompts are cut behind the subject
            return (states, *out[1:]) if isinstance(out, tuple) else states

        handle = block.register_forward_hook(add)
        try:
            return [self.states(prompts, layer) for layer in layers]
        finally:
            handle.remove()

    def states(self, prompts: Any, layer: int) -> torch.Tensor:
        return SubjectStates(self.model.trunk, prompts, several_keys=True).states_after(layer)

    def dense_edits(self, variant: Variant) -> Generator[None]:
        """Put each everyday fact into the dense memory, until the next one is asked for."""
        targets = replace(self.editor.settings("dense").targets, **variant.search)
        for one in self.everyday:
            edit = self.editor.rewrite_many([one.fact], method="dense", layers=variant.layers, targets=targets)
            try:
                yield
            finally:
                self.editor.undo(edit.id)

    def together(self, variant: Variant, n: int) -> dict[str, Any]:
        """Write n records at once, and ask in every framing."""
        facts = [replace(fact, paraphrases=(), neighbors=()) for fact in self.facts[:n]]
        begin = time.perf_counter()
        prompts, delta = self.search(variant, facts, n)
        writes = self.write(variant, prompts, delta)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        row: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        with weights_restored([module_at(self.model.model, name) for name in writes]):
            self.apply(writes)
            row |= self.ask(facts, self.facts[:n])
            row["perplexity"] = self.measure_perplexity() / self.perplexity - 1
        return row

    def ask(self, facts: Sequence[Fact], records: Sequence[Fact]) -> dict[str, float]:
        framed = {
            "start": ([fact.as_prompt() for fact in facts], {}),
            "plain": ([fact.as_prompt() for fact in facts], {"start": False}),
            "text": ([fact.as_prompt() for fact in facts], {"context": CONTEXT}),
            "chat": ([framed_prompts(fact, "chat")[0] for fact in facts], {}),
        }
        row: dict[str, float] = {}
        for name, (prompts, options) in framed.items():
            row[f"EA {name}"] = _mean([score.exact for score in self.score(prompts, options)])
        paraphrases = [(text, fact) for fact in records for text in fact.paraphrases]
        neighbors = [(text, fact) for fact in records for text in fact.neighbors[:NEIGHBORS]]
        for name in ("start", "plain"):
            options = framed[name][1]
            asked = [(fact.text, fact) for fact in facts]
            parts = [self.preference(group, options) for group in (asked, paraphrases, neighbors)]
            shares = (parts[0], parts[1], 1 - parts[2])
            row |= dict(zip((f"ES {name}", f"PS {name}", f"NS {name}"), shares, strict=True))
            row[f"S {name}"] = harmonic_mean(shares)
        return row

    def preference(self, asked: Sequence[tuple[str, Fact]], options: dict[str, Any]) -> float:
        """Return how often the new target is likelier than the old one."""
        new = self.score([Prompt(text, fact.target) for text, fact in asked], options)
        old = self.score([Prompt(text, str(fact.old)) for text, fact in asked], options)
        return _mean([one.nll < other.nll for one, other in zip(new, old, strict=True)])

    def score(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> list[FactScore]:
        return score_prompts(self.model.trunk, self.model.tokenizer, self.model.encode(prompts, **options))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the share of facts that are said against the share of the subject that is kept, a point per variant."""
    labels = [("", "other answers about the subject as before", "framings in which a fact is said")]
    figure, (panel,) = panels(
        "A fact said, and its subject kept", "everyday facts, one per edit, judged by free decoding", labels
    )
    for color, row in zip(cycle(COLORS), rows):
        said = _mean([row["alone"][name] for name in SAID])
        panel.plot(row["alone"]["same subject"], said, "o", color=color)
        panel.annotate(row["variant"], (row["alone"]["same subject"], said), (6, 4), textcoords="offset points")
    path.write_bytes(render(figure))


def known_facts(editor: Editor, path: Path, n: int) -> list[Fact]:
    """Return facts of a file, one per subject, whose true object the base model prefers; the last ones first."""
    records = [record for record in read_records(path) if record.fact.old]
    facts = [
        replace(record.fact, neighbors=[question.prompt for question in record.neighbors]) for record in records[::-1]
    ]
    known: dict[str, Fact] = {}
    for begin in range(0, len(facts), 200):  # asking them all takes minutes on a CPU
        if len(known) >= n:
            break
        part = facts[begin : begin + 200]
        new = editor.score(part)
        old = editor.language_model.score([fact.as_prompt(fact.old) for fact in part])
        for fact, of_new, of_old in zip(part, new, old, strict=True):
            if of_old.nll < of_new.nll:
                known.setdefault(fact.subject, fact)
    return list(known.values())[:n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="held", choices=["tune", "held", "dev", "all", *FILES])
    parser.add_argument("--limit", type=int, help="write only the first of the everyday facts")
    parser.add_argument("--variants", nargs="*", default=["default"], help=f"some of: {'; '.join(VARIANTS)}; or all")
    parser.add_argument("--facts", type=Path, help="a CounterFact file")
    parser.add_argument("--text", type=Path, help="a text for perplexity")
    parser.add_argument("--n", type=int, nargs="*", default=[100], help="how many of its facts to write at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "framings.json")
    parser.add_argument("--figure", type=Path, help="draw the variants into this file")
    options = parser.parse_args()
    editor = Editor("smollm2", device=options.device, guard=None)
    everyday = EverydayFact.read(options.split)[: options.limit]
    facts = known_facts(editor, options.facts, max(options.n)) if options.facts else []
    bench = Bench(editor, everyday, facts, options.text.read_text() if options.text else "")
    content: dict[str, Any] = {"machine": machine(), "split": options.split, "facts": len(everyday)}
    content["rows"] = []
    for name in VARIANTS if options.variants == ["all"] else options.variants:
        shares, answered = bench.singles(VARIANTS[name])
        row: dict[str, Any] = {"variant": name, "alone": shares}
        if facts:
            row["together"] = {str(n): bench.together(VARIANTS[name], n) for n in options.n}
        content["rows"].append(row | {"answers": answered})
        print(json.dumps(row), flush=True)
        write_json(options.out, content)
    print("\n| variant | " + " | ".join(content["rows"][0]["alone"]) + " |")
    for row in content["rows"]:
        print(f"| {row['variant']} | " + " | ".join(f"{value:.2f}" for value in row["alone"].values()) + " |")
    if options.figure:
        draw(content["rows"], options.figure)


if __name__ == "__main__":
    main()
