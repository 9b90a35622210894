"""Resumable sums over the batches of a text, computed by one process or by several that each read a share.

A sum records which batches are in it. An interrupted run can be resumed by any number of processes: the partial sums of
all processes are added, and the batches that are in none of them are read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from rebind.parallel import gather, is_writer, ranks, sum_tensors
from rebind.storage import open_tensors, remove_file, seal_tensors, write_file

SAMPLE_SIZE = 2048  # states after a block that are stored as a sample of ordinary text
TOTAL, SAMPLE, ORDER = "total", "sample", "order"  # tensors in a file; ORDER only in files of partial sums


def sample_names(block: str) -> tuple[str, str]:
    """Return the names of a block's sample of states [s, d], and of their batch numbers [s]."""
    return f"{block}/{SAMPLE}", f"{block}/{ORDER}"


@dataclass
class Sums:
    """The sums so far. Whole batches are added, so they can be saved at any time."""

    totals: dict[str, Tensor] = field(default_factory=dict)  # by site or block; samples by `sample_names`
    keys: int = 0
    tokens_read: int = 0  # including start tokens
    batches: set[int] = field(default_factory=set)

    def add(self, batch: int, moments: dict[str, Tensor], keys: int, tokens_read: int) -> None:
        """Add the moments of a batch."""
        samples = [name for name in moments if name.endswith(f"/{SAMPLE}")]
        orders = {_order_of(name): torch.full((len(moments[name]),), batch) for name in samples}
        self.merge(Sums({**moments, **orders}, keys, tokens_read, {batch}))

    def merge(self, other: Sums) -> None:
        """Add other sums, of other batches, to these."""
        totals = dict(other.totals)
        for name, total in self.totals.items():
            if name not in totals:
                totals[name] = total
            elif name.endswith((f"/{SAMPLE}", f"/{ORDER}")):
                totals[name] = torch.cat([total.to(totals[name].device), totals[name]])
            else:
                totals[name] = totals[name] + total.to(totals[name].device)
        for name in [name for name in totals if name.endswith(f"/{SAMPLE}")]:  # keep the first states of the text
            first = totals[_order_of(name)].argsort(stable=True)[:SAMPLE_SIZE]
            for part in (name, _order_of(name)):
                totals[part] = totals[part][first.to(totals[part].device)]
        self.totals, self.batches = totals, self.batches | other.batches
        self.keys, self.tokens_read = self.keys + other.keys, self.tokens_read + other.tokens_read

    def over_processes(self) -> Sums:
        """Return the sums of all processes together."""
        if ranks().count == 1:
            return self
        samples = {name: total for name, total in self.totals.items() if name.endswith((f"/{SAMPLE}", f"/{ORDER}"))}
        local = {name: total.cpu() for name, total in self.totals.items() if name not in samples}
        shapes = {name: list(total.shape) for name, total in local.items()}
        parts = gather([samples, shapes, self.keys, self.tokens_read, sorted(self.batches)], "sums of moments")
        united = Sums()
        for process_samples, _, keys, tokens_read, batches in parts:
            united.merge(Sums(process_samples, keys, tokens_read, set(batches)))
        shapes = {name: shape for part in parts for name, shape in part[1].items()}  # a process may have read nothing
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sorted(shapes.items())}
        united.totals |= sum_tensors({name: local.get(name, zero) for name, zero in zeros.items()})
        return united

    def save(self, path: Path) -> None:
        totals = {name: total.cpu().contiguous() for name, total in self.totals.items()}
        counts = {"keys": self.keys, "read": self.tokens_read, "batches": sorted(self.batches), "name": path.name}
        metadata = {name: json.dumps(count) for name, count in counts.items()}
        write_file(path, seal_tensors(save(totals, metadata=metadata)))

    @classmethod
    def load(cls, path: Path, names: Iterable[str]) -> Sums | None:
        """Return the sums in a file, or None if it is missing or damaged."""
        try:
            with open_tensors(path) as (file, metadata):
                counts = {name: json.loads(count) for name, count in metadata.items()}
                if counts["name"] != path.name:
                    return None  # the file of another site
                batches = set(map(int, counts["batches"]))
                totals = {name: file.get_tensor(name) for name in names}
                return cls(totals, int(counts["keys"]), int(counts["read"]), batches)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError):
            return None


def _order_of(sample: str) -> str:
    return sample.removesuffix(SAMPLE) + ORDER


class PartialSums:
    """The files of an unfinished run: one per process, with its sums so far."""

    def __init__(self, folder: Path, digest: str, names: Sequence[str]) -> None:
        self.folder, self.digest, self.names = folder, digest, names
        rank = ranks().rank
        self._file = folder / (f"{digest}-{rank}.partial" if rank else f"{digest}.partial")

    def save(self, sums: Sums) -> None:
        """Save the sums of this process."""
        sums.save(self._file)

    def load(self) -> Sums:
        """Return the sums of all processes of an earlier run, merged into the file of this process.

        If a merge was interrupted, there are both the merged file and its parts. A file whose batches overlap with
        those of a larger one is ignored.
        """
        files = self._files()
        parts = [part for file in files if (part := Sums.load(file, self.names)) is not None]
        sums = Sums()
        for part in sorted(parts, key=lambda part: -len(part.batches)):
            if not part.batches & sums.batches:
                sums.merge(part)
        if len(files) > 1:
            if sums.batches:
                self.save(sums)
            for file in files:
                if file != self._file:
                    remove_file(file)
        return sums

    def remove(self, older_than: float = 0.0) -> None:
        """Remove the files when they are of no use any more, if they are older than so many seconds."""
        if is_writer():
            for file in self._files():
                with contextlib.suppress(OSError):
                    if time.time() - file.stat().st_mtime >= older_than:
                        file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.digest}*.partial"))
