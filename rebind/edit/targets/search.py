"""Target search for an editor: on the model or a faster copy of it, with stored results used again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from rebind.edit.targets.objective import FactPrompts, TargetSettings
from rebind.edit.targets.optimize import OnStep, TargetStates, find_targets
from rebind.edit.targets.search_copy import SearchCopy
from rebind.edit.targets.store import TargetStore, target_key
from rebind.models.trunk import Trunk
from rebind.precision import tensor_float


class TargetSearch:
    """Finds target states on a base model."""

    def __init__(self, trunk: Trunk, fingerprint: str) -> None:
        self.trunk, self.fingerprint = trunk, fingerprint
        self.copy = SearchCopy(trunk)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the search runs in."""
        return self.copy.dtype

    def find(
        self,
        layer: int,
        facts: Sequence[FactPrompts],
        settings: TargetSettings,
        store: TargetStore,
        on_step: OnStep | None = None,
        *,
        tokens_at_once: int | None = None,
    ) -> TargetStates:
        """Return the target state of every fact: from the store, or by a search, the results of which are stored."""
        model = f"{self.fingerprint} in {self.dtype}"  # the dtype changes the targets
        keys = [target_key(model, layer, settings, fact) for fact in facts]
        rows = store.load(keys)
        missing = [index for index, key in enumerate(keys) if key not in rows]
        if missing:
            search_trunk = self.copy.trunk()
            with tensor_float(True) if search_trunk is None else nullcontext():
                found = find_targets(
                    self.trunk,
                    layer,
                    [facts[index] for index in missing],
                    settings,
                    search_trunk=search_trunk,
                    tokens_at_once=tokens_at_once,
                    on_step=on_step,
                    on_group=lambda group, part: store.save([keys[missing[index]] for index in group], part),
                )
            rows |= {keys[index]: found.select(torch.tensor([row])) for row, index in enumerate(missing)}
        return TargetStates.concatenate([rows[key].to(self.trunk.device) for key in keys])
