"""Edit a quantized matrix: its stored form stays, and a hook on its module adds the change that edits make.

Libraries store quantized matrices in formats of their own, but all of them can multiply, so a matrix is read by its
products with unit vectors. Only the matrices of edited layers are read, one at a time, and only their changes are
stored, in float32. Without a change there is no hook.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError

ROWS_PER_PASS = 1024  # unit vectors multiplied together
CHANGE = "_rebind_change"  # the attribute of a module that holds its `Change`


class Change:
    """A hook that adds x Δᵀ to the output of a module, for a change Δ [d_v, d_k] in float32."""

    def __init__(self, module: nn.Module, matrix: Tensor) -> None:
        self.matrix = matrix
        self._handle = module.register_forward_hook(self._add)

    def _add(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        return out + functional.linear(args[0].float(), self.matrix.to(out.device)).to(out.dtype)

    def remove(self) -> None:
        self._handle.remove()


def keep_gradients(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights on a CPU into a form without gradients: target search needs them."""
    for path, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            problem = f"{path} has run before, and bitsandbytes has packed its weights into a form without gradients"
            raise InputError(problem, advice="Load the model again and pass it before it runs", code="packed_weights")


def base_matrix(module: nn.Module) -> Tensor:
    """Return the matrix that a quantized linear map multiplies by, without changes, [d_v, d_k] float32."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    floats = [tensor for tensor in (weight, bias) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.float32
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    width, columns = int(module.in_features), []  # type: ignore[arg-type]
    with torch.no_grad():
        for first in range(0, width, ROWS_PER_PASS):
            rows = torch.arange(first, min(first + ROWS_PER_PASS, width), device=device)
            units = functional.one_hot(rows, width).to(dtype)
            products = module.forward(units).float()  # without hooks
            columns.append(products if bias is None else products - bias.float())
    return torch.cat(columns).mT.contiguous()


def change_of(module: nn.Module) -> Tensor | None:
    """Return the change that edits made to a quantized matrix, or None."""
    change = getattr(module, CHANGE, None)
    return None if change is None else change.matrix


def set_change(module: nn.Module, matrix: Tensor | None) -> None:
    """Replace the change of a quantized matrix; None removes it."""
    if (change := module.__dict__.pop(CHANGE, None)) is not None:
        change.remove()
    if matrix is not None:
        module.__dict__[CHANGE] = Change(module, matrix)


def changed_matrix(module: nn.Module) -> Tensor:
    """Return a quantized matrix plus its change, [d_v, d_k] float32."""
    base, change = base_matrix(module), change_of(module)
    return base if change is None else base + change.to(base.device)


def write_matrix(module: nn.Module, matrix: Tensor) -> None:
    """Make a quantized linear map multiply by `matrix`, by storing the difference as its change."""
    base = base_matrix(module)
    change = (matrix.to(base.device, torch.float64) - base.double()).float()
    set_change(module, change if change.any() else None)
