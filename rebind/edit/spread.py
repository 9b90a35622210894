"""Write targets into the weights, layer by layer (MEMIT, section 4.3).

Each layer in turn takes its share of what is still missing at the last one: keys and the missing part
are measured on the model as edited so far, the layer's weight is written, the next layer sees the result.
The outcome is one `Write` a site. The model is left as it was; the caller decides what to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rebind.edit.budget import in_portions
from rebind.edit.sites import memory_of, write_memory
from rebind.edit.targets import Request
from rebind.edit.trunk import Tokens, Trunk
from rebind.memory import Write
from rebind.memory.solve import Cholesky


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
    tokens_at_once: int = 65_536,
) -> dict[str, Write]:
    """One write a site, in float32, which together bring the subjects' hidden states to `hidden`."""
    writes: dict[str, Write] = {}
    with unchanged([place.module for place in places]):
        for index, place in enumerate(places):
            keys = subject_keys(trunk, place.module, requests, tokens_at_once=tokens_at_once)
            now = subject_states(trunk, places[-1].layer, requests, tokens_at_once=tokens_at_once)
            missing = (hidden.to(now) - now) / (len(places) - index)
            weights = memory_of(place.module).double()
            keys = keys.float()  # what is stored is what is written: the same numbers now and at every replay
            values = (keys.double() @ weights.mT + missing.to(weights)).float()
            writes[place.name] = Write(keys, values, gain(place, keys.double()).float())
            write_memory(place.module, _wide(writes[place.name]).apply(weights))
    return writes


def subject_keys(
    trunk: Trunk, module: nn.Module, requests: Sequence[Request], *, tokens_at_once: int = 65_536
) -> Tensor:
    """The module's input at each subject's last token, [n, d_k] float64.

    The bare prompt weighs half and the other contexts share the other half, as in MEMIT's own code.
    """
    rows, weights, owner = [], [], []
    for index, request in enumerate(requests):
        others = len(request.prompts) - 1
        for place, prompt in enumerate(request.prompts):
            rows.append(prompt.ids[: prompt.subject_last + 1])
            weights.append(1.0 if not others else 0.5 if place == 0 else 0.5 / others)
            owner.append(index)
    last = _last_tokens(rows, tokens_at_once, trunk, lambda tokens: trunk.inputs([module], tokens)[0])
    total = last.new_zeros(len(requests), last.shape[-1], dtype=torch.float64)
    weighed = last.double() * torch.tensor(weights, dtype=torch.float64, device=last.device).unsqueeze(-1)
    return total.index_add(0, torch.tensor(owner, device=last.device), weighed)


def subject_states(trunk: Trunk, layer: int, requests: Sequence[Request], *, tokens_at_once: int = 65_536) -> Tensor:
    """The hidden state of each bare prompt's subject after a block, [n, width] float64."""
    rows = [request.prompts[0].ids[: request.prompts[0].subject_last + 1] for request in requests]
    return _last_tokens(rows, tokens_at_once, trunk, lambda tokens: trunk.after(layer, tokens)).double()


def suitable_lambda(keys: Tensor, factored: Cholesky, share: float = 0.1) -> float:
    """λ from the keys: how far they stand out from the old ones decides how stiff the old ones may be.

    A ridge write realises s/(λ + s) of what a lone key asks for, s = kᵀC⁻¹k. With λ = share · median(s) that is
    1/(1 + share), the same on every model, whatever the width and scale of its keys. Many keys crowd the space, and
    each then takes from the old ones what others needed: the share grows by n/d_k.
    """
    white = factored.whiten(keys)
    n, width = keys.shape
    return (share + n / width) * float(white.square().sum(-2).median())


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


def _last_tokens(
    rows: Sequence[Sequence[int]], tokens_at_once: int, trunk: Trunk, run: Callable[[Tokens], Tensor]
) -> Tensor:
    """`run`'s result at every row's last token, rows of like length run together."""
    sizes = [(1, len(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))

    def last(portion: list[int]) -> Tensor:
        tokens = Tokens.left_padded([rows[index] for index in portion], trunk.device)
        return run(tokens)[:, -1].clone()  # not a view: that would keep the other tokens' in memory

    found = torch.cat([part for _, part in in_portions(sizes, order, tokens_at_once, last)])
    return found[torch.tensor(order, device=found.device).argsort()]


def _wide(write: Write) -> Write:
    return Write(write.keys.double(), write.values.double(), write.gain.double())
