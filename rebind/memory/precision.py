"""The dtypes in which results are computed and returned."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that all the tensors promote to: the dtype of results."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return at least float32: half-precision inputs are summed in single precision."""
    return torch.promote_types(common_dtype(*tensors), torch.float32)


def solving_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 wherever the device has it.

    Second moments of real activations reach condition numbers of 1e8 and more; single precision has no correct
    digit left after such a solve. Apple's MPS has no float64.
    """
    return torch.float32 if tensor.device.type == "mps" else torch.float64
