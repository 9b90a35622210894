"""A hundred thousand facts in a dense memory: whether they are said, and what they and a read of them cost.

    python -m benchmarks.dense_many --device cuda --facts counterfact.json --text held.txt --n 100000 --batch 10000
    python -m benchmarks.dense_many --device cuda --wide 10000 100000
    python -m benchmarks.dense_many --facts counterfact.json --recognize 20000 --beta 60 200

Every fact is about an invented name, with the relation and the target of a CounterFact record. They are written in
edits of --batch facts, searched and keyed in the framing `start` alone, until --seconds have passed. Every second edit
and the last one are followed by a row:

- EA: every target token is the first choice, for 2,000 of the facts, and for 1,000 of the first edit;
- rows; seconds of writing up to here, and of the newest edit; seconds of undoing one more fact beside all of them;
- fires and perplexity: the share of tokens of the text that read the memory, and its relative change;
- on a GPU, the read as a share of a forward pass of 8 rows of 256 tokens, and of one step of decoding with 8 rows.

--wide measures these shares on a random model with the shape of Llama 3 8B in bfloat16, for memories of so many facts
with six random rows each. Nothing that it reads is near to a row, like nearly all tokens of a text.

--recognize asks without any search how sharp the softmax must be: each of so many subjects has one row, as above, and
is asked after its own prompt. For every β: the mean weight of the right row, and the share of subjects for which it is
.9 or more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.dense import REPEATS, WINDOW, Comparison, Text
from benchmarks.dense_scale import made_names
from benchmarks.framings import Bench
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit import Editor, Fact
from rebind.edit.dense.hook import MemoryHook
from rebind.edit.dense.thresholds import ALONE, choose_thresholds, nearest_strangers
from rebind.edit.facts.fact import escape_braces
from rebind.edit.solve import SubjectStates
from rebind.evals.reading import read_records
from rebind.evals.records import Record
from rebind.memory.dense import BETA, Dense, Whitening
from rebind.models.caches import borrow_cache
from rebind.storage import write_json

ASKED, ASKED_FIRST = 2_000, 1_000
ROWS_PER_FACT, SPREAD = 6, 0.4  # of a made memory: rows, and their distance from the direction of the fact


def invented_facts(records: Sequence[Record], count: int) -> list[Fact]:
    """Return facts about names that nobody has, with the relation and the target of each record in turn."""
    facts = []
    for name, record in zip(made_names(count), cycle(records), strict=False):
        before, after = (escape_braces(part) for part in record.fact.parts)
        facts.append(Fact(f"{before}{{}}{after}", name, record.fact.target))
    return facts


def rows_of(editor: Editor, facts: Sequence[Fact], text: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Write facts edit by edit, and yield a row after every second edit and the last one."""
    split = Text(editor, "", text, options.tokens)
    split.before = split.perplexities()
    editor.framings = ("start",)
    comparison = Comparison(Bench(editor, [], [], ""), list(facts[:100]), [], None)
    spent, batches = 0.0, [facts[begin : begin + options.batch] for begin in range(0, len(facts), options.batch)]
    for number, batch in enumerate(batches):
        newest = comparison.timed(lambda batch=batch: editor.rewrite_many(batch, method="dense", force=True))
        spent += newest
        last = number == len(batches) - 1 or spent > options.seconds
        if number % 2 or last:
            written = facts[: number * options.batch + len(batch)]
            row: dict[str, Any] = {"facts": len(written), "seconds": spent, "newest edit": newest}
            row["rows"] = editor.edited.dense.rows()
            row["EA"] = said(editor, written[:: max(1, len(written) // ASKED)])
            row["EA first edit"] = said(editor, batches[0][:ASKED_FIRST])
            if last:
                row |= split.change() | {"fires": split.fires()}
                row |= comparison.cost_of_reads() if editor.language_model.device.type == "cuda" else {}
                extra = editor.rewrite("The color of the {Qzxv stone} is", "red", method="dense", force=True)
                row["undo one"] = comparison.timed(lambda edit=extra.id: editor.undo(edit))
            yield row
        if last:
            break


def said(editor: Editor, facts: Sequence[Fact]) -> float:
    scores = editor.score(facts)
    return sum(score.exact for score in scores) / len(scores)


@torch.no_grad()
def recognition(editor: Editor, facts: Sequence[Fact], betas: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield how rightly the subjects are recognized for each β."""
    editor.framings = ("start",)
    dense, layer = editor.edited.dense, editor.settings("dense").layers[0]
    dense.load(layer)
    whiten, parts = dense.whitening(layer), []
    for begin in track(range(0, len(facts), 2000), "subjects", transient=True):
        prompts = editor.fact_prompts(facts[begin : begin + 2000], keep=False)
        subjects = SubjectStates(editor.language_model.trunk, prompts, several_keys=True)
        parts.append(whiten(subjects.states_after(layer).float()))
    keys = torch.cat(parts)
    subject, sample = torch.arange(len(keys), device=keys.device), whiten(dense.old_states[layer].sample.to(keys))
    nearest = nearest_strangers(keys, subject, [sample])
    thresholds = choose_thresholds(torch.full_like(nearest, ALONE), nearest)
    quantiles = nearest.cpu().quantile(torch.tensor([0.5, 0.9, 0.99])).tolist()
    for beta in betas:
        right = []
        for part, own in zip(keys.split(1000), subject.split(1000), strict=True):
            logits = functional.pad(beta * (part @ keys.mT - thresholds), (0, 1))  # the last one is the empty slot
            right.append(torch.softmax(logits, dim=-1).gather(-1, own.unsqueeze(-1)))
        weights = torch.cat(right)
        shares = {"weight": float(weights.mean()), "at least .9": float((weights >= 0.9).double().mean())}
        yield {"facts": len(facts), "beta": beta, **shares, "nearest other: .5, .9, .99 quantiles": quantiles}


def wide_rows(counts: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield what a read costs a model with the shape of Llama 3 8B."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        torch_dtype=torch.bfloat16,
    )
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(5, config.vocab_size, (8, WINDOW))
    width, block = config.hidden_size, model.model.layers[8]
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(ids, logits_to_keep=1),
        "decode": lambda: model(ids[:, :1], past_key_values=borrow_cache(cache), use_cache=True),
    }
    whitening = Whitening(torch.zeros(width), torch.eye(width))
    for count in counts:
        owner = torch.arange(count, device=device).repeat_interleave(ROWS_PER_FACT)
        keys = functional.normalize(torch.randn(count, width, device=device), dim=-1)[owner]
        keys += SPREAD * functional.normalize(torch.randn(len(owner), width, device=device), dim=-1)
        values, thresholds = torch.randn(count, width, device=device), torch.full((len(owner),), 0.8, device=device)
        memory = Dense(functional.normalize(keys, dim=-1), values, thresholds, owner=owner)
        row: dict[str, Any] = {"facts": count, "rows": len(memory), "GB": 4e-9 * (keys.numel() + values.numel())}
        without = {name: often(run, device) for name, run in runs.items()}
        handle = block.register_forward_hook(MemoryHook.on(block, whitening, memory))
        row |= {f"read, {name}": often(run, device) / without[name] - 1 for name, run in runs.items()}
        handle.remove()
        yield row | {f"milliseconds, {name}": 1e3 * seconds for name, seconds in without.items()}


@torch.no_grad()
def often(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, the median of some."""
    run()
    seconds = []
    for _ in range(3 * REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, help="a CounterFact file")
    parser.add_argument("--text", type=Path, help="a text for perplexity, a paragraph per line")
    parser.add_argument("--n", type=int, default=100_000, help="number of facts")
    parser.add_argument("--batch", type=int, default=10_000, help="facts per edit")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of writing, after which no edit begins")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the text")
    parser.add_argument("--wide", type=int, nargs="+", default=[], help="measure reads of so many facts on an 8B shape")
    parser.add_argument(
        "--recognize", type=int, help="ask without a search how many of so many subjects are recognized"
    )
    parser.add_argument("--beta", type=float, nargs="+", default=[BETA], help="of the softmax, for --recognize")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "dense-many.json")
    options = parser.parse_args()
    content: dict[str, Any] = {"machine": machine(), "model": options.model, "rows": [], "wide": [], "recognized": []}
    if options.facts:
        editor = Editor(options.model, device=options.device, guard=None)
        records = read_records(options.facts, skip_bad=True)
    if options.recognize:
        for row in recognition(editor, invented_facts(records, options.recognize), options.beta):
            report(content["recognized"], row, content, options.out)
    elif options.facts:
        facts = invented_facts(records, options.n)
        for row in rows_of(editor, facts, options.text.read_text(encoding="utf-8"), options):
            report(content["rows"], row, content, options.out)
    if options.wide:
        for row in wide_rows(options.wide, torch.device(options.device)):
            report(content["wide"], row, content, options.out)


def report(rows: list[dict[str, Any]], row: dict[str, Any], content: dict[str, Any], out: Path) -> None:
    rows.append(row)
    print(json.dumps(row), flush=True)
    write_json(out, content)


if __name__ == "__main__":
    main()
