"""How much work fits in memory at once, and what to do when the guess was too bold."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from rebind.errors import MemoryWarning, OutOfMemoryError
from rebind.models.trunk import Trunk

CPU_TOKENS = 2_048
GPU_TOKENS = 131_072  # beyond this, padding to the longest of a group costs more than running another group
PAST = 1 / 6  # what a token of a cached prefix takes, beside one that is run with gradients
SHARE = 0.6  # of the memory beside the weights that a batch may plan for
LEFT = 0.9  # and of what is free now, where others use the GPU too
FLOATS_A_LAYER = 24  # kept by the backward pass for each token and layer, in units of the hidden size
T = TypeVar("T")


def tokens_that_fit(trunk: Trunk) -> int:
    """Tokens a batch with gradients may hold: from the GPU's memory, or a fixed number on a CPU.

    A token costs its activations in every layer, and logits over the vocabulary at perhaps half of the places. On a
    GPU of one's own the number is the same from run to run, and with it the groups that facts are searched in.
    """
    device = trunk.device
    if device.type != "cuda":
        return CPU_TOKENS
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own reserve
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trunk.model.parameters())
    room = min(SHARE * (total - weights), LEFT * free)
    table = trunk.model.get_input_embeddings().weight
    width = trunk.model.config.get_text_config().hidden_size
    activations = len(trunk.blocks) * width * table.element_size() * FLOATS_A_LAYER
    logits = 3 * 4 * table.shape[0]  # float32: themselves, their softmax, their gradient
    return max(1, min(GPU_TOKENS, int(room / (activations + logits))))


def in_portions(
    sizes: Sequence[tuple[float, ...]], order: Sequence[int], budget: int, run: Callable[[list[int]], T]
) -> Iterator[tuple[list[int], T]]:
    """Call `run` with portions of `order`, in turn, each holding at most `budget` tokens; one item at least.

    `sizes` holds (rows, tokens, …) of each item: rows add up, and in a portion every row is padded to the
    longest in each of the others. When memory runs out, the budget is halved, aloud, and the portion tried again.
    """
    left = list(order)
    while left:
        portion = _first_portion(sizes, left, budget)
        result = _unless_out_of_memory(run, portion)
        if result is not None:
            left = left[len(portion) :]
            yield portion, result
            continue
        took = _padded(sizes, portion)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(portion) == 1:
            raise OutOfMemoryError(
                f"memory ran out on a single item of {took} tokens, expected room for one: shorten its prompts, load "
                f"the model in a narrower dtype, or use a device with more memory"
            )
        budget = min(budget, took) // 2
        warnings.warn(f"memory ran out at {took} tokens at once: going on with {budget}", MemoryWarning, stacklevel=3)


def _first_portion(sizes: Sequence[tuple[float, ...]], left: Sequence[int], budget: int) -> list[int]:
    rows, *widths = sizes[left[0]]
    count = 1
    for item in left[1:]:
        rows += sizes[item][0]
        widths = [max(pair) for pair in zip(widths, sizes[item][1:], strict=True)]
        if rows * sum(widths) > budget:
            break
        count += 1
    return list(left[:count])


def _padded(sizes: Sequence[tuple[float, ...]], items: Sequence[int]) -> int:
    rows, *widths = zip(*(sizes[item] for item in items), strict=True)
    return math.ceil(sum(rows) * sum(max(width) for width in widths))


def _unless_out_of_memory(run: Callable[[list[int]], T], portion: list[int]) -> T | None:
    """None when memory ran out. The exception goes no further: its frames would hold on to what is to be freed."""
    try:
        return run(portion)
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as problem:
        if "can't allocate memory" not in str(problem):  # what torch says on a CPU
            raise
        return None
