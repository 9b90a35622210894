"""Sums over batches of a text, saved on the way: by one process, or by several that each read a share of it.

A sum knows which batches are in it. A run that was killed is resumed by any number of processes: the partial sums of
all processes are added, and the batches that are in none of them are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from rebind.parallel import gather, is_writer, ranks, sum_tensors
from rebind.storage import open_tensors, seal_tensors, write_file

STATES_KEPT = 2048  # of the states behind a block, as a sample of ordinary text
TOTAL, SAMPLE, ORDER = "total", "sample", "order"  # the tensors in a file of results; ORDER in partial ones alone


def sample_names(block: str) -> tuple[str, str]:
    """Return the names of a block's sample of states [s, d], and of the batch that each of them is from [s]."""
    return f"{block}/{SAMPLE}", f"{block}/{ORDER}"


@dataclass
class Sums:
    """The sums so far. Whole batches are added, so they can be saved at any time."""

    totals: dict[str, Tensor] = field(default_factory=dict)  # by site or block; also the samples
    keys: int = 0
    read: int = 0  # tokens, start tokens included
    batches: set[int] = field(default_factory=set)

    def add(self, batch: int, moments: dict[str, Tensor], keys: int, read: int) -> None:
        """Add the moments of a batch."""
        samples = [name for name in moments if name.endswith(f"/{SAMPLE}")]
        orders = {_order_of(name): torch.full((len(moments[name]),), batch) for name in samples}
        self.merge(Sums({**moments, **orders}, keys, read, {batch}))

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
        for name in [name for name in totals if name.endswith(f"/{SAMPLE}")]:  # the first states of the text
            first = totals[_order_of(name)].argsort(stable=True)[:STATES_KEPT]
            for part in (name, _order_of(name)):
                totals[part] = totals[part][first.to(totals[part].device)]
        self.totals, self.batches = totals, self.batches | other.batches
        self.keys, self.read = self.keys + other.keys, self.read + other.read

    def over_processes(self) -> Sums:
        """Return the sums of all processes together."""
        if ranks().count == 1:
            return self
        samples = {name: total for name, total in self.totals.items() if name.endswith((f"/{SAMPLE}", f"/{ORDER}"))}
        own = {name: total.cpu() for name, total in self.totals.items() if name not in samples}
        shapes = {name: list(total.shape) for name, total in own.items()}
        parts = gather([samples, shapes, self.keys, self.read, sorted(self.batches)], "sums of moments")
        whole = Sums()
        for part, _, keys, read, batches in parts:
            whole.merge(Sums(part, keys, read, set(batches)))
        shapes = {name: shape for part in parts for name, shape in part[1].items()}  # a process may have read nothing
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sorted(shapes.items())}
        whole.totals |= sum_tensors({name: own.get(name, zero) for name, zero in zeros.items()})
        return whole

    def save(self, path: Path) -> None:
        totals = {name: total.cpu().contiguous() for name, total in self.totals.items()}
        counts = {"keys": self.keys, "read": self.read, "batches": sorted(self.batches), "name": path.name}
        metadata = {name: json.dumps(count) for name, count in counts.items()}
        write_file(path, seal_tensors(save(totals, metadata=metadata)))

    @classmethod
    def load(cls, path: Path, names: Iterable[str]) -> Sums | None:
        """Return the sums in a file; None if there is none, or a damaged one, which will be replaced."""
        try:
            with open_tensors(path) as (file, metadata):
                counts = {name: json.loads(count) for name, count in metadata.items()}
                if counts["name"] != path.name:
                    return None  # of another site
                batches = counts["batches"]
                batches = set(range(batches) if isinstance(batches, int) else map(int, batches))
                totals = {name: file.get_tensor(name) for name in names}
                return cls(totals, int(counts["keys"]), int(counts["read"]), batches)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError):
            return None


def _order_of(sample: str) -> str:
    return sample.removesuffix(SAMPLE) + ORDER


class PartialSums:
    """The files of a run that is not finished: one for each process, with the sums that it has so far."""

    def __init__(self, folder: Path, digest: str, names: Sequence[str]) -> None:
        self.folder, self.digest, self.names = folder, digest, names
        rank = ranks().rank
        self._own = folder / (f"{digest}-{rank}.partial" if rank else f"{digest}.partial")

    def save(self, sums: Sums) -> None:
        """Save the sums of this process."""
        sums.save(self._own)

    def load(self) -> Sums:
        """Return the sums of all processes of an earlier run, and keep them in one file: that of this process.

        A kill may leave the sum of some files beside these files; what overlaps with a larger one is left out.
        """
        files = self._files()
        loaded = sorted(
            filter(None, (Sums.load(file, self.names) for file in files)), key=lambda one: -len(one.batches)
        )
        sums = Sums()
        for one in loaded:
            if not one.batches & sums.batches:
                sums.merge(one)
        if len(files) > 1:
            if sums.batches:
                self.save(sums)
            for file in files:
                if file != self._own:
                    file.unlink(missing_ok=True)
        return sums

    def remove(self) -> None:
        """Remove the files, when they are of no use any more."""
        if is_writer():
            for file in self._files():
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.digest}*.partial"))
