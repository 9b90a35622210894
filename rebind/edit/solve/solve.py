"""From target states to writes (MEMIT, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rebind.edit.methods import Method
from rebind.edit.moments.collect import OldKeys
from rebind.edit.solve.subject_states import SubjectStates
from rebind.memory import Write
from rebind.models.mlp_output import output_map
from rebind.models.sites import Site, memory_of, module_at, write_memory

# How much λ grows with the number of keys per dimension. 600 facts on SmolLM2 score as with 1, and drift less.
CROWDING = 1.1


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
    parameters: list[Any] = [module.weight for module in modules]
    saved = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(parameters, saved, strict=True):
                parameter.copy_(weight)
