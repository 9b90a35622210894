"""Trust, but look: before a kind of problem runs on the kernels, a tiny one is compared with the reference.

Compilers for new chips have been wrong about kernels like these without a word. A kind is everything that makes the
compiler produce other code: device, dtype, head sizes, tiles, which coefficients there are. The check costs the
compilation that the first call needs anyway, of all kernels side by side, and a few milliseconds; it waits for the
device, so a CUDA graph that is being captured goes without. REBIND_SELF_CHECK=0 turns it off.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from rebind.errors import NumericalWarning
from rebind.ops.inputs import Inputs
from rebind.ops.reference import REFERENCE
from rebind.ops.triton.calls import compile_ahead
from rebind.ops.triton.launch import INTERPRETED, Plan
from rebind.ops.triton.tiles import Tiles, segments_of
from rebind.precision import tensor_float

# Largest error, as a share of each result's norm, that rounding explains; a miscompiled kernel is off by far more.
ROUNDING = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}

_known: dict[tuple[object, ...], str | None] = {}  # a kind of problem → why its kernels are not to be trusted


def trusted(inputs: Inputs) -> str | None:
    """Why kernels of this kind are not to be trusted, or None."""
    if INTERPRETED or not inputs.q.is_cuda or os.environ.get("REBIND_SELF_CHECK", "1") in ("", "0"):
        return None
    kind = _kind(inputs)
    if kind not in _known:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        _known[kind] = _compare(inputs)
        if _known[kind] is not None:
            warnings.warn(f"{_known[kind]}: the slower chunked backend runs instead", NumericalWarning, stacklevel=2)
    return _known[kind]


def _kind(inputs: Inputs) -> tuple[object, ...]:
    present = tuple(tensor is not None for tensor in inputs.tensors)
    sizes = (inputs.k.shape[3], inputs.v.shape[3], inputs.mini_batch, inputs.cu_seqlens is not None)
    tiles = Tiles.of(inputs)
    cut = segments_of(inputs, tiles) > 1
    return inputs.q.device, inputs.v.dtype, sizes, present, inputs.keep, tiles, cut


def _compare(inputs: Inputs) -> str | None:
    # Without autocast, as the scan itself runs, and without TF32, which the caller may have allowed: where a problem is
    # cut its parts are composed by products of torch's, and their rounding is no fault of the kernels.
    with torch.no_grad(), torch.autocast(inputs.v.device.type, enabled=False), tensor_float(False):
        return _difference(inputs)


def _difference(inputs: Inputs) -> str | None:
    tiny, tiles = _tiny(inputs), Tiles.of(inputs)  # the tiles of the problem at hand: others are other kernels
    plan = Plan(tiny, tiles, segments=2 if segments_of(inputs, tiles) > 1 else 1)
    if not INTERPRETED:
        compile_ahead(lambda: _both(plan))
    try:
        out, final, saved = plan.forward()
        d_out, d_final = _noise(out, 8).to(out.dtype), _noise(final, 9).float()
        found = [out, final, *(plan.backward(saved, d_out, d_final) if tiny.keep else ())]
    except Exception as problem:  # whatever a compiler may raise
        return f"the kernels for heads of {tiny.k.shape[3]} and {tiny.v.shape[3]} do not compile ({problem!s:.200})"
    wide = _as_double(tiny)
    out, final, saved = REFERENCE.forward(wide)
    truth = [out, final, *(REFERENCE.backward(wide, saved, d_out.double(), d_final.double()) if tiny.keep else ())]
    worst = max(_error(one, true) for one, true in zip(found, truth, strict=True) if one is not None)
    if worst <= ROUNDING[tiny.v.dtype]:
        return None
    return (
        f"the kernels for heads of {tiny.k.shape[3]} and {tiny.v.shape[3]} in {tiny.v.dtype} are wrong on "
        f"{_name(tiny.v.device)}: they differ from the reference by {worst:.1e}"
    )


def _both(plan: Plan) -> None:
    out, final, saved = plan.forward()
    if plan.inputs.keep:
        plan.backward(saved, out, final)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _tiny(inputs: Inputs) -> Inputs:
    """Two heads, two chunks and a few tokens of the same kind."""
    tokens = 64 + 9
    device, dtype = inputs.v.device, inputs.v.dtype
    shared = 2 if inputs.sharing > 1 else 1

    def draw(*shape: int, seed: int) -> Tensor:
        return _noise(torch.empty(shape, device=device), seed)

    def key(seed: int) -> Tensor:
        return torch.nn.functional.normalize(draw(1, tokens, 2 // shared, inputs.k.shape[3], seed=seed), dim=-1)

    gates = [draw(1, tokens, 2, seed=seed).sigmoid() for seed in range(3)]
    decay, erase, write, state = (tensor is not None for tensor in inputs.tensors[3:])
    bounds = torch.tensor([0, 5, tokens], device=device) if inputs.cu_seqlens is not None else None
    return Inputs(
        key(3).to(dtype),
        key(4).to(dtype),
        draw(1, tokens, 2, inputs.v.shape[3], seed=5).to(dtype),
        gates[0].log() if decay else None,
        gates[1] if erase else None,
        gates[2] if write else None,
        draw(1 if bounds is None else 2, 2, inputs.v.shape[3], inputs.k.shape[3], seed=6) if state else None,
        bounds if bounds is None or inputs.cu_seqlens is None else bounds.to(inputs.cu_seqlens.dtype),
        inputs.chunk,
        inputs.mini_batch,
        inputs.keep,
    )


def _as_double(inputs: Inputs) -> Inputs:
    decay, erase, write, state = (x if x is None else x.double() for x in inputs.tensors[3:])
    return replace(
        inputs,
        q=inputs.q.double(),
        k=inputs.k.double(),
        v=inputs.v.double(),
        log_decay=decay,
        erase=erase,
        write=write,
        state=state,
    )


def _noise(like: Tensor, seed: int) -> Tensor:
    """Random numbers that leave everybody else's alone."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device)


def _error(found: Tensor, true: Tensor | None) -> float:
    assert true is not None
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - true).norm() / true.norm().clamp_min(1e-30))
