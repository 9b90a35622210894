"""From target states to one write per site (MEMIT, section 4.3).

`SubjectStates` computes the keys of facts at a site, and the hidden states of their subjects after a block. Prompts are
cut after the subject's last token, because later tokens do not affect it. Sites are visited from the bottom up, so the
prompts run only once: their hidden states are stored at the output of the last block that will not change any more, and
the next call continues from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rebind.edit.methods import Method
from rebind.edit.moments import OldKeys
from rebind.edit.targets.objective import FactPrompts
from rebind.memory import Write
from rebind.models.batching import run_in_batches
from rebind.models.mlp_output import output_map
from rebind.models.sites import Site, memory_of, module_at, weight_restorer, write_memory
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk

TOKENS_AT_ONCE = 65_536
# How much λ grows with the number of keys per dimension. 600 facts on SmolLM2 score as with 1, and drift less.
CROWDING = 1.1


@dataclass(eq=False)
class _Batch:
    """Prompts that run together."""

    rows: list[int]  # their indices
    tokens: Tokens
    hidden: Tensor | None = None  # [rows, tokens, width]: output of the last settled block; None before the first


class SubjectStates:
    """The keys and hidden states at the subjects of facts. Prompts are cut after each mention of the subject.

    With `several_keys`, every distinct prompt of a fact has a key of its own; otherwise their mean is the one key of
    the fact, in which the bare prompt weighs half and the others share the other half, as in MEMIT's own code.
    """

    def __init__(
        self,
        trunk: Trunk,
        facts: Sequence[FactPrompts],
        *,
        several_keys: bool = False,
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        self.trunk, self.several_keys, self.tokens_at_once = trunk, several_keys, tokens_at_once
        self._rows: list[tuple[int, ...]] = []
        owner, weights, bare = [], [], list[int]()
        for index, fact in enumerate(facts):
            bare.append(len(self._rows))
            first = fact.prompts[0]
            cuts = [first.ids[: first.subject_last + 1]]
            cuts += [prompt.ids[: mention + 1] for prompt in fact.prompts for mention in prompt.mentions]
            cuts = list(dict.fromkeys(cuts))
            self._rows += cuts
            owner += [index] * len(cuts)
            bare_share = 0.5 if len(cuts) > 1 and not several_keys else 1 / len(cuts)
            weights += [bare_share, *[(1 - bare_share) / max(len(cuts) - 1, 1)] * (len(cuts) - 1)]
        self._owner, self._bare = torch.tensor(owner), torch.tensor(bare)
        self._weights = torch.tensor(weights, dtype=torch.float64)
        self._level = -1  # the last settled block
        self._batches: list[_Batch] | None = None

    @property
    def owner(self) -> Tensor:
        """The fact that each key belongs to, [m]."""
        return self._owner if self.several_keys else torch.arange(len(self._bare))

    @property
    def weights(self) -> Tensor:
        """How much each key counts in a solve, [m] float64: the keys of a fact share a weight of 1."""
        return self._weights if self.several_keys else torch.ones(len(self._bare), dtype=torch.float64)

    def keys(self, site: Site) -> Tensor:
        """Return the keys of the subjects at a site, [m, d_k] float32.

        Call this from the bottom up: later writes to the blocks below the site have no effect on it.
        """
        inputs = self._inputs(module_at(self.trunk.model, site.name), self._settle(site.layer - 1))
        if self.several_keys:
            return inputs.float()
        total = inputs.new_zeros(len(self._bare), inputs.shape[-1])
        weighted = inputs * self._weights.to(inputs).unsqueeze(-1)
        return total.index_add(0, self._owner.to(inputs.device), weighted).float()

    def current_inputs(self, module: nn.Module) -> Tensor:
        """Return the input of a module where each key is read, on the model as it is now, [m, width] float64."""
        unsettled = [_Batch(batch.rows, batch.tokens) for batch in self._settle(self._level)]
        return self._at_keys(self._inputs(module, unsettled))

    def states_after(self, layer: int) -> Tensor:
        """Return the hidden state after a block where each key is read (the bare prompts for means), [m, width]."""
        batches = self._settle(self._level)
        parts = [self._run(layer, batch)[:, -1] for batch in batches]
        return self._at_keys(self._in_order(parts, batches).double())

    def _at_keys(self, rows: Tensor) -> Tensor:
        return rows if self.several_keys else rows[self._bare.to(rows.device)]

    def _inputs(self, module: nn.Module, batches: Sequence[_Batch]) -> Tensor:
        parts = []
        for batch in batches:
            (inputs,) = self.trunk.inputs([module], batch.tokens, resume=self._resume(batch))
            parts.append(inputs[:, -1].clone())  # a view would keep the inputs of all other tokens in memory
        return self._in_order(parts, batches).double()

    @staticmethod
    def _in_order(parts: Sequence[Tensor], batches: Sequence[_Batch]) -> Tensor:
        rows = torch.cat(list(parts))
        order = torch.tensor([row for batch in batches for row in batch.rows], device=rows.device)
        return rows[order.argsort()]

    def _settle(self, level: int) -> list[_Batch]:
        """Run the prompts up to the output of block `level`, which will not change any more; return their batches.

        The first run determines the batches that fit in memory; each has prompts of similar length.
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


