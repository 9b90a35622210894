"""The choice of the backend that runs a scan."""

from __future__ import annotations

from dataclasses import dataclass

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.ops.backend import Backend
from rebind.ops.chunked import CHUNKED
from rebind.ops.inputs import ScanInputs
from rebind.ops.kernels import load_kernels

NAMES = ("triton", "chunked", "reference")  # in the order in which they are tried


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
    wanted = name == "triton" or (name == "auto" and inputs.q.is_cuda)
    fused = _triton(inputs) if wanted else "it was not requested"
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
