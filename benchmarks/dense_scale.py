"""What a dense memory costs as it grows: bytes, seconds, the read beside a forward pass, and how often it fires.

    python -m benchmarks.dense_scale --text held.txt --facts 1000 10000 100000

No target is searched: values are random, of the length that a search gives them. Keys are real. Each made subject runs
through SmolLM2 up to the layer of the memory, behind the start token; its keys are this state, moved as the other
framings move a subject (--framed made facts are encoded and run in every framing, as an edit does it, and each subject
moves as one of them, drawn at random, so that it has as many rows). After --forward subjects, further states are drawn
from a normal distribution with the mean and the covariance of these.

Thresholds are calibrated as in edits of 100 facts. For every number of facts:

- rows; MB of the rows in memory; seconds to save the memory, to load it and to attach it to the model;
- read: seconds of the hook over those of the model without it, for a prompt of 256 tokens, for one step of decoding one
  row and of 8 rows behind it, with cells and with a comparison of every row (`all rows`);
- missed: share of the tokens of the text for which a read by cells differs from a read of all rows by more than 1 % of
  a value; right: share of subjects, each moved as the framing of another one moves, whose own value is read, within
  10 %, by cells and with all rows;
- fires: share of the tokens of the text that read the memory, leaving out paragraphs that mention a made name;
- add one, undo one: seconds of the ledger and the model for one more fact beside all the others, without its search;
  they are in a ledger of edits of 100 facts. Up to --ledger facts.

Seconds are those of the processor, on one thread; the JSON has those of the clock as well.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.ledger import timed
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit import Editor, Fact
from rebind.edit.dense import attach, load_memory, save_memory
from rebind.edit.dense.files import StoredLayer, StoredMemory
from rebind.edit.dense.hook import MemoryHook
from rebind.edit.dense.layers import FIRES
from rebind.edit.dense.thresholds import (
    choose_thresholds,
    keys_by_owner,
    merge_keys,
    nearest_strangers,
    overlaps_by_owner,
    own_spread,
)
from rebind.edit.ledger import Edit, Ledger
from rebind.edit.ledger.edit import JSON, ROWS, library_versions
from rebind.edit.solve import SubjectStates
from rebind.memory.dense import Dense
from rebind.models.caches import borrow_cache
from rebind.models.tokens import Tokens
from rebind.storage import write_json

BATCH = 100  # facts per edit
WINDOW = 256
REPEATS = 5
FIRST = ("Ada", "Boris", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Lars", "Mira")
HEADS = ("Bal", "Cor", "Den", "Fal", "Gor", "Hal", "Jor", "Kel", "Lam", "Mor", "Nar", "Ost", "Per", "Quil", "Ros")
MIDDLES = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "us", "ander", "emi", "ilo", "ota", "ura")
TAILS = ("berg", "den", "ford", "gate", "holm", "ker", "land", "mont", "nik", "ova", "ric", "son", "ton", "vik", "wood")


def made_names(count: int) -> list[str]:
    """Return made names, no two alike, the same ones every time."""
    draw, names = random.Random(0), dict[str, None]()
    while len(names) < count:
        last = draw.choice(HEADS) + draw.choice(MIDDLES) + draw.choice(TAILS)
        is_person = draw.random() < 0.5
        names[f"{draw.choice(FIRST)} {last}" if is_person else last + draw.choice(MIDDLES) + draw.choice(TAILS)] = None
    return list(names)


@dataclass(frozen=True, eq=False)
class Moves:
    """How framings move the state of a subject, for some facts."""

    states: list[Tensor]  # of each fact: [keys, d], what is added to the state behind the start token
    length: float  # of a hidden state, the median

    @classmethod
    def measure(cls, editor: Editor, layer: int, names: Sequence[str]) -> Moves:
        facts = [Fact("The capital of {} is", name, "Rome") for name in names]
        prompts = editor.fact_prompts(facts, keep=False)
        subjects = SubjectStates(editor.language_model.trunk, prompts, several_keys=True)
        states, owner = subjects.states_after(layer).float(), subjects.owner
        bare = bare_states(editor, layer, names)
        moves = [states[owner == index] - bare[index] for index in range(len(facts))]
        return cls(moves, float(states.norm(dim=-1).median()))


@torch.no_grad()
def bare_states(editor: Editor, layer: int, names: Sequence[str]) -> Tensor:
    """Return the state of each name behind the start token, [names, d]."""
    model = editor.language_model
    rows = [[*model.start, *model.tokenizer(name, add_special_tokens=False)["input_ids"]] for name in names]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    states = torch.empty(len(rows), model.model.config.hidden_size)
    for begin in range(0, len(order), 256):
        part = order[begin : begin + 256]
        tokens = Tokens.left_padded([rows[index] for index in part], model.device)
        states[part] = model.trunk.after(layer, tokens)[:, -1].float()
    return states


class Rows:
    """Keys, thresholds and values of made facts, which are the same whatever their number."""

    def __init__(self, editor: Editor, layer: int, count: int, framed: int, forward: int) -> None:
        self.editor, self.layer, self.count = editor, layer, count
        self.names = made_names(count)
        self.moves = Moves.measure(editor, layer, self.names[:framed])
        self.bare = bare_states(editor, layer, self.names[: min(forward, count)])
        self.distribution: torch.distributions.MultivariateNormal | None = None
        if count > forward:
            covariance = self.bare.T.double().cov() + 1e-6 * torch.eye(self.bare.shape[-1]).double()
            self.factor, self.mean = torch.linalg.cholesky(covariance).float(), self.bare.mean(0)

    def edits(self, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield states, thresholds, owners and values of so many facts, an edit at a time."""
        dense, generator = self.editor.edited.dense, torch.Generator().manual_seed(1)
        whiten = dense.whitening(self.layer)
        sample = whiten(dense.old_states[self.layer].sample.float())
        for begin in range(0, count, BATCH):
            bare = self.states(begin, generator)
            chosen = torch.randint(len(self.moves.states), (len(bare),), generator=generator).tolist()
            every = torch.cat([state + self.moves.states[index] for state, index in zip(bare, chosen, strict=True)])
            lengths = torch.tensor([len(self.moves.states[index]) for index in chosen])
            owner = torch.arange(len(bare)).repeat_interleave(lengths)
            table = keys_by_owner(owner, len(bare))
            overlaps = overlaps_by_owner(whiten(every), table)
            row = merge_keys(table, overlaps)
            number = int(row.max()) + 1
            merged = every.new_zeros(number, every.shape[-1]).index_add(0, row, every)
            merged /= torch.bincount(row, minlength=number).unsqueeze(-1)
            owner = torch.empty(number, dtype=torch.long).scatter(0, row, owner)
            nearest = nearest_strangers(whiten(merged), owner, [sample])
            values = torch.randn(len(bare), every.shape[-1], generator=generator)
            values *= 0.75 * self.moves.length / values.norm(dim=-1, keepdim=True)
            yield merged, choose_thresholds(own_spread(overlaps)[owner], nearest), owner, values

    def states(self, begin: int, generator: torch.Generator) -> Tensor:
        bare = self.bare[begin : begin + BATCH]
        if missing := BATCH - len(bare):
            noise = torch.randn(missing, len(self.mean), generator=generator)
            bare = torch.cat([bare, self.mean + noise @ self.factor.T])
        return bare

    def memory(self, count: int) -> Dense:
        whiten = self.editor.edited.dense.whitening(self.layer)
        parts = [
            Dense(whiten(states), values, thresholds, owner=owner)
            for states, thresholds, owner, values in self.edits(count)
        ]
        return Dense.concatenate(parts)

    def queries(self, count: int, facts: int) -> tuple[Tensor, Tensor]:
        """Return whitened states of some of the first facts, each in a framing of another fact, and the facts."""
        generator = torch.Generator().manual_seed(2)
        chosen = torch.randint(min(facts, len(self.bare)), (count,), generator=generator)
        moves = [self.moves.states[index % len(self.moves.states)] for index in range(count)]
        moved = torch.stack([move[index % len(move)] for index, move in enumerate(moves)])
        return self.editor.edited.dense.whitening(self.layer)(self.bare[chosen] + moved), chosen


