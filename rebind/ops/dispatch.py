"""The interface of a backend, which runs a scan forward and computes its gradients, and the choice of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.ops.chunked import CHUNKED
from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.kernels import load_kernels

NAMES = ("triton", "chunked", "reference")  # in the order in which they are tried


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


@dataclass(frozen=True)
class Explanation:
    """The backend that would run, and for every other one why it would not."""

    backend: str
    others: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, NAMES))
        lines = [f"{self.backend:<{width}}  runs"]
        return "\n".join([*lines, *(f"{name:<{width}}  {why}" for name, why in self.others.items())])


def choose(inputs: ScanInputs, name: str = "auto") -> Backend:
    """Return the backend "triton" or "chunked", or for "auto" the faster one that takes these inputs."""
    if name not in ("auto", *NAMES):
        raise unknown_name("backend", name, ("auto", *NAMES))
    try_kernels = name == "triton" or (name == "auto" and inputs.q.is_cuda)
    fused = _triton(inputs) if try_kernels else "it was not requested"
    if name == "triton" and isinstance(fused, str):
        raise InputError(
            f"Backend 'triton' cannot run this scan: {fused}",
            advice="Use {backend} to have one chosen",
            settings={"backend": "auto"},
            code="backend_refuses",
        )
    return CHUNKED if isinstance(fused, str) else fused


def explain(inputs: ScanInputs, name: str = "auto") -> Explanation:
    """Return which backend would run, and why not the others."""
    chosen = name if name == "reference" else choose(inputs, name).name
    fused = _triton(inputs)
    reasons = {
        "triton": fused if isinstance(fused, str) else "chosen automatically on CUDA only; its interpreter is slow",
        "chunked": "slower: no fused kernels",
        "reference": "slower: one token at a time",
    }
    if name != "auto":
        requested = f"{chosen!r} was requested"
        reasons = {other: fused if other == "triton" and isinstance(fused, str) else requested for other in NAMES}
    return Explanation(chosen, {other: why for other, why in reasons.items() if other != chosen})


def _triton(inputs: ScanInputs) -> Backend | str:
    """Return the Triton backend, or why it cannot run these inputs."""
    kernels = load_kernels()
    return kernels if isinstance(kernels, str) else kernels.TRITON.refuses(inputs) or kernels.TRITON
