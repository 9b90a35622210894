"""The self-check of the scan's kernels (see `rebind.ops.kernels`): a tiny problem of the same kind, in plain torch.

A kind is device, dtype, head sizes, tiles and which coefficients there are. All kernels are compiled side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rebind.ops.chunked import CHUNKED
from rebind.ops.inputs import ScanInputs
from rebind.ops.kernels import compare_results, draw, find_fault, interpreted
from rebind.ops.triton.calls import compile_ahead
from rebind.ops.triton.channel_plan import plan_of
from rebind.ops.triton.tiles import Tiles, segments_of
from rebind.precision import tensor_float, without_autocast


def fault_of(inputs: ScanInputs) -> str | None:
    """Return why kernels of this kind cannot be trusted, or None."""
    if interpreted() or not inputs.q.is_cuda:
        return None
    present = tuple(tensor is not None for tensor in inputs.tensors)
    sizes = (inputs.d_k, inputs.d_v, inputs.mini_batch, inputs.cu_seqlens is not None, inputs.by_channel)
    tiles = Tiles.of(inputs)
    cut = segments_of(inputs, tiles) > 1
    kind = ("scan", inputs.q.device, inputs.v.dtype, sizes, present, inputs.keep, tiles, cut)
    return find_fault(kind, lambda: compare_kernels(inputs, cut=cut), "the slower chunked backend")


def compare_kernels(inputs: ScanInputs, *, cut: bool = False) -> str | None:
    """Compare the kernels for such inputs with plain torch; return what is wrong with them, or None.

    `cut`: as for a sequence that is cut in segments. Neither autocast nor TensorFloat-32, which the caller may have
    turned on, applies: torch's products compose segments, and their rounding is no fault of the kernels.
    """
    tiny = _tiny(inputs)
    plan = plan_of(tiny, Tiles.of(inputs), 2 if cut else 1)  # the inputs' own tiles: others, other kernels
    like, wide = tiny.v, tiny.with_tensors([None if x is None else x.double() for x in tiny.tensors])
    d_out, d_final = draw(like.shape, like, 8).to(like.dtype), draw(tiny.state_shape, like, 9)

    def kernels() -> list[Tensor | None]:
        out, final, saved = plan.forward()
        return [out, final, *(plan.backward(saved, d_out, d_final) if tiny.keep else ())]

    def truth() -> list[Tensor | None]:  # without autograd, which does not work inside of a registered operator
        out, final, saved = CHUNKED.forward(wide)
        return [out, final, *(CHUNKED.backward(wide, saved, d_out.double(), d_final.double()) if tiny.keep else ())]

    name = f"The kernels for heads of {tiny.d_k} and {tiny.d_v} in {like.dtype}"
    with torch.no_grad(), without_autocast(inputs.v), tensor_float(False):
        if not interpreted():
            compile_ahead(kernels)
        return compare_results(name, kernels, truth, like)


def _tiny(inputs: ScanInputs) -> ScanInputs:
    """Draw a problem of the same kind with two heads, two chunks and a few tokens."""
    tokens, sequences = 64 + 9, 1 if inputs.cu_seqlens is None else 2
    key_heads = 1 if inputs.sharing > 1 else 2

    def key(seed: int) -> Tensor:
        return torch.nn.functional.normalize(draw((1, tokens, key_heads, inputs.d_k), inputs.v, seed), dim=-1)

    channels = (inputs.d_k,) if inputs.by_channel else ()
    shapes = ((1, tokens, 2, *channels), (1, tokens, 2), (1, tokens, 2))
    decay, erase, write = (draw(shape, inputs.v, seed).sigmoid() for seed, shape in enumerate(shapes))
    value = draw((1, tokens, 2, inputs.d_v), inputs.v, 5)
    state = draw((sequences, 2, inputs.d_v, inputs.d_k), inputs.v, 6)
    sequence = (x.to(inputs.v.dtype) for x in (key(3), key(4), value))
    drawn = (*sequence, decay.log(), erase, write, key(7).to(inputs.v.dtype), state)
    tensors = [None if like is None else x for x, like in zip(drawn, inputs.tensors, strict=True)]
    bounds = inputs.cu_seqlens
    if bounds is not None:
        bounds = torch.tensor([0, 5, tokens], device=bounds.device, dtype=bounds.dtype)
    return replace(inputs.with_tensors(tensors), cu_seqlens=bounds)
