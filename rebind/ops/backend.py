"""What a backend is: something that can run a scan forward and take its gradients."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rebind.ops.inputs import Inputs

Gradients = tuple[Tensor | None, ...]  # of q, k, v, log_decay, erase, write, state; None where the input was None


class Backend(Protocol):
    """A way to run a scan. `rebind.ops.autograd` makes any of them differentiable and compilable.

    Tensors of an `Inputs` may have any strides but for the coefficients, the state and `cu_seqlens`, which are
    contiguous; coefficients may have any floating dtype. Nothing returned may share memory with anything given.
    """

    name: str

    def refuses(self, inputs: Inputs) -> str | None:
        """Why these inputs cannot run here, or None if they can. Asked at every call: it must be quick."""

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The output [B, T, H, Dv] in v's dtype, the final state [N, H, Dv, Dk] in the working dtype, and what
        `backward` wants to have again: nothing where `inputs.keep` is False. None of them shares memory."""

    def saved_like(self, inputs: Inputs) -> list[Tensor]:
        """Uninitialised tensors of the shapes and dtypes that `forward` saves, for the compiler. They may depend
        on shapes and not on values (the boundaries of packed sequences)."""

    def backward(self, inputs: Inputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        """The gradients, each in its input's dtype, given those of the output (contiguous) and of the final
        state (None: zero)."""
