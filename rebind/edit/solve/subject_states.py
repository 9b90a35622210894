"""What the model computes at the subjects of facts: the keys that enter a site, and the hidden states after a block.

Prompts are cut after the subject's last token, because nothing behind it matters there. Sites are visited from the
bottom up, so the prompts run only once: their hidden states are kept at the output of the last block that will not
change any more, and the next question continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rebind.edit.targets.objective import FactPrompts
from rebind.models.batching import run_in_batches
from rebind.models.sites import Site, module_at
from rebind.models.trunk import Tokens, Trunk

TOKENS_AT_ONCE = 65_536


@dataclass(eq=False)
class _Batch:
    """Prompts that run together."""

    rows: list[int]  # their indices
    tokens: Tokens
    hidden: Tensor | None = None  # [rows, tokens, width]: output of the last settled block; None before the first


class SubjectStates:
    """The prompts of facts on their way up through the model."""

    def __init__(self, trunk: Trunk, facts: Sequence[FactPrompts], *, tokens_at_once: int = TOKENS_AT_ONCE) -> None:
        self.trunk, self.facts, self.tokens_at_once = trunk, facts, tokens_at_once
        self._rows: list[tuple[int, ...]] = []
        owner, weights, self._bare = [], [], list[int]()
        for index, fact in enumerate(facts):
            self._bare.append(len(self._rows))
            others = len(fact.prompts) - 1
            for place, prompt in enumerate(fact.prompts):
                self._rows.append(prompt.ids[: prompt.subject_last + 1])
                owner.append(index)
                weights.append(1.0 if not others else 0.5 if place == 0 else 0.5 / others)
        self._owner = torch.tensor(owner)
        self._weights = torch.tensor(weights, dtype=torch.float64)
        self._level = -1  # the last settled block
        self._batches: list[_Batch] | None = None

    def keys(self, site: Site) -> Tensor:
        """Return the key of each subject at a site, [n, d_k] float32, as an edit stores it.

        The bare prompt weighs half, and the contexts share the other half, as in MEMIT's own code. Call this from the
        bottom up: what is written to the blocks below the site afterwards is not seen.
        """
        return self.inputs(site.layer, module_at(self.trunk.model, site.name)).float()

    def inputs(self, layer: int, module: nn.Module) -> Tensor:
        """Return the input of a module in block `layer` at each subject, averaged like keys, [n, width] float64."""
        self._settle(layer - 1)
        batches = self._prepare()
        last = _in_order(
            torch.cat([self._input(module, batch) for batch in batches]),
            [row for batch in batches for row in batch.rows],
        )
        total = last.new_zeros(len(self._bare), last.shape[-1], dtype=torch.float64)
        weighted = last.double() * self._weights.to(last.device).unsqueeze(-1)
        return total.index_add(0, self._owner.to(last.device), weighted)

    def bare_inputs(self, layer: int, module: nn.Module) -> Tensor:
        """Return the input of a module at each subject of the bare prompts, on the model as it stands."""
        bare = [FactPrompts(fact.prompts[:1]) for fact in self.facts]
        return SubjectStates(self.trunk, bare, tokens_at_once=self.tokens_at_once).inputs(layer, module)

    def states_after(self, layer: int) -> Tensor:
        """Return the hidden state of each bare prompt's subject after a block, [n, width] float64."""
        bare = set(self._bare)
        states, order = [], []
        for batch in self._prepare():
            places = [place for place, row in enumerate(batch.rows) if row in bare]
            if places:
                states.append(self._run(layer, _select(batch, places))[:, -1])
                order += [batch.rows[place] for place in places]
        return _in_order(torch.cat(states), order).double()

    def _settle(self, level: int) -> None:
        """Run the prompts up to the output of block `level`, which will not change any more."""
        if level <= self._level:
            return
        if self._batches is None:
            self._batches = self._cut(lambda batch: setattr(batch, "hidden", self._run(level, batch)))
        else:
            for batch in self._batches:
                batch.hidden = self._run(level, batch)
        self._level = level

    def _prepare(self) -> list[_Batch]:
        if self._batches is None:
            self._batches = self._cut(lambda batch: self._run(0, batch))  # a first run finds out what fits in memory
        return self._batches

    def _cut(self, run: Callable[[_Batch], object]) -> list[_Batch]:
        """Return batches that fit in memory, found by running them; prompts of similar length are together."""
        sizes = [(1, len(row)) for row in self._rows]
        order = sorted(range(len(self._rows)), key=lambda index: len(self._rows[index]))

        def start(rows: list[int]) -> _Batch:
            batch = _Batch(rows, Tokens.left_padded([self._rows[row] for row in rows], self.trunk.device))
            run(batch)
            return batch

        return [batch for _, batch in run_in_batches(sizes, order, self.tokens_at_once, start)]

    def _run(self, layer: int, batch: _Batch) -> Tensor:
        return self.trunk.after(layer, batch.tokens, resume=self._resume(batch))

    def _input(self, module: nn.Module, batch: _Batch) -> Tensor:
        (entered,) = self.trunk.inputs([module], batch.tokens, resume=self._resume(batch))
        return entered[:, -1].clone()  # a view would keep the inputs of all other tokens in memory

    def _resume(self, batch: _Batch) -> tuple[int, Tensor] | None:
        return None if batch.hidden is None else (self._level, batch.hidden)


def _select(batch: _Batch, places: list[int]) -> _Batch:
    if len(places) == len(batch.rows):
        return batch
    chosen = torch.tensor(places, device=batch.tokens.ids.device)
    hidden = None if batch.hidden is None else batch.hidden[chosen.to(batch.hidden.device)]
    return _Batch([batch.rows[place] for place in places], batch.tokens.select(chosen), hidden)


def _in_order(rows: Tensor, order: Sequence[int]) -> Tensor:
    return rows[torch.tensor(order, device=rows.device).argsort()]
