"""What the search for targets runs on: the model, or on a GPU a narrower copy of it.

A target is where a search ended, not a number with eight digits. On a GPU the many passes of a search run on a copy in
bfloat16 that is made for short sequences (`short`); what the search starts from is still the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from rebind.edit.targets.objective import Request, TargetSettings, can_be_recorded
from rebind.edit.targets.optimize import Found
from rebind.edit.targets.search_copy import hurry
from rebind.edit.targets.store import KeptTargets, resume_targets
from rebind.models.trunk import Trunk
from rebind.precision import tensor_float

ROOM = 12  # bytes of a GPU for every parameter: the model's four, the copy's two, and some to search in


class Search:
    """Searches on one base model. The copy is made at the first, when the base model's weights are in place."""

    def __init__(self, trunk: Trunk, fingerprint: str) -> None:
        self.trunk, self.fingerprint = trunk, fingerprint
        self._narrow: Trunk | None = None

    def find(
        self,
        layer: int,
        requests: Sequence[Request],
        settings: TargetSettings,
        kept: KeptTargets,
        on_step: Callable[[int, int, float], None],
    ) -> Found:
        quick = self._quick()
        model = f"{self.fingerprint} in {self.dtype}"  # targets found in another dtype are others
        with tensor_float(True) if quick is None else nullcontext():
            return resume_targets(self.trunk, layer, requests, settings, model, kept, quick=quick, on_step=on_step)

    @property
    def dtype(self) -> torch.dtype:
        """What is searched in. A GPU's size decides, and not what is free on it today: results can be repeated."""
        own = self.trunk.dtype
        if own != torch.float32 or not can_be_recorded(self.trunk):
            return own
        size = sum(parameter.numel() for parameter in self.trunk.model.parameters())
        return torch.bfloat16 if torch.cuda.mem_get_info(self.trunk.device)[1] > ROOM * size else own

    def _quick(self) -> Trunk | None:
        """The model in the dtype to search in, if it has another."""
        if self.dtype == self.trunk.dtype:
            return None
        if self._narrow is None or self._narrow.dtype != self.dtype:
            self._narrow = self.trunk.narrowed(self.dtype)
            hurry(self._narrow.model)
        return self._narrow
