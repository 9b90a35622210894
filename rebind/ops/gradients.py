"""Gradients of a function in plain operations, for backward passes that are not written out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_of(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    slopes: Sequence[Tensor | None],
    *,
    create_graph: bool = True,
) -> list[Tensor | None]:
    """Return the gradients of every input of `run(*inputs)` from those of its results, None for what is None.

    By default they can be differentiated again. Two inputs may be one tensor, such as β as the erase and the write
    strength, or one may depend on another. So each gets a node of its own in the graph, and what flows on behind it is
    not counted.
    """
    with torch.enable_grad():
        leaves = [
            None if x is None else x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in inputs
        ]
        results = zip(run(*leaves), slopes, strict=True)
        pairs = [(result, slope) for result, slope in results if slope is not None and result.requires_grad]
        sources = [x for x in leaves if x is not None]
        gradients = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                sources,
                [slope for _, slope in pairs],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )
    return [None if x is None else next(gradients) for x in leaves]
