"""From target states to one write per site (MEMIT, section 4.3).

`SubjectStates` provides what the model computes at the subjects of facts: the keys that enter a site, and the hidden
states after a block. Prompts are cut after the subject's last token, because nothing behind it matters there. Sites
are visited from the bottom up, so the prompts run only once: their hidden states are kept at the output of the last
block that will not change any more, and the next question continues from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rebind.edit.methods import Method
from rebind.edit.moments import OldKeys
from rebind.edit.targets.objective import FactPrompts
from rebind.memory import Write
from rebind.models.batching import run_in_batches
from rebind.models.mlp_output import output_map
from rebind.models.sites import Site, memory_of, module_at, stored_weight, write_memory
from rebind.models.trunk import Tokens, Trunk

TOKENS_AT_ONCE = 65_536
# How much λ grows with the number of keys per dimension. 600 facts on SmolLM2 score as with 1, and drift less.
CROWDING = 1.1


@dataclass(eq=False)
class _Batch:
    """Prompts that run together."""

    rows: list[int]  # their indices
    tokens: Tokens
    hidden: Tensor | None = None  # [rows, tokens, width]: output of the last settled block; None before the first

    def select(self, places: list[int]) -> _Batch:
        if len(places) == len(self.rows):
            return self
        chosen = torch.tensor(places, device=self.tokens.ids.device)
        hidden = None if self.hidden is None else self.hidden[chosen.to(self.hidden.device)]
        return _Batch([self.rows[place] for place in places], self.tokens.select(chosen), hidden)


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
        parts, order = [], []
        for batch in self._settle(layer - 1):
            (entered,) = self.trunk.inputs([module], batch.tokens, resume=self._resume(batch))
            parts.append(entered[:, -1].clone())  # a view would keep the inputs of all other tokens in memory
            order += batch.rows
        last = _in_order(torch.cat(parts), order)
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
        parts, order = [], []
        for batch in self._settle(self._level):
            places = [place for place, row in enumerate(batch.rows) if row in bare]
            if places:
                parts.append(self._run(layer, batch.select(places))[:, -1])
                order += [batch.rows[place] for place in places]
        return _in_order(torch.cat(parts), order).double()

    def _settle(self, level: int) -> list[_Batch]:
        """Run the prompts up to the output of block `level`, which will not change any more; return their batches.

        The first run finds out what fits in memory. Prompts of similar length are together.
        """
        if self._batches is None:
            sizes = [(1, len(row)) for row in self._rows]
            order = sorted(range(len(self._rows)), key=lambda index: len(self._rows[index]))

            def start(rows: list[int]) -> _Batch:
                batch = _Batch(rows, Tokens.left_padded([self._rows[row] for row in rows], self.trunk.device))
                hidden = self._run(max(level, 0), batch)
                batch.hidden = hidden if level >= 0 else None
                return batch

            self._batches = [batch for _, batch in run_in_batches(sizes, order, self.tokens_at_once, start)]
        elif level > self._level:
            for batch in self._batches:
                batch.hidden = self._run(level, batch)
        self._level = max(level, self._level)
        return self._batches

    def _run(self, layer: int, batch: _Batch) -> Tensor:
        return self.trunk.after(layer, batch.tokens, resume=self._resume(batch))

    def _resume(self, batch: _Batch) -> tuple[int, Tensor] | None:
        return None if batch.hidden is None else (self._level, batch.hidden)


def _in_order(rows: Tensor, order: Sequence[int]) -> Tensor:
    return rows[torch.tensor(order, device=rows.device).argsort()]


def solve_writes(
    subjects: SubjectStates,
    sites: Sequence[Site],
    targets: Tensor,  # [n, width]: the hidden state that each subject should have after the last site's block
    method: Method,
    old_keys: Mapping[str, OldKeys],  # by the name of the site
    lam: float,
) -> dict[str, Write]:
    """Find one write per site, in float32, that together move every subject's hidden state to its target.

    The sites are visited from the bottom up. Each one takes an equal share of what is still missing at the last
    layer, measured on the model as edited so far. The model is left as it was; the caller applies the writes.
    """
    trunk = subjects.trunk
    modules = [module_at(trunk.model, site.name) for site in sites]
    writes: dict[str, Write] = {}
    with weights_restored(modules):
        for index, (site, module) in enumerate(zip(sites, modules, strict=True)):
            keys = subjects.keys(site)  # [n, d_k]
            states = subjects.states_after(sites[-1].layer)
            missing = (targets.to(states) - states) / (len(sites) - index)
            change = output_map(trunk, site.layer, module).change(missing, partial(subjects.bare_inputs, site.layer))
            memory = memory_of(module).double()
            wide_keys = keys.double()
            values = wide_keys @ memory.mT + change.to(memory)
            gain = method.gain(wide_keys, old_keys[site.name], lam, wide_keys[:0])
            # What is stored is what is applied, now and at every fold: rounded to float32, in float64 arithmetic.
            writes[site.name] = write = Write(keys, values.float(), gain.float())
            write_memory(module, Write(*(tensor.double() for tensor in write.tensors())).apply(memory))
    return writes


def choose_lambda(keys: Tensor, old_keys: OldKeys, share: float = 0.1) -> float:
    """Choose λ from the keys: the more they stand out from the old keys, the more weight the old keys may have.

    A ridge write achieves s/(λ + s) of what a single key asks for, with s = kᵀC⁻¹k. For λ = share · median(s) that is
    1/(1 + share), on every model, whatever the width and scale of its keys. Many keys crowd the space, and each of
    them takes from the old keys what others needed: the share grows by 1.1 n/d_k.
    """
    white = old_keys.factored.whiten(keys.double())
    n, d_k = keys.shape
    return (share + CROWDING * n / d_k) * float(white.square().sum(-2).median())


@contextmanager
def weights_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the weights of the modules, byte for byte, when the block ends, whatever is raised."""
    parameters = [stored_weight(module) for module in modules]
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(parameters, saved, strict=True):
                parameter.copy_(weight)
