"""Write targets into the weights, layer by layer (MEMIT, section 4.3).

Each layer in turn takes its share of what is still missing at the last one: keys and the missing part
are measured on the model as edited so far, the layer's weight is written, the next layer sees the result.
The outcome is one `Write` a site. The model is left as it was; the caller decides what to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rebind.edit.solve.subject_keys import AT_ONCE, Subjects, subject_keys
from rebind.edit.targets.objective import Request
from rebind.memory import Write
from rebind.memory.solve import Cholesky
from rebind.models.mlp_output import how_added
from rebind.models.sites import memory_of, write_memory
from rebind.models.trunk import Trunk

# How much λ's share grows with the keys a dimension; 600 facts on SmolLM2 score as with 1, and drift less.
CROWDING = 1.1


@dataclass(frozen=True, eq=False)
class Place:
    """A site and its module."""

    name: str
    layer: int
    module: nn.Module


def spread(
    trunk: Trunk,
    places: Sequence[Place],
    requests: Sequence[Request],
    hidden: Tensor,  # [n, width]: what the subjects' hidden states should become at the last layer
    gain: Callable[[Place, Tensor], Tensor],
    *,
    tokens_at_once: int = AT_ONCE,
) -> dict[str, Write]:
    """One write a site, in float32, which together bring the subjects' hidden states to `hidden`."""
    writes: dict[str, Write] = {}
    bare = [replace(request, prompts=request.prompts[:1]) for request in requests]

    def reader(layer: int) -> Callable[[nn.Module], Tensor]:
        return lambda module: subject_keys(trunk, layer, module, bare, tokens_at_once=tokens_at_once)

    subjects = Subjects(trunk, requests, tokens_at_once=tokens_at_once)
    with unchanged([place.module for place in places]):
        for index, place in enumerate(places):
            keys = subjects.keys(place.layer, place.module)
            now = subjects.states(places[-1].layer)
            missing = (hidden.to(now) - now) / (len(places) - index)
            weights = memory_of(place.module).double()
            keys = keys.float()  # what is stored is what is written: the same numbers now and at every replay
            change = how_added(trunk, place.layer, place.module).change(missing, reader(place.layer))
            values = (keys.double() @ weights.mT + change.to(weights)).float()
            writes[place.name] = Write(keys, values, gain(place, keys.double()).float())
            write_memory(place.module, _wide(writes[place.name]).apply(weights))
    return writes


def suitable_lambda(keys: Tensor, factored: Cholesky, share: float = 0.1) -> float:
    """λ from the keys: how far they stand out from the old ones decides how stiff the old ones may be.

    A ridge write realises s/(λ + s) of what a lone key asks for, s = kᵀC⁻¹k. With λ = share · median(s) that is
    1/(1 + share), the same on every model, whatever the width and scale of its keys. Many keys crowd the space, and
    each then takes from the old ones what others needed: the share grows by 1.1 n/d_k.
    """
    white = factored.whiten(keys)
    n, width = keys.shape
    return (share + CROWDING * n / width) * float(white.square().sum(-2).median())


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Whatever is written to the modules inside, and whatever is raised, their weights are the same bytes after."""
    parameters: list[Any] = [module.weight for module in modules]
    before = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, kept in zip(parameters, before, strict=True):
                parameter.copy_(kept)


def _wide(write: Write) -> Write:
    return Write(write.keys.double(), write.values.double(), write.gain.double())
