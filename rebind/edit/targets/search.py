"""Target search for an editor: on the model or a faster copy of it, with stored results used again.

Results are stored as they are found, so that an interrupted edit resumes where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from rebind.edit.targets.objective import FactPrompts, TargetSettings, can_record
from rebind.edit.targets.optimize import OnStep, TargetStates, find_targets
from rebind.edit.targets.search_copy import speed_up
from rebind.models.trunk import Trunk
from rebind.models.weights.placement import is_whole, waiting_constants
from rebind.parallel import gather, share, unite
from rebind.precision import tensor_float
from rebind.storage import open_tensors, path_inside, remove_file, seal_tensors, write_file

PARTS = ("states", "initial", "loss", "steps")  # of `TargetStates`, in this order
STALE_SECONDS = 7 * 24 * 3600
SMALL_MODEL = 50_000_000  # parameters: up to here, a CPU searches in float32
BYTES_PER_PARAMETER = 12  # GPU memory for the model (4), the copy (2) and the search itself


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply bfloat16 matrices."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch does not tell
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


class TargetStore:
    """A folder with one file per group of targets; without a folder nothing is stored.

    Several processes may share the folder: each one removes only the files of its own edit, and those of edits that
    nobody has continued for a week.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._requested: set[str] = set()  # keys of the edit at work
        self._files: dict[Path, Sequence[str]] = {}  # the keys in each file

    def begin(self) -> None:
        """Begin another edit: what earlier ones left here stays."""
        self._requested.clear()
        self._files.clear()

    def load(self, keys: Sequence[str]) -> dict[str, TargetStates]:
        """Return the stored targets among `keys`, as one row each. Damaged files are removed."""
        self._requested.update(keys)
        wanted = set(keys)
        rows: dict[str, TargetStates] = {}
        for file in sorted(self.folder.glob("targets-*.safetensors")) if self.folder else ():
            try:
                with open_tensors(file) as (opened, metadata):
                    self._files[file] = json.loads(metadata["keys"])
                    targets = TargetStates(*(opened.get_tensor(part) for part in PARTS))
            except (SafetensorError, KeyError, TypeError, ValueError):
                remove_file(file)
                continue
            except OSError:  # another process has just removed it
                continue
            for index, key in enumerate(self._files[file]):
                if key in wanted:
                    rows[key] = targets.select(torch.tensor([index]))
            if self._requested.isdisjoint(self._files[file]):
                self._remove_if_stale(file)
        return rows

    @staticmethod
    def _remove_if_stale(file: Path) -> None:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > STALE_SECONDS:
                file.unlink()

    def save(self, keys: Sequence[str], targets: TargetStates) -> None:
        """Store a group of targets."""
        if self.folder is None or not keys:
            return
        tensors = {part: getattr(targets, part).detach().cpu().contiguous() for part in PARTS}
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:24]
        file = path_inside(self.folder, f"targets-{name}.safetensors")
        write_file(file, seal_tensors(save(tensors, metadata={"keys": json.dumps(list(keys))})))
        self._files[file] = keys

    def clear(self) -> None:
        """Remove the targets of an edit, once it is in the ledger; what cannot be removed stays."""
        for file, keys in self._files.items():
            if self._requested.issuperset(keys):
                with suppress(OSError):  # the edit is written: this is no reason to fail
                    file.unlink(missing_ok=True)
        self._files.clear()


class TargetSearch:
    """Finds target states on a base model. The first search makes the copy, while the base weights are in place."""

    def __init__(self, trunk: Trunk, fingerprint: str, word_parts: Tensor | None = None) -> None:
        self.trunk, self.fingerprint, self.word_parts = trunk, fingerprint, word_parts
        self._copy: Trunk | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to search in: bfloat16 where that is faster, which takes a copy of the model.

        On a GPU it depends on the size of the memory, not on how much of it is free, so results are repeatable.
        """
        own = self.trunk.dtype
        size = sum(parameter.numel() for parameter in self.trunk.model.parameters())
        if own != torch.float32 or not is_whole(self.trunk.model):  # a copy would need all weights in one place
            return own
        if can_record(self.trunk):
            memory = torch.cuda.mem_get_info(self.trunk.device)[1]
            return torch.bfloat16 if memory > BYTES_PER_PARAMETER * size else own
        is_on_cpu = self.trunk.device.type == "cpu"
        return torch.bfloat16 if is_on_cpu and size > SMALL_MODEL and multiplies_bfloat16() else own

    def find(
        self,
        layer: int,
        facts: Sequence[FactPrompts],
        settings: TargetSettings,
        store: TargetStore,
        on_step: OnStep | None = None,
    ) -> TargetStates:
        """Return the target state of every fact: from the store, or by a search, the results of which are stored."""
        inputs = f"{self.fingerprint} in {self.dtype}", layer, settings  # beside the prompts, all a target depends on
        keys = [hashlib.sha256(repr((*inputs, fact)).encode()).hexdigest() for fact in facts]
        rows = store.load(keys)
        lacking = gather([index for index, key in enumerate(keys) if key not in rows], "missing targets")
        if missing := sorted({index for one in lacking for index in one}):  # in any process
            states = self._search(layer, facts, settings, share(missing), keys, store, on_step)
            rows |= {keys[index]: row for index, row in zip(missing, _rows_of_all(states), strict=True)}
        return TargetStates.concatenate([rows[key].to(self.trunk.device) for key in keys])

    def _search(
        self,
        layer: int,
        facts: Sequence[FactPrompts],
        settings: TargetSettings,
        chosen: Sequence[int],
        keys: Sequence[str],
        store: TargetStore,
        on_step: OnStep | None,
    ) -> TargetStates | None:
        """Search the targets of the chosen facts, which are the share of this process, and store them."""
        if not chosen:
            return None
        copy = self._search_copy()
        waiting = waiting_constants(self.trunk.model, self.trunk.device)
        with waiting, tensor_float(True) if copy is None else nullcontext():
            return find_targets(
                self.trunk,
                layer,
                [facts[index] for index in chosen],
                settings,
                search_trunk=copy,
                word_parts=self.word_parts,
                on_step=on_step,
                on_group=lambda group, part: store.save([keys[chosen[index]] for index in group], part),
            )

    def _search_copy(self) -> Trunk | None:
        """Return the copy to search on; None where the search runs on the model itself."""
        if self.dtype == self.trunk.dtype:
            return None
        if self._copy is None or self._copy.dtype != self.dtype:
            self._copy = self.trunk.narrowed(self.dtype)
            speed_up(self._copy.model)
        return self._copy


def _rows_of_all(states: TargetStates | None) -> list[TargetStates]:
    """Return one row per fact, in the order of the facts that processes shared."""
    own = (
        []
        if states is None
        else [[tensor[row : row + 1] for tensor in states.tensors()] for row in range(len(states.loss))]
    )
    return [TargetStates(*row) for row in unite(own)]
