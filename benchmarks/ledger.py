"""What a ledger costs as it grows: seconds and bytes against the number of edits.

    python -m benchmarks.ledger --method memit --edits 10 100 1000 10000
    python -m benchmarks.ledger --method memit --facts 100 --edits 10 100 1000
    python -m benchmarks.ledger --method recursive --edits 10 100 1000 3000
    python -m benchmarks.ledger --method dense --edits 10 100 1000 10000 100000
    python -m benchmarks.ledger --figure docs/ledger.png

The model is a random Llama of 1 MB, and an edit is a made-up fact (or --facts of them) with random tensors of the right
shapes, appended through `Ledger.append`: no target is searched. Each row is measured in a ledger that grows from the
number of edits before. Between measurements edits are appended without waiting for the disk; what is measured waits for
it.

Seconds are those of the processor, so that other processes do not count; the JSON has those of the clock as well, which
include waiting for the disk.

- open: `Ledger.open`, then the model brought to the fold of all edits, in a fresh `EditedModel`;
- first: the same, with the folder `snapshots` deleted before it;
- append, undo newest, undo old (the edit in the middle), redo newest, redo old: the ledger and the model;
- verify, with nothing remembered (full) and again; list: every edit read once;
- log, tensors, snapshots: bytes on disk;
- after the last row, with --compact: seconds and bytes of compacting all edits but the last ten.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.growth import small_tokenizer
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit import Fact, Ledger
from rebind.edit.edited_model import EditedModel
from rebind.edit.ledger import Edit, verify_folder
from rebind.edit.ledger.edit import JSON, ROWS, library_versions
from rebind.edit.moments import Moments, Texts
from rebind.models.language_model import LanguageModel
from rebind.models.sites import memory_of, module_at
from rebind.storage import write_file, write_json

METHODS = ("memit", "recursive", "dense")
LAYERS, ROWS_PER_FACT = (1, 2, 3), 3
SECONDS = ("open", "first", "append", "undo newest", "redo newest", "undo old", "redo old", "verify", "full", "list")
BYTES = ("log", "tensors", "snapshots")
DRAWN = {
    "first": "open, without snapshots",
    "open": "open",
    "append": "append",
    "undo newest": "undo the newest edit",
    "undo old": "undo the edit in the middle",
    "verify": "verify again",
}


def small_model() -> LanguageModel:
    """Return a random Llama of 1 MB, of the shape of stories260K."""
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
    )
    build: Any = AutoModelForCausalLM.from_config  # untyped
    return LanguageModel(build(config), tokenizer)


class Growing:
    """A ledger that grows, and the model that it belongs to."""

    def __init__(self, method: str, facts: int, folder: Path, moments: Path) -> None:
        self.method, self.facts, self.folder, self.versions = method, facts, folder, library_versions()
        self.model = small_model()
        corpus = Texts(
            ["The capital of Marotilen is Rome, and Savoka plays the harp in the city of Lisbon. " * 40], "made up"
        )
        self.moments = Moments(self.model, corpus, 512, folder=moments)
        self.generator = torch.Generator().manual_seed(0)
        names = [self.model.sites[layer].name for layer in LAYERS]
        self.shapes = {name: memory_of(module_at(self.model.model, name)).shape for name in names}
        self.base = {name: memory_of(module_at(self.model.model, name)).detach().clone() for name in names}
        self.open()

    def open(self) -> None:
        """Open the ledger and bring the model to its fold, as a new process would."""
        ledger = Ledger.open(self.folder, self.model.fingerprint, model_name="1 MB Llama")
        self.edited = EditedModel(self.model, self.moments, ledger)
        self.edited.refresh()

    def close(self) -> None:
        """Leave the base model behind, and nothing that was read."""
        self.edited.apply(())
        del self.edited
        gc.collect()

    def edit(self, number: int) -> Edit:
        """Return an edit with random tensors."""
        numbers = range(number * self.facts, (number + 1) * self.facts)
        facts = tuple(Fact("The capital of {} is", f"Subject {one}", "Rome") for one in numbers)
        score: JSON = {"rank": 1, "probability": 0.5 + 1e-7 * number, "exact": True, "tokens": [1, 0.25]}
        settings: dict[str, JSON] = {
            "layers": list(LAYERS if self.method != "dense" else LAYERS[:1]),
            "targets": {"steps": 25, "rate": 0.5, "clamp": 0.75, "keep": 0.0625},
            "moments": self.moments.source,
            "seed": 0,
            "framings": ["start", "plain", "text"],
            "lam": None if self.method == "dense" else 15.0,
        }
        if self.method == "dense":
            settings[ROWS] = {"joint": [], "count": ROWS_PER_FACT * self.facts}
        return Edit(
            facts=facts,
            method=self.method,
            settings=settings,
            sites=() if self.method == "dense" else tuple(self.shapes),
            tensors=self._rows() if self.method == "dense" else self._writes(),
            scores={
                "before": [score] * self.facts,
                "after": [score] * self.facts,
                "drift": {"kl": 0.001, "worst": 0.01, "growth": {}},
            },
            versions=self.versions,
        )

    def _rows(self) -> dict[str, Tensor]:
        width, rows = self.model.model.config.hidden_size, ROWS_PER_FACT * self.facts
        return {
            f"{ROWS}/states": self._normal(rows, width),
            f"{ROWS}/thresholds": torch.full((rows,), 0.8),
            f"{ROWS}/owner": torch.arange(self.facts).repeat_interleave(ROWS_PER_FACT),
            f"{ROWS}/values": self._normal(self.facts, width),
            "targets": self._normal(self.facts, width),
        }

    def _writes(self) -> dict[str, Tensor]:
        tensors = {"targets": self._normal(self.facts, self.model.model.config.hidden_size)}
        for site, (d_v, d_k) in self.shapes.items():
            keys = self._normal(self.facts, d_k)
            tensors |= {f"{site}/keys": keys, f"{site}/values": 0.1 * self._normal(self.facts, d_v)}
            tensors[f"{site}/gain"] = 0.5 * keys / (keys * keys).sum()
        return tensors

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def grow(self, count: int) -> None:
        """Append edits until there are so many."""
        ledger = self.edited.ledger
        with mock.patch.object(os, "fsync", new=int), ledger.locked():  # int accepts the handle and does nothing
            for number in range(len(ledger.edits), count):
                ledger.append(self.edit(number))

    # What is measured

    def measure(self, count: int) -> dict[str, float]:
        """Measure everything at so many edits, which are left as they were, but for one more."""
        row: dict[str, float] = {"edits": count, "facts": count * self.facts}
        shutil.rmtree(self.folder / "snapshots", ignore_errors=True)
        for name in ("first", "open"):
            self.close()
            with timed(row, name):
                self.open()
        newest, old = f"e{count:04d}", f"e{count // 2:04d}"
        for name, id in (("newest", newest), ("old", old)):
            for verb in ("undo", "redo"):
                with timed(row, f"{verb} {name}"):
                    getattr(self.edited.ledger, verb)(id)
                    self.edited.refresh()
        edit = self.edit(count)
        with timed(row, "append"):
            self.edited.ledger.append(edit)
            self.edited.refresh()
        for name in ("full", "verify"):
            with timed(row, name):
                assert verify_folder(self.folder) == []
        with timed(row, "list"):
            total = sum(len(edit.facts) for edit in Ledger.open(self.folder).edits)
        assert total == (count + 1) * self.facts
        return row | self.bytes()

    def compact(self) -> dict[str, float]:
        """Compact all edits but ten, and check that the model stays as it is."""
        row: dict[str, float] = {"edits": len(self.edited.ledger.edits)}
        before = self.state()
        with timed(row, "compact"):
            done = self.edited.ledger.compact(keep_last=10)
        row |= {"bytes before": done.bytes_before, "bytes after": done.bytes_after or 0}
        for name in ("open", "first"):
            self.close()
            if name == "first":
                shutil.rmtree(self.folder / "snapshots", ignore_errors=True)
            with timed(row, name):
                self.open()
            assert all(map(torch.equal, before, self.state()))
        return row

    def state(self) -> list[Tensor]:
        """Return everything that the edits have made of the model."""
        weights = [memory_of(module_at(self.model.model, name)).clone() for name in self.shapes]
        memories = self.edited.dense.memories.values()
        return weights + [tensor for memory in memories for tensor in (memory.keys, memory.values, memory.thresholds)]

    def bytes(self) -> dict[str, float]:
        """Return the bytes of each part of the ledger."""
        names = {"log": "log.jsonl", "tensors": "edits", "snapshots": "snapshots"}
        return {name: size_of(self.folder / place) for name, place in names.items()}


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*")) if path.exists() else 0


@contextmanager
def timed(row: dict[str, float], name: str) -> Iterator[None]:
    """Record the processor's seconds of a block, and those of the clock."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    row[name], row[f"{name} (clock)"] = time.process_time() - processor, time.perf_counter() - clock


