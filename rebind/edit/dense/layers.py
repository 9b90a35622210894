"""The dense memory of an editor's model: like its weights, it is always the fold of some edits, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from rebind.edit.dense.files import StoredLayer, StoredMemory
from rebind.edit.dense.hook import MemoryHook, require_no_memory
from rebind.edit.dense.rows import EditRows, Variant, moved_subjects, read_variants
from rebind.edit.facts.fact import Fact
from rebind.edit.guard import CANARY_PROMPTS
from rebind.edit.ledger.edit import Edit
from rebind.edit.moments import Moments, OldStates
from rebind.memory.dense import Dense, Whitening
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens

PROBES = CANARY_PROMPTS[:8]
FIRES = 0.5  # a token reads the memory if its rows weigh more than the empty slot


@dataclass(eq=False)
class _EditKeys:
    """The rows of an edit on their device, with whitened keys."""

    rows: EditRows
    keys: Tensor  # [m, d]
    values: Tensor  # [v, d]
    thresholds: Tensor  # [m]
    owner: Tensor  # [m]

    @cached_property
    def all_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and thresholds of all rows."""
        return self.keys, self.values[self.owner], self.thresholds

    def rows_of(self, variants: Sequence[int], values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and thresholds of the rows of some variants, with these values of all of them."""
        every_row = self.all_rows if values is self.values else (self.keys, values[self.owner], self.thresholds)
        if len(variants) == len(values):
            return every_row
        mask = torch.zeros(len(values), dtype=torch.bool, device=self.owner.device)
        mask[list(variants)] = True
        rows = mask[self.owner]
        keys, row_values, thresholds = every_row
        return keys[rows], row_values[rows], thresholds[rows]


class DenseLayers:
    """The memories of a model by layer, and the hooks that read them."""

    def __init__(self, model: LanguageModel, moments: Moments) -> None:
        for site in model.sites:  # the base model of an editor has no memory
            require_no_memory(module_at(model.model, site.block), site.block)
        self.model, self.moments = model, moments
        self.memories: dict[int, Dense] = {}  # as the model stands
        self.old_states: dict[int, OldStates] = {}
        self._whitenings: dict[int, Whitening] = {}
        self._edit_keys: WeakKeyDictionary[Edit, _EditKeys] = WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []
        self._last_edits: tuple[Edit, ...] = ()  # those that were folded last, and the result
        self._last_fold: dict[int, Dense] = {}

    def fold(self, edits: Sequence[Edit]) -> dict[int, Dense]:
        """Return the memory of every layer after these edits; the model is not changed. Whitenings must be loaded."""
        last = self._last_edits
        if len(last) != len(edits) or any(one is not other for one, other in zip(last, edits, strict=True)):
            self._last_fold, self._last_edits = self._fold(edits), tuple(edits)
        return self._last_fold  # an undo folds first, to see that it can, and then applies

    def _fold(self, edits: Sequence[Edit]) -> dict[int, Dense]:
        with_keys = [self._with_keys(edit) for edit in edits if edit.has_rows]
        ids = [edit.id for edit in edits if edit.has_rows]
        read = read_variants([(id, one.rows) for id, one in zip(ids, with_keys, strict=True)], moved_subjects(edits))
        values = [one.values for one in with_keys]
        used: list[list[int]] = [[] for _ in with_keys]  # variants
        for variants in read.values():
            for index, variant in variants:
                used[index].append(variant)
            if len(variants) > 1:
                _add_up(variants, with_keys, values)
        parts: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for one, chosen, own in zip(with_keys, used, values, strict=True):
            if chosen:
                parts.setdefault(one.rows.layer, []).append(one.rows_of(chosen, own))
        memories = {}
        for layer, rows in parts.items():
            keys, row_values, thresholds = (torch.cat(part) for part in zip(*rows, strict=True))
            memories[layer] = Dense(keys, row_values, thresholds)
        return memories

    def set(self, memories: Mapping[int, Dense]) -> None:
        """Let the model read these memories, and no others."""
        for handle in self._handles:
            handle.remove()
        self.memories, self._handles = dict(memories), []
        for layer, memory in memories.items():
            block = module_at(self.model.model, self.model.sites[layer].block)
            hook = MemoryHook.on(block, self.whitening(layer), memory, self.model.trunk.stream_axis)
            self._handles.append(block.register_forward_hook(hook))

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
        layers = {edit.settings["layers"][0] for edit in edits if edit.has_rows}  # type: ignore[index]
        return sorted(layer for layer in layers if layer not in self._whitenings)  # type: ignore[misc]

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
            shares.append(float((memory.weights(queries)[0].sum(-1) > FIRES).double().mean()))
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

    def _with_keys(self, edit: Edit) -> _EditKeys:
        cached = self._edit_keys.get(edit)
        if cached is None:
            rows = EditRows.of(edit)
            block = module_at(self.model.model, self.model.sites[rows.layer].block)
            device = next(block.parameters()).device
            states, values, thresholds = (part.to(device) for part in (rows.states, rows.values, rows.thresholds))
            keys = self.whitening(rows.layer)(states)
            cached = self._edit_keys[edit] = _EditKeys(rows, keys, values, thresholds, rows.owner.to(device))
        return cached


def _add_up(variants: Sequence[Variant], edits: Sequence[_EditKeys], values: list[Tensor]) -> None:
    """Let the rows of variants about one subject return the sum of their values: they were not searched together."""
    for index, variant in variants:
        layer = edits[index].rows.layer
        others = [other for other in variants if other != (index, variant) and edits[other[0]].rows.layer == layer]
        for other, other_variant in others:
            values[index] = values[index].clone()
            values[index][variant] += edits[other].values[other_variant].to(values[index])
