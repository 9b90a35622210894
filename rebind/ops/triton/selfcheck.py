"""The scan's kernels, before they are trusted (`rebind.ops.trust`): a tiny problem of the same kind, by the reference.

A kind is device, dtype, head sizes, tiles, which coefficients there are. All kernels are compiled side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rebind.ops.inputs import Inputs
from rebind.ops.reference import REFERENCE
from rebind.ops.triton.calls import compile_ahead
from rebind.ops.triton.launch import INTERPRETED, Plan
from rebind.ops.triton.tiles import Tiles, segments_of
from rebind.ops.trust import difference, distrusted, noise
from rebind.precision import tensor_float, without_autocast


def trusted(inputs: Inputs) -> str | None:
    """Why kernels of this kind are not to be trusted, or None."""
    if INTERPRETED or not inputs.q.is_cuda:
        return None
    return distrusted(("scan", *_kind(inputs)), lambda: _compare(inputs), "the slower chunked backend")


def _kind(inputs: Inputs) -> tuple[object, ...]:
    present = tuple(tensor is not None for tensor in inputs.tensors)
    sizes = (inputs.k.shape[3], inputs.v.shape[3], inputs.mini_batch, inputs.cu_seqlens is not None)
    tiles = Tiles.of(inputs)
    cut = segments_of(inputs, tiles) > 1
    return inputs.q.device, inputs.v.dtype, sizes, present, inputs.keep, tiles, cut


def _compare(inputs: Inputs) -> str | None:
    # Without autocast, as the scan itself runs, and without TF32, which the caller may have allowed: where a problem is
    # cut its parts are composed by products of torch's, and their rounding is no fault of the kernels.
    with torch.no_grad(), without_autocast(inputs.v), tensor_float(False):
        return _difference(inputs)


def _difference(inputs: Inputs) -> str | None:
    tiny, tiles = _tiny(inputs), Tiles.of(inputs)  # the tiles of the problem at hand: others are other kernels
    plan = Plan(tiny, tiles, segments=2 if segments_of(inputs, tiles) > 1 else 1)
    if not INTERPRETED:
        compile_ahead(lambda: _both(plan))
    wide, like = _as_double(tiny), tiny.v
    d_out, d_final = noise(like.shape, like, 8).to(like.dtype), noise(tiny.state_shape, like, 9)

    def kernels() -> list[Tensor | None]:
        out, final, saved = plan.forward()
        return [out, final, *(plan.backward(saved, d_out, d_final) if tiny.keep else ())]

    def truth() -> list[Tensor | None]:
        out, final, saved = REFERENCE.forward(wide)
        return [out, final, *(REFERENCE.backward(wide, saved, d_out.double(), d_final.double()) if tiny.keep else ())]

    name = f"the kernels for heads of {tiny.k.shape[3]} and {tiny.v.shape[3]} in {like.dtype}"
    return difference(name, kernels, truth, like, "the reference")


def _both(plan: Plan) -> None:
    out, final, saved = plan.forward()
    if plan.inputs.keep:
        plan.backward(saved, out, final)


def _tiny(inputs: Inputs) -> Inputs:
    """Two heads, two chunks and a few tokens of the same kind."""
    tokens = 64 + 9
    device, dtype = inputs.v.device, inputs.v.dtype
    shared = 2 if inputs.sharing > 1 else 1

    def draw(*shape: int, seed: int) -> Tensor:
        return noise(shape, inputs.v, seed)

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
