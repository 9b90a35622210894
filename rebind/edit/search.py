"""What the search for targets runs on: the model, or on a GPU a narrower copy of it.

A target is where a search ended, not a number with eight digits. On a GPU the many passes of a search run on a copy in
bfloat16 that is made for short sequences (`short`); what the search starts from is still the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from rebind.edit.kept import KeptTargets, resume_targets
from rebind.edit.objective import Request, TargetSettings, can_be_recorded
from rebind.edit.short import hurry
from rebind.edit.targets import Found
from rebind.edit.trunk import Trunk
from rebind.precision import tensor_float

BYTES = 8  # free, for every parameter, before a copy of two bytes each is made


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
        with tensor_float(True) if quick is None else nullcontext():
            return resume_targets(
                self.trunk, layer, requests, settings, self.fingerprint, kept, quick=quick, on_step=on_step
            )

    def _quick(self) -> Trunk | None:
        """The model in bfloat16, where searching on it pays and there is room for it."""
        if self._narrow is None and can_be_recorded(self.trunk) and self.trunk.dtype == torch.float32:
            size = sum(parameter.numel() for parameter in self.trunk.model.parameters())
            if torch.cuda.mem_get_info(self.trunk.device)[0] > BYTES * size:
                self._narrow = self.trunk.narrowed(torch.bfloat16)
                hurry(self._narrow.model)
        return self._narrow