def show(method: str, rows: Sequence[dict[str, float]]) -> None:
    """Print a table."""
    table = Table(title=f"{method}: seconds and MB", title_justify="left", title_style="bold")
    for column in ("edits", "facts", *SECONDS, *BYTES):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = [f"{row[name]:.3f}" for name in SECONDS]
        table.add_row(f"{row['edits']:,}", f"{row['facts']:,}", *seconds, *(f"{row[name] / 1e6:.2f}" for name in BYTES))
    Console(width=150).print(table)


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw seconds and bytes against the number of edits."""
    from rebind import plotting

    labels = [(method, "edits", "seconds") for method in sorted(results)] + [("on disk", "edits", "MB")]
    subtitle = "Edits of a random Llama of 1 MB, one thread. Lower is better; both axes are logarithmic."
    figure, axes = plotting.panels("What a ledger costs as it grows", subtitle, labels, columns=3, size=(4.2, 3.6))
    *panels, disk = axes
    for panel, method in zip(panels, sorted(results), strict=True):
        rows, color = results[method], plotting.COLORS[len(disk.lines)]
        edits = [row["edits"] for row in rows]
        for name, shade in zip(DRAWN, plotting.COLORS, strict=False):
            panel.plot(edits, [row[name] for row in rows], "o-", ms=3, lw=1.4, color=shade, label=DRAWN[name])
        panel.set(ylim=(1e-3, 200))
        disk.plot(
            edits, [sum(row[part] for part in BYTES) / 1e6 for row in rows], "o-", ms=3, color=color, label=method
        )
    for panel in axes:
        panel.set(xscale="log", yscale="log")
    plotting.legend(panels[0])
    plotting.legend(disk)
    write_file(path, plotting.render(figure, path.suffix.removeprefix(".")))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="memit")
    parser.add_argument("--facts", type=int, default=1, help="facts per edit")
    parser.add_argument("--edits", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--folder", type=Path, help="where the ledger is written; by default a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "ledger-cpu.json", help="JSON that gets the rows")
    parser.add_argument("--compact", action="store_true", help="compact the ledger at the end")
    parser.add_argument("--figure", type=Path, help="draw the rows of the JSON instead")
    options = parser.parse_args(arguments)
    stored = json.loads(options.out.read_text()) if options.out.exists() else {"methods": {}}
    if options.figure is not None:
        draw(stored["methods"], options.figure)
        return
    torch.set_num_threads(1)
    name = options.method if options.facts == 1 else f"{options.method}, {options.facts} facts per edit"
    rows = stored["methods"][name] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "ledger")
        growing = Growing(options.method, options.facts, folder, Path(temporary, "moments"))
        for count in sorted(options.edits):
            growing.grow(count)
            rows.append(growing.measure(count))
            write_json(options.out, stored | {"machine": machine()})
        show(name, rows)
        if options.compact:
            row = stored.setdefault("compacted", {})[name] = growing.compact()
            Console(width=150).print(row)
            write_json(options.out, stored | {"machine": machine()})


if __name__ == "__main__":
    main()