def solve_writes(
    subjects: SubjectStates,
    sites: Sequence[Site],
    delta: Tensor,  # [n, width]: how far each subject's hidden state should move after the last site's block
    method: Method,
    old_keys: Mapping[str, OldKeys],  # by the name of the site
    lam: float,
    protected: SubjectStates | None = None,  # other subjects, whose answers should stay
) -> dict[str, Write]:
    """Find one write per site, in float32, that together move every subject's hidden state by its δ.

    The sites are visited from the bottom up. Each one takes an equal share of the change that is still missing at
    the last layer, measured on the model as edited so far. The weights are restored; the caller applies the writes.
    """
    trunk = subjects.trunk
    modules = [module_at(trunk.model, site.name) for site in sites]
    writes: dict[str, Write] = {}
    with weights_restored(modules):
        initial = subjects.states_after(sites[-1].layer)
        targets = initial + delta.to(initial)[subjects.owner.to(initial.device)]
        weight = subjects.weights.to(initial).sqrt().unsqueeze(-1)  # squared in a least-squares problem
        for index, (site, module) in enumerate(zip(sites, modules, strict=True)):
            keys = subjects.keys(site)  # [m, d_k]
            states = subjects.states_after(sites[-1].layer)
            missing = (targets - states) / (len(sites) - index)
            change = output_map(trunk, site.layer, module).change(missing, subjects.current_inputs)
            memory = memory_of(module).double()
            wide_keys = (keys.double() * weight.to(memory)).float().double()
            values = wide_keys @ memory.mT + change.to(memory) * weight.to(memory)
            others = wide_keys[:0] if protected is None else protected.keys(site).to(wide_keys)
            gain = method.gain(wide_keys, old_keys[site.name], lam, others)
            # The stored write is rounded to float32, and every fold applies exactly that, in float64 arithmetic.
            writes[site.name] = write = Write(wide_keys.float(), values.float(), gain.float())
            write_memory(module, Write(*(tensor.double() for tensor in write.tensors())).apply(memory))
    return writes


def protected_states(trunk: Trunk, facts: Sequence[FactPrompts], method: Method) -> SubjectStates | None:
    """Return the protected subjects of facts; None if there are none, or if the method has no λ to weigh them with.

    A method that remembers its earlier edits protects their keys instead, from its second edit on.
    """
    prompts = dict.fromkeys(prompt for fact in facts for prompt in fact.protected)
    if not prompts or method.exact or method.lam is not None:
        return None
    return SubjectStates(trunk, [FactPrompts((prompt,)) for prompt in prompts], several_keys=True)


def choose_lambda(keys: Tensor, old_keys: OldKeys, facts: int | None = None, share: float = 0.1) -> float:
    """Choose λ: the more the keys stand out from the old keys, the more weight the old keys may have.

    A ridge write achieves s/(λ + s) of the change of a single key, with s = kᵀC⁻¹k. For λ = share · median(s) that is
    1/(1 + share) on every model, for any width and scale of its keys. Many keys crowd the space and interfere with old
    keys, so the share grows by 1.1 per d_k facts.
    """
    white = old_keys.factored.whiten(keys.double())
    return (share + CROWDING * (facts or len(keys)) / keys.shape[-1]) * float(white.square().sum(-2).median())


@contextmanager
def weights_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the weights of the modules, byte for byte, when the block ends, even after an exception."""
    restorers = [weight_restorer(module) for module in modules]
    try:
        yield
    finally:
        for restore in restorers:
            restore()
