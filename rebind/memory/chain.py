"""Many writes in order, composed into one: what a chunk of a fast-weight layer is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rebind.errors import InputError, ShapeError
from rebind.memory.precision import common_dtype, working_dtype
from rebind.memory.write import Write


def chain(writes: Write, chunk: int = 64) -> Write:
    """Compose a batch of writes along its last batch dimension, first entry first.

    Inside a chunk the composite gain solves one unit-triangular system,

        Ĝ = (I + U)⁻¹ G,   U = the part of G Kᵀ where the column's write comes later,

    which is the WY form of DeltaNet's chunks. The chunks are then composed pairwise, as a tree: composition is
    associative. The composite has at most d_k rows. Writes with a factor per channel are composed pairwise throughout.
    """
    if not writes.batch_shape:
        problem = "There is a single write to compose"
        advice = "Stack the writes along a leading dimension"
        raise ShapeError(problem, expected="a batch of writes", advice=advice, code="single_write")
    if chunk < 1:
        raise InputError(f"The chunk size is {chunk}", expected="1 or more", code="invalid_chunk")
    writes = _expand(writes)
    count = writes.batch_shape[-1]
    if count == 0:
        lead = writes.batch_shape[:-1]
        retain = writes.retain.new_ones(lead) if isinstance(writes.retain, Tensor) else 1.0
        channels = None if writes.channels is None else torch.ones_like(writes.channels[..., :0, :].sum(-2))
        return _map(writes, lambda tensor: tensor.new_zeros(*lead, 0, tensor.shape[-1]), retain, channels)
    parts = _chain_rows(_group(writes, min(chunk, count))) if writes.channels is None else writes
    while parts.batch_shape[-1] > 1:
        pairs = _group(_expand(parts.compact()), 2)
        parts = _select(pairs, 1) @ _select(pairs, 0)
    return _select(parts, 0).compact()


def _chain_rows(writes: Write) -> Write:
    """Compose along the last batch dimension by one triangular solve."""
    dtype = working_dtype(*writes.tensors())
    count, n = writes.batch_shape[-1], writes.rows
    keys, values, gain = (tensor.to(dtype) for tensor in writes.tensors())
    keys, gain = keys.flatten(-3, -2), gain.flatten(-3, -2)
    order = torch.arange(count, device=keys.device).repeat_interleave(n)
    system = (gain @ keys.mT) * (order[:, None] < order[None, :])  # unit diagonal implied
    gain = torch.linalg.solve_triangular(system, gain, upper=True, unitriangular=True)
    retain = writes.retain
    if isinstance(retain, Tensor):
        retain = retain.to(dtype)
        later = torch.cat([retain[..., 1:], torch.ones_like(retain[..., :1])], dim=-1)
        products = later.flip(-1).cumprod(-1).flip(-1)  # of the later writes' `retain`: [..., count]
        values = products[..., None, None] * values
        retain = retain.prod(-1)
    elif retain != 1.0:
        after = retain ** torch.arange(count - 1, -1, -1, dtype=dtype, device=keys.device)
        values = after[:, None, None] * values
        retain = retain**count
    out = common_dtype(*writes.tensors())
    return Write(keys.to(out), values.flatten(-3, -2).to(out), gain.to(out), retain)


def _group(writes: Write, size: int) -> Write:
    """Split the last batch dimension in groups of `size`, the last filled up with writes that change nothing."""
    padding = -writes.batch_shape[-1] % size

    def split(tensor: Tensor, dim: int, fill: float) -> Tensor:
        if padding:
            shape = list(tensor.shape)
            shape[dim] = padding
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], dim=dim)
        return tensor.unflatten(dim, (-1, size))

    retain = writes.retain
    if padding and not isinstance(retain, Tensor) and retain != 1.0:
        retain = writes.keys.new_full(writes.batch_shape, retain, dtype=working_dtype(*writes.tensors()))
    if isinstance(retain, Tensor):
        retain = split(retain, -1, 1.0)
    channels = None if writes.channels is None else split(writes.channels, -2, 1.0)
    return _map(writes, lambda tensor: split(tensor, -3, 0.0), retain, channels)


def _select(writes: Write, index: int) -> Write:
    """Return one entry of the last batch dimension."""
    retain = writes.retain[..., index] if isinstance(writes.retain, Tensor) else writes.retain
    channels = None if writes.channels is None else writes.channels[..., index, :]
    return _map(writes, lambda tensor: tensor[..., index, :, :], retain, channels)


def _expand(writes: Write) -> Write:
    """Give every tensor the whole batch shape."""
    shape = writes.batch_shape
    retain = writes.retain.expand(shape) if isinstance(writes.retain, Tensor) else writes.retain
    channels = None if writes.channels is None else writes.channels.expand(*shape, writes.d_k)
    return _map(writes, lambda tensor: tensor.expand(*shape, *tensor.shape[-2:]), retain, channels)


def _map(writes: Write, change: Callable[[Tensor], Tensor], retain: float | Tensor, channels: Tensor | None) -> Write:
    keys, values, gain = (change(tensor) for tensor in writes.tensors())
    return Write(keys, values, gain, retain, channels)
