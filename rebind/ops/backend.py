"""The interface of a backend: something that can run a scan forward and compute its gradients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rebind.ops.inputs import ScanInputs

Gradients = tuple[Tensor | None, ...]  # of `ScanInputs.tensors`; None where the input was None


class Backend(Protocol):
    """A way to run a scan. `rebind.ops.autograd` makes any of them differentiable and compilable.

    Tensors of a `ScanInputs` may have any strides except for the coefficients, the state and `cu_seqlens`, which are
    contiguous; coefficients may have any floating dtype. Results share no memory with the inputs.
    """

    name: str

    def forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the output [B, T, H, d_v] in v's dtype, the final state [N, H, d_v, d_k] in the working dtype, and the
        tensors that `backward` needs: none if `inputs.keep` is False."""

    def saved_like(self, inputs: ScanInputs) -> list[Tensor]:
        """Return uninitialized tensors of the shapes and dtypes that `forward` saves, for the compiler. They may depend
        on shapes but not on values (the boundaries of packed sequences)."""

    def backward(self, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        """Return the gradients, each in its input's dtype, from those of the output (contiguous) and of the final
        state (None: zero)."""
