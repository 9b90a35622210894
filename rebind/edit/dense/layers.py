"""The dense memory of an editor's model: like its weights, it is always the fold of some edits, in their order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from rebind.edit.dense.files import StoredLayer, StoredMemory
from rebind.edit.dense.fold import DenseFold, EditKeys, matters
from rebind.edit.dense.hook import MemoryHook, require_no_memory
from rebind.edit.dense.rows import EditRows
from rebind.edit.dense.snapshot import store_fold, stored_fold
from rebind.edit.facts.fact import Fact
from rebind.edit.guard import CANARY_PROMPTS
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.snapshots import Snapshots
from rebind.edit.moments import Moments, OldStates
from rebind.memory.dense import Dense, Whitening
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens
from rebind.models.weights.placement import device_of

PROBES = CANARY_PROMPTS[:8]
FIRES = 0.5  # a token reads the memory if its rows weigh more than the empty slot


class DenseLayers:
    """The memories of a model by layer, and the hooks that read them."""

    def __init__(self, model: LanguageModel, moments: Moments) -> None:
        self.model, self.moments = model, moments
        self.memories: dict[int, Dense] = {}  # as the model stands
        self.old_states: dict[int, OldStates] = {}
        self._whitenings: dict[int, Whitening] = {}
        self._hooks: dict[MemoryHook, RemovableHandle] = {}
        self._folds: list[DenseFold] = []  # the last two: an undo folds first, to see that it can, and then applies
        self._unstored_seconds = 0.0  # that folding took since a snapshot was written
        self.require_no_other()

    def require_no_other(self) -> None:
        """Raise if the model reads a dense memory that was attached to it: it would not be that of the edits."""
        for site in self.model.sites:
            require_no_memory(module_at(self.model.model, site.block), site.block, self._hooks)

    def fold(self, edits: Sequence[Edit], snapshots: Snapshots | None = None) -> dict[int, Dense]:
        """Return the memory of every layer after these edits; the model is not changed. Whitenings must be loaded."""
        edits = EditSequence.of(edits).where(matters)
        if not len(edits):
            return {}
        known = next((fold for fold in self._folds if np.array_equal(fold.tokens, edits.tokens)), None)
        if known is None:
            known = self._fold(edits, snapshots)
            self._folds = [known, *self._folds[:1]]
        return known.memories

    def _fold(self, edits: EditSequence, snapshots: Snapshots | None) -> DenseFold:
        begin = time.perf_counter()
        start = self._folds[0] if self._folds else None
        if start is None and snapshots is not None:
            start = stored_fold(snapshots, self._whitenings)
        fold = (start or DenseFold.empty()).after(edits, self._with_keys)
        self._unstored_seconds += time.perf_counter() - begin
        if snapshots is not None and store_fold(snapshots, fold, self._whitenings, self._unstored_seconds):
            self._unstored_seconds = 0.0
        return fold

    def set(self, memories: Mapping[int, Dense]) -> None:
        """Let the model read these memories, and no others."""
        for handle in self._hooks.values():
            handle.remove()
        self.memories, self._hooks = dict(memories), {}
        for layer, memory in memories.items():
            block = module_at(self.model.model, self.model.sites[layer].block)
            hook = MemoryHook.on(block, self.whitening(layer), memory, self.model.trunk.stream_axis)
            self._hooks[hook] = block.register_forward_hook(hook)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run a block without the memories."""
        memories = self.memories
        self.set({})
        try:
            yield
        finally:
            self.set(memories)

    def missing(self, edits: Sequence[Edit]) -> list[int]:
        """Return the layers of these edits for which no whitening is loaded."""
        layers = {kind.layers[0] for kind in EditSequence.of(edits).kinds() if kind.has_rows}
        return sorted(layer for layer in layers if layer not in self._whitenings)

    def load(self, layer: int) -> None:
        """Load or compute the statistics of the states behind a layer. The model must be the base model."""
        if layer not in self._whitenings:
            states = self.moments.collect_states(self.model.sites[layer].block)
            self.old_states[layer] = states
            self._whitenings[layer] = Whitening.fit(states.mean, states.covariance)

    def whitening(self, layer: int) -> Whitening:
        return self._whitenings[layer]

    def rows(self) -> int:
        """Return the number of rows that the model reads."""
        return sum(len(memory) for memory in self.memories.values())

    def fires(self) -> float:
        """Return the share of states of ordinary text that read the memory."""
        shares = []
        for layer, memory in self.memories.items():
            queries = self.whitening(layer)(self.old_states[layer].sample.to(memory.keys))
            shares.append(float((memory.total_weights(queries) > FIRES).double().mean()))
        return max(shares, default=0.0)

    def stored(self, memories: Mapping[int, Dense], facts: Sequence[Fact]) -> StoredMemory:
        """Return memories in the form that travels. The model must be the base model: it runs the probes."""
        model = self.model.with_chat(False)
        probes = [prompt.ids for prompt in model.encode([Prompt(text) for text in PROBES], truncate=True)]
        probes = [ids[: model.context_length] for ids in probes]
        layers = {}
        for layer, memory in memories.items():
            rows = [model.trunk.after(layer, Tokens.left_padded([ids], model.device))[0, -1] for ids in probes]
            whitening, block = self.whitening(layer), model.sites[layer].block
            probe = whitening(torch.stack(rows))
            layers[layer] = StoredLayer(block, memory, whitening, probe, model.trunk.stream_axis)
        return StoredMemory(model.fingerprint, model.name, layers, probes, tuple(facts))

    def _with_keys(self, edit: Edit) -> EditKeys:
        rows = EditRows.of(edit)
        block = module_at(self.model.model, self.model.sites[rows.layer].block)
        device = device_of(block)
        states, values, thresholds = (part.to(device) for part in (rows.states, rows.values, rows.thresholds))
        return EditKeys(rows, self.whitening(rows.layer)(states), values, thresholds, rows.owner.to(device))