class Scale:
    """A model, and memories of made facts that grow."""

    def __init__(self, rows: Rows, text: str, tokens: int) -> None:
        self.rows, self.editor, self.layer = rows, rows.editor, rows.layer
        self.model = self.editor.language_model
        lasts = {name.split()[-1] for name in rows.names}
        paragraphs = [one for one in text.split("\n") if one.strip() and lasts.isdisjoint(one.split())]
        ids = self.model.tokenizer("\n".join(paragraphs), add_special_tokens=False)["input_ids"][:tokens]
        body = WINDOW - len(self.model.start)
        self.windows = [[*self.model.start, *ids[begin : begin + body]] for begin in range(0, len(ids) - body, body)]
        self.text = self.text_queries()
        self.prompt = torch.tensor([self.windows[0]])
        with torch.no_grad():
            self.cache = self.model.model(self.prompt, use_cache=True).past_key_values
            wide = self.prompt.expand(8, -1)
            self.wide_cache = self.model.model(wide, use_cache=True).past_key_values
        self.forward = {name: often(run) for name, (run, _) in self.runs().items()}

    @torch.no_grad()
    def text_queries(self) -> Tensor:
        whiten, first = self.editor.edited.dense.whitening(self.layer), max(1, len(self.model.start))
        parts = []
        for row in self.windows:
            states = self.model.trunk.after(self.layer, Tokens.left_padded([row], self.model.device))
            parts.append(whiten(states[0, first:].float()))
        return torch.cat(parts)

    def runs(self) -> dict[str, tuple[Callable[[], Any], tuple[int, int]]]:
        """Return ways to run the model, and how many rows and tokens of states each has."""

        def decode(cache: Any, rows: int) -> Callable[[], Any]:
            ids = self.prompt[:, :1].expand(rows, -1)
            return lambda: self.model.model(ids, past_key_values=borrow_cache(cache), use_cache=True)

        return {
            "prompt": (lambda: self.model.model(self.prompt), (1, WINDOW)),
            "decode": (decode(self.cache, 1), (1, 1)),
            "decode 8": (decode(self.wide_cache, 8), (8, 1)),
        }

    def measure(self, count: int, ledger: bool) -> dict[str, Any]:
        memory = self.rows.memory(count)
        row: dict[str, Any] = {"facts": count, "rows": len(memory)}
        parts = (memory.keys, memory.values, memory.thresholds, memory.owner)
        row["MB"] = sum(part.numel() * part.element_size() for part in parts) / 1e6
        self.measure_files(memory, row)
        cells = memory.with_cells()
        for name, dense in (("read", cells), ("all rows", memory)):
            for run, share in self.shares(dense).items():
                row[f"{name}, {run}"] = share
        length = memory.values.norm(dim=-1).median()
        row["missed"] = share_of((cells.read(self.text) - memory.read(self.text)).norm(dim=-1) > 0.01 * length)
        queries, subjects = self.rows.queries(1000, count)
        for name, dense in (("right", cells), ("right, all rows", memory)):
            wrong = (dense.read(queries) - memory.values[subjects]).norm(dim=-1)
            row[name] = share_of(wrong < 0.1 * length)
        fired = cells.total_weights(self.text) > FIRES
        row["fires"] = share_of(fired)
        if ledger:
            self.measure_ledger(count, row)
        return row

    def measure_files(self, memory: Dense, row: dict[str, Any]) -> None:
        whitening = self.editor.edited.dense.whitening(self.layer)
        probe = self.text[:1]
        layer = StoredLayer(self.model.sites[self.layer].block, memory, whitening, probe)
        stored = StoredMemory(self.model.fingerprint, self.model.name, {self.layer: layer}, [[0]])
        with tempfile.TemporaryDirectory() as folder:
            with timed(row, "save"):
                save_memory(stored, Path(folder, "memory"))
            row["file MB"] = sum(file.stat().st_size for file in Path(folder, "memory").iterdir()) / 1e6
            with timed(row, "load"):
                loaded = load_memory(Path(folder, "memory"))
            with timed(row, "attach"), attach(self.model.model, loaded):
                pass

    @torch.no_grad()
    def shares(self, memory: Dense) -> dict[str, float]:
        """Return the time of the hook over the time of the model, for each way to run it."""
        block = self.model.trunk.blocks[self.layer]
        hook = MemoryHook(self.editor.edited.dense.whitening(self.layer), memory)
        hook.whitening = replace(hook.whitening, mean=hook.whitening.mean.float(), factor=hook.whitening.factor.float())
        shares = {}
        for name, (_, (rows, tokens)) in self.runs().items():
            states = self.model.trunk.after(self.layer, Tokens.left_padded(self.windows[:1], self.model.device))
            states = states[:, -tokens:].expand(rows, -1, -1).contiguous()
            shares[name] = often(lambda states=states: hook(block, (), states)) / self.forward[name]
        return shares

    def measure_ledger(self, count: int, row: dict[str, Any]) -> None:
        """Measure one more fact in a ledger that holds so many, and undoing one."""
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger.open(Path(folder, "ledger"), self.model.fingerprint, model_name=self.model.name)
            self.editor.use_ledger(ledger)
            edited = self.editor.edited
            with mock.patch("os.fsync", new=int), edited.ledger.locked():  # int accepts the handle and does nothing
                for number, parts in enumerate(self.rows.edits(count)):
                    edited.ledger.append(self.edit(self.rows.names[number * BATCH :], *parts))
            one = next(self.rows.edits(BATCH))
            mine = one[2] == 0
            extra = self.edit(["Qzxv Stone"], one[0][mine], one[1][mine], one[2][mine], one[3][:1])
            with timed(row, "open"):
                edited.refresh()
            with timed(row, "add one"):
                stored = edited.ledger.append(extra)
                edited.refresh()
            with timed(row, "undo one"):
                self.editor.undo(stored.id)
            with timed(row, "undo 100 in the middle"):
                self.editor.undo(edited.ledger.edits[len(edited.ledger.edits) // 2].id)
            self.editor.use_ledger(Ledger.in_memory(self.model.fingerprint, self.model.name))

    def edit(self, names: Sequence[str], states: Tensor, thresholds: Tensor, owner: Tensor, values: Tensor) -> Edit:
        facts = tuple(Fact("The capital of {} is", name, "Rome") for name in names[: len(values)])
        settings: dict[str, JSON] = {
            "layers": [self.layer],
            "targets": {},
            "moments": self.editor.edited.moments.source,
            "seed": 0,
            "framings": list(self.editor.framings),
            "lam": None,
            ROWS: {"joint": [], "count": len(owner)},
        }
        tensors = {"states": states, "thresholds": thresholds, "owner": owner, "values": values}
        return Edit(
            facts=facts,
            method="dense",
            settings=settings,
            sites=(),
            tensors={"targets": values, **{f"{ROWS}/{name}": tensor for name, tensor in tensors.items()}},
            versions=library_versions(),
        )


def share_of(flags: Tensor) -> float:
    return float(flags.double().mean())


@torch.no_grad()
def often(run: Callable[[], Any]) -> float:
    """Return the processor's seconds of a call, the median of some."""
    run()
    seconds = []
    for _ in range(REPEATS):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return median(seconds)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table with a column per number of facts."""
    table = Table("", *(f"{row['facts']:,} facts" for row in rows))
    for name in rows[-1] | rows[0]:
        if name != "facts" and not name.endswith("(clock)"):
            table.add_row(name, *(f"{row[name]:,.4g}" if name in row else "" for row in rows))
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text, a paragraph per line")
    parser.add_argument("--facts", type=int, nargs="+", default=[1000, 10_000], help="multiples of 100")
    parser.add_argument("--framed", type=int, default=100, help="made facts that are run in every framing")
    parser.add_argument("--forward", type=int, default=10_000, help="subjects that are run through the model")
    parser.add_argument("--ledger", type=int, default=10_000, help="the largest number of facts in a ledger")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS / "dense-scale-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    editor = Editor(options.model, guard=None)
    layer = editor.settings("dense").layers[0]
    editor.edited.dense.load(layer)
    rows = Rows(editor, layer, max(options.facts), options.framed, options.forward)
    scale = Scale(rows, options.text.read_text(encoding="utf-8"), options.tokens)
    content: dict[str, Any] = {"machine": machine(), "model": options.model, "forward": scale.forward, "rows": []}
    for count in options.facts:
        content["rows"].append(scale.measure(count, count <= options.ledger))
        write_json(options.out, content)
    show(content["rows"])


if __name__ == "__main__":
    main()
