"""Target search for an editor: on the model or a faster copy of it, with stored results used again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from rebind.edit.targets.objective import FactPrompts, TargetSettings, can_record
from rebind.edit.targets.optimize import OnStep, TargetStates, find_targets
from rebind.edit.targets.search_copy import speed_up
from rebind.edit.targets.store import TargetStore, target_key
from rebind.models.trunk import Trunk
from rebind.precision import tensor_float

BYTES_PER_PARAMETER = 12  # GPU memory for the model (4), the copy (2) and the search itself


class TargetSearch:
    """Finds target states on a base model. The first search makes the copy, while the base weights are in place."""

    def __init__(self, trunk: Trunk, fingerprint: str) -> None:
        self.trunk, self.fingerprint = trunk, fingerprint
        self._copy: Trunk | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to search in. It depends on the size of the GPU, not on its free memory: results are repeatable."""
        own = self.trunk.dtype
        if own != torch.float32 or not can_record(self.trunk):
            return own
        size = sum(parameter.numel() for parameter in self.trunk.model.parameters())
        return torch.bfloat16 if torch.cuda.mem_get_info(self.trunk.device)[1] > BYTES_PER_PARAMETER * size else own

    def find(
        self,
        layer: int,
        facts: Sequence[FactPrompts],
        settings: TargetSettings,
        store: TargetStore,
        on_step: OnStep | None = None,
    ) -> TargetStates:
        """Return the target state of every fact: from the store, or by a search, the results of which are stored."""
        model = f"{self.fingerprint} in {self.dtype}"  # the dtype changes the targets
        keys = [target_key(model, layer, settings, fact) for fact in facts]
        rows = store.load(keys)
        missing = [index for index, key in enumerate(keys) if key not in rows]
        if missing:
            copy = self._search_copy()
            with tensor_float(True) if copy is None else nullcontext():
                found = find_targets(
                    self.trunk,
                    layer,
                    [facts[index] for index in missing],
                    settings,
                    search_trunk=copy,
                    on_step=on_step,
                    on_group=lambda group, part: store.save([keys[missing[index]] for index in group], part),
                )
            rows |= {keys[index]: found.select(torch.tensor([row])) for row, index in enumerate(missing)}
        return TargetStates.concatenate([rows[key].to(self.trunk.device) for key in keys])

    def _search_copy(self) -> Trunk | None:
        """Return the copy to search on; None where the search runs on the model itself."""
        if self.dtype == self.trunk.dtype:
            return None
        if self._copy is None or self._copy.dtype != self.dtype:
            self._copy = self.trunk.narrowed(self.dtype)
            speed_up(self._copy.model)
        return self._copy
