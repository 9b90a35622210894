"""Split work into batches that fit in memory, and into smaller ones if memory runs out."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from rebind.errors import MemoryWarning, OutOfMemoryError
from rebind.models.trunk import Trunk
from rebind.models.weights.placement import bytes_on

CPU_SCORING_TOKENS, GPU_SCORING_TOKENS = 4_096, 65_536  # in a batch without gradients
CPU_TOKENS = 2_048
GPU_TOKENS = 131_072  # beyond this, padding to the longest of a batch costs more than running another batch
CACHED_TOKEN_COST = 1 / 6  # memory of a token in a cached prefix, relative to one that runs with gradients
PLANNED_FRACTION = 0.6  # of the memory beside the weights
FREE_FRACTION = 0.9  # of what is free now, in case other processes use the GPU too
FLOATS_PER_LAYER = 24  # stored for the backward pass per token and layer, in units of the hidden size
# Launching a batch takes as long as this many parameters of a block, times the tokens that run through them.
GPU_OVERHEAD, CPU_OVERHEAD = 12e9, 30e6
T = TypeVar("T")


def tokens_that_fit(trunk: Trunk) -> int:
    """Return how many tokens a batch with gradients may hold: by the memory of the GPU, or a fixed number on a CPU.

    A token costs its activations in every layer, and logits over the vocabulary at about half of the positions. On a
    GPU without other users the number is the same in every run, and so are the batches.
    """
    device = trunk.device
    if device.type != "cuda":
        return CPU_TOKENS
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # reserved by torch, unused
    available = min(PLANNED_FRACTION * (total - bytes_on(trunk.model, device)), FREE_FRACTION * free)
    table = trunk.model.get_input_embeddings().weight
    width = trunk.model.config.get_text_config().hidden_size
    activations = len(trunk.blocks) * width * table.element_size() * FLOATS_PER_LAYER
    logits = 3 * 4 * table.shape[0]  # float32: the logits, their softmax, their gradient
    return max(1, min(GPU_TOKENS, int(available / (activations + logits))))


def tokens_per_batch(trunk: Trunk) -> int:
    """Return how many tokens a batch without gradients may hold."""
    return GPU_SCORING_TOKENS if trunk.device.type == "cuda" else CPU_SCORING_TOKENS


def launch_overhead(trunk: Trunk) -> float:
    """Return how many tokens a model could run in the time that launching a batch takes."""
    parameters = sum(parameter.numel() for parameter in trunk.blocks[0].parameters())
    return (GPU_OVERHEAD if trunk.device.type == "cuda" else CPU_OVERHEAD) / max(parameters, 1)


def padded_lengths(lengths: Sequence[int], overhead: float) -> dict[int, int]:
    """Return the length that rows of each length are padded to, so that rows of similar length run as one batch.

    A batch costs its tokens, with padding, and `overhead` more. Of all ways to divide the lengths into batches of
    neighbors, this is the one that costs least.
    """
    counts = sorted(Counter(lengths).items())
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost of the first lengths, and where the last of their batches begins
    for end in range(1, len(counts) + 1):
        longest, rows, costs = counts[end - 1][0], 0, []
        for begin in range(end - 1, -1, -1):
            rows += counts[begin][1]
            costs.append((best[begin][0] + overhead + rows * longest, begin))
        best.append(min(costs))
    padded: dict[int, int] = {}
    end = len(counts)
    while end:
        begin = best[end][1]
        padded |= {length: counts[end - 1][0] for length, _ in counts[begin:end]}
        end = begin
    return padded


def run_in_batches(
    sizes: Sequence[tuple[float, ...]], order: Sequence[int], budget: int, run: Callable[[list[int]], T]
) -> Iterator[tuple[list[int], T]]:
    """Call `run` with batches of the items in `order`, and yield each batch with its result.

    A batch holds at most `budget` tokens, but at least one item. `sizes` has one tuple (rows, tokens, ...) per item:
    in a batch the rows add up, and each of the other sizes is padded to its maximum. When memory runs out, the budget
    is halved with a warning and the batch is tried again.
    """
    remaining = list(order)
    while remaining:
        count, tokens = _first_batch(sizes, remaining, budget)
        batch = remaining[:count]
        result = _run_if_it_fits(run, batch)
        if result is not None:
            remaining = remaining[count:]
            yield batch, result
            continue
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if count == 1:
            raise OutOfMemoryError(
                f"Memory ran out on a single item of {tokens} tokens",
                advice="Shorten its prompts, load the model in a narrower {dtype}, or use a device with more memory",
                settings={"dtype": None},
                code="item_too_large",
            )
        budget = min(budget, tokens) // 2
        message = f"Memory ran out at {tokens} tokens at once; continuing with {budget}."
        warnings.warn(message, MemoryWarning, stacklevel=3)


def _first_batch(sizes: Sequence[tuple[float, ...]], remaining: Sequence[int], budget: int) -> tuple[int, int]:
    """Return how many of the items go into a batch, at least one, and the tokens in it with padding."""
    rows, *widths = sizes[remaining[0]]
    count, tokens = 1, rows * sum(widths)
    for item in remaining[1:]:
        rows += sizes[item][0]
        widths = [max(pair) for pair in zip(widths, sizes[item][1:], strict=True)]
        if rows * sum(widths) > budget:
            break
        count, tokens = count + 1, rows * sum(widths)
    return count, math.ceil(tokens)


def _run_if_it_fits(run: Callable[[list[int]], T], batch: list[int]) -> T | None:
    """Return the result of `run`, or None if memory ran out.

    The exception must not leave this function: its frames would keep the tensors alive that should be freed.
    """
    try:
        return run(batch)
    except RuntimeError as problem:  # torch.OutOfMemoryError is one
        if not isinstance(problem, torch.OutOfMemoryError) and "can't allocate memory" not in str(problem):  # on a CPU
            raise
        return None
