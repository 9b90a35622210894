"""A digest of a model's weights that is the same on every device."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from rebind.errors import InputError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per entry
SAMPLES = 1024


def fingerprint(model: nn.Module) -> str:
    """Return a sha256 (hex) that is equal for two models if and only if their weights are, on whatever devices.

    For each parameter (tied ones once) it covers the name, shape and dtype, the sum of the bits along the last
    dimension, and 1024 evenly spaced entries. Bits are summed as integers: exact in any order, so CPU and GPU agree
    (sums of floats would not), and a change of any one entry changes a sum.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    digest = hashlib.sha256(str(kind).encode())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is offloaded (it is on the meta device)",
                expected="weights in memory",
                advice="Load the model with a device_map that keeps all layers on devices",
                code="offloaded_weights",
            )
        digest.update(f"\n{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_summarize(parameter.detach()))
    return digest.hexdigest()


def _summarize(parameter: Tensor) -> bytes:
    bits = parameter.contiguous().view(INTEGERS[parameter.element_size()])
    flat = bits.reshape(-1)
    samples = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES]
    sums = bits.sum(-1, dtype=torch.int64).reshape(-1)
    return sums.cpu().numpy().tobytes() + samples.cpu().numpy().tobytes()
