"""Which backend runs a scan: the one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.ops.backend import Backend
from rebind.ops.chunked import CHUNKED
from rebind.ops.inputs import Inputs
from rebind.ops.reference import REFERENCE

NAMES = ("triton", "chunked", "reference")  # in the order they are tried

_triton: Backend | str | None = None  # the backend, or why there is none; None before anybody asked


@dataclass(frozen=True)
class Explanation:
    """Which backend would run, and for every other why it would not."""

    backend: str
    others: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, NAMES))
        lines = [f"{self.backend:<{width}}  runs"]
        return "\n".join([*lines, *(f"{name:<{width}}  {why}" for name, why in self.others.items())])


def choose(inputs: Inputs, name: str = "auto") -> Backend:
    """The backend of that name, or for "auto" the fastest that takes these inputs."""
    if name == "auto":
        if inputs.q.is_cuda and _why_not_triton(inputs) is None:
            return _backend("triton")
        return CHUNKED
    if name not in NAMES:
        raise unknown_name("backend", name, ("auto", *NAMES))
    why = _why_not_triton(inputs) if name == "triton" else _backend(name).refuses(inputs)
    if why is not None:
        raise InputError(f"backend {name!r} cannot run this: {why}; use backend='auto' to have one chosen")
    return _backend(name)


def explain(inputs: Inputs, name: str = "auto") -> Explanation:
    chosen = choose(inputs, name).name
    others = {}
    for other in NAMES:
        if other == chosen:
            continue
        why = _why_not_triton(inputs) if other == "triton" else _backend(other).refuses(inputs)
        if why is None and name != "auto":
            why = f"{chosen!r} was asked for"
        elif why is None and other == "triton":
            why = "chosen by itself on CUDA only; ask for it by name to run its interpreter"
        elif why is None:
            why = "slower: " + ("a token at a time" if other == "reference" else "no fused kernels")
        others[other] = why
    return Explanation(chosen, others)


def triton_backend() -> Backend | str:
    """The Triton backend, imported at the first question, or why there is none."""
    global _triton
    if _triton is None:
        _triton = _import_triton()
    return _triton


def seen_through() -> bool:
    """Whether somebody follows the single operations, who would not get into a kernel or a `Function`."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def many_at_once(*given: Tensor | None) -> bool:
    """Whether these stand for many tensors each, as with `is_grads_batched`: no kernel can read them."""
    return any(one is not None and torch._C._functorch.is_legacy_batchedtensor(one) for one in given)


def _import_triton() -> Backend | str:
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        from rebind.ops.triton import TRITON
    except ImportError as problem:
        return f"its kernels cannot be imported ({problem})"
    return TRITON


def _why_not_triton(inputs: Inputs) -> str | None:
    backend = triton_backend()
    if isinstance(backend, str):
        return backend
    if inputs.working == torch.float64:
        return "its kernels compute in float32 and these inputs are float64"
    return backend.refuses(inputs)


def _backend(name: str) -> Backend:
    if name == "triton":
        backend = triton_backend()
        assert not isinstance(backend, str)
        return backend
    return CHUNKED if name == "chunked" else REFERENCE
