"""Refuse a model or a batch that cannot fit into memory, before any of it is allocated."""

from __future__ import annotations

import os

import torch

from rebind.errors import InputError
from rebind.nn.lm.config import RebindConfig
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training.config import TrainConfig

BYTES_PER_TOKEN, BYTES_PER_ACTIVATION = 8, 2  # int64; bfloat16, the narrowest precision
BYTES_PER_PARAMETER = 16  # float32 weights, gradients and the two moments of AdamW


def require_memory(config: RebindConfig, device: torch.device) -> None:
    """Raise if training needs more memory for the parameters than the device has in all."""
    available = _memory(device)
    # A lower bound first: even a model without memory takes minutes to build if it has thousands of layers.
    least = config.hidden_size * (config.vocab_size + config.num_hidden_layers * config.hidden_size)
    if least * BYTES_PER_PARAMETER <= available:
        with torch.device("meta"):
            least = RebindForCausalLM(config).num_parameters()
    if least * BYTES_PER_PARAMETER > available:
        raise InputError(
            f"The model has {least:,} parameters or more, which take {least * BYTES_PER_PARAMETER / 1e9:,.0f} GB to "
            f"train, and {device.type} has {available / 1e9:,.0f} GB",
            advice="Choose a smaller preset, or smaller sizes",
            code="model_too_large",
        )


def require_memory_for_batch(config: TrainConfig, model: RebindConfig, device: torch.device, processes: int) -> None:
    """Raise if the tokens of a batch, and what each layer keeps of a piece of it, need more than the device has."""
    available = _memory(device)
    tokens = config.rows_per_piece(config.sequences_at_once(processes)) * config.length // config.context_parallel
    activations = tokens * model.num_hidden_layers * model.hidden_size * BYTES_PER_ACTIVATION
    least = config.batch_size * config.length * BYTES_PER_TOKEN + activations
    if least > available:
        raise InputError(
            f"A batch of {config.batch_size:,} segments of {config.length:,} tokens takes {least / 1e9:,.0f} GB or "
            f"more, and {device.type} has {available / 1e9:,.0f} GB",
            advice="Choose a smaller {batch_size}, or compute it in several pieces with {accumulate}",
            settings={"batch_size": None, "accumulate": None},
            code="batch_too_large",
        )


def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a device, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 2**62
