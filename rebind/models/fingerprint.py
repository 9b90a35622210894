"""Who a model is: a digest of its weights that is the same on every device."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from rebind.errors import InputError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: nn.Module) -> str:
    """A sha256 (hex) that tells whether two models have the same weights, on whatever device they are.

    Hashed for each parameter, tied ones once: name, shape, dtype, the sum of its bits along the last
    dimension, and 1024 entries spread over it. Bits are summed as integers: exact in any order, so CPU
    and GPU agree (float sums would not), and a change of any one entry changes a sum.
    """
    digest = hashlib.sha256(str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)).encode())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is offloaded (it is on the meta device), expected weights in memory: "
                f"load the model with a device_map that keeps all layers on devices"
            )
        digest.update(f"\n{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_summary(parameter.detach()))
    return digest.hexdigest()


def _summary(parameter: Tensor) -> bytes:
    bits = parameter.contiguous().view(INTEGERS[parameter.element_size()])
    flat = bits.reshape(-1)
    spread = flat[:: max(1, len(flat) // 1024)][:1024]
    sums = bits.sum(-1, dtype=torch.int64).reshape(-1)
    return sums.cpu().numpy().tobytes() + spread.cpu().numpy().tobytes()
