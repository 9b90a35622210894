"""Refuse a model that cannot fit into memory, before any of it is allocated."""

from __future__ import annotations

import os

import torch

from rebind.errors import InputError
from rebind.nn.lm.config import RebindConfig
from rebind.nn.lm.model import RebindForCausalLM

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


def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a device, free or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 2**62
