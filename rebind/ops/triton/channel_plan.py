"""Launches for a decay per key channel, or for probes that are not keys: the walks of `launch` and other kernels."""

from __future__ import annotations

from functools import cached_property

import torch
import triton.language as tl
from torch import Tensor

from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.triton.calls import call, kind_of
from rebind.ops.triton.channels import channel_columns, channel_rows, invert, prepare_channels
from rebind.ops.triton.launch import LaunchPlan
from rebind.ops.triton.tiles import INVERT_WARPS, Tiles, segments_of

ROWS = 6  # index of the first buffer of scaled rows: queries, probes, keys, totals


def plan_of(inputs: ScanInputs, tiles: Tiles | None = None, segments: int | None = None) -> LaunchPlan:
    """Return the plan of a scan, by default with the tiles and segments that suit it."""
    tiles = Tiles.of(inputs) if tiles is None else tiles
    kind = ChannelPlan if inputs.by_channel or inputs.probe is not None else LaunchPlan
    return kind(inputs, tiles, segments_of(inputs, tiles) if segments is None else segments)


class ChannelPlan(LaunchPlan):
    """One scan with a decay per channel. One decay per token is expanded to channels."""

    def backward(self, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        inputs = self.inputs
        q, k, v = self._sequences
        sums, written, states = saved[3], saved[4] if self._writes_differ else v, saved[5]
        with torch.cuda.device_of(v):
            d_written, d_states = torch.empty_like(v), torch.empty_like(states)
            ends = d_final
            if self.segments > 1:
                d_ends = self._walk_back(saved, d_out, None, d_written, d_states, store=False)
                ends = self._ends(saved[-1], d_ends, d_final)
            d_state = self._walk_back(saved, d_out, ends, d_written, d_states, store=True)
            every = (*v.shape[:3], inputs.d_k)
            dq, dk = (k.new_empty(every) for _ in range(2))
            dp = None if inputs.erase is None else k.new_empty(every)
            dv = torch.empty_like(v) if inputs.write is not None else d_written
            erase, write = (None if x is None else torch.empty_like(x) for x in (inputs.erase, inputs.write))
            decay = None if inputs.log_decay is None else torch.empty_like(self._log_decay)
            d_products = torch.empty_like(saved[1])
            d_systems = torch.empty_like(d_products) if inputs.solves else d_products
            slopes = v.new_empty(every if decay is not None else 0, dtype=torch.float32)
            rows = (
                *(q, k, v, self._probe, sums, inputs.erase, inputs.write, written, states),
                *(d_out, d_written, dq, dp, dv, erase, write, d_products, d_systems, slopes),
            )
            columns = (
                *(q, k, self._probe, self._log_decay, sums, inputs.erase, written, states, d_states),
                *(d_products, d_systems, slopes, dk, decay),
            )
            for kernel, tensors in ((channel_rows, rows), (channel_columns, columns)):
                self._on_chunks(kernel, (*tensors, *self._all_chunks), d_out, self.tiles.channel_key)
        if inputs.probe is None and dp is not None:
            dk, dp = dk + dp, None
        if inputs.sharing > 1:
            parts = (None if x is None else x.unflatten(2, (-1, inputs.sharing)) for x in (dq, dk, dp))
            dq, dk, dp = (None if x is None else x.sum(3, dtype=torch.float32).to(k) for x in parts)  # type: ignore[assignment]
        if decay is not None and not inputs.by_channel:
            assert inputs.log_decay is not None
            decay = decay.sum(-1, dtype=torch.float32).to(inputs.log_decay.dtype)
        start = None if inputs.state is None else d_state[:, 0].to(inputs.state.dtype).contiguous()
        return dq, dk, dv, decay, erase, write, dp, start

    def buffers(self) -> list[Tensor]:
        """Allocate what kernels leave for one another: as `LaunchPlan`, and before maps the scaled rows and totals."""
        inputs, v = self.inputs, self.inputs.v
        inverses, products, table, _, *others = super().buffers()
        every = (*v.shape[:3], inputs.d_k)
        sums = v.new_empty(every, dtype=self._wide)
        rows = [v.new_empty(every if x else 0) for x in (True, inputs.erase is not None, True)]
        totals = v.new_empty(*products.shape[:2], inputs.d_k, dtype=torch.float32)
        return [inverses, products, table[:0], sums, *others[:2], *rows, totals, *others[2:]]

    @cached_property
    def _log_decay(self) -> Tensor:
        """ln d [B, T, H, d_k]."""
        inputs, log_decay = self.inputs, self.inputs.log_decay
        if log_decay is None:
            return inputs.v.new_zeros(*inputs.v.shape[:3], inputs.d_k, dtype=torch.float32)
        return log_decay if inputs.by_channel else log_decay.unsqueeze(-1).repeat(1, 1, 1, inputs.d_k)

    @cached_property
    def _probe(self) -> Tensor:
        """The probes, which are the keys where there are no others."""
        return self._sequences[1] if self.inputs.probe is None else self.inputs.probe.contiguous()

    @cached_property
    def _constants(self) -> dict[str, object]:
        wide = tl.float32 if self._wide == torch.float32 else tl.float64
        return {**super()._constants, "CHANNELS": True, "WIDE": wide}

    @property
    def _along_sequences(self) -> tuple[object, ...]:
        """As `LaunchPlan`; the scaled rows belong to value heads, so that none share a key."""
        boundaries, first, length, chunks, heads, _, segment = super()._along_sequences
        return boundaries, first, length, chunks, heads, 1, segment

    def _rows(self, buffers: list[Tensor]) -> tuple[Tensor | None, ...]:
        q_read, p_read, k_end, totals = buffers[ROWS : ROWS + 4]
        return q_read, k_end, self._sequences[2], p_read, totals, self.inputs.write

    def _prepare(self, buffers: list[Tensor]) -> None:
        """Fill the inverses, the products, the scaled rows and the totals."""
        inputs = self.inputs
        q, k, _ = self._sequences
        inverses, products, _, sums = buffers[:4]
        systems = torch.empty(products.shape if inputs.solves else 0, dtype=torch.float32, device=q.device)
        tensors = (q, k, self._probe, self._log_decay, inputs.erase, products, systems, sums, *buffers[ROWS : ROWS + 4])
        self._on_chunks(prepare_channels, (*tensors, *self._all_chunks), q, self.tiles.channel_prepare)
        if inputs.solves:
            arguments = (systems, inverses, self._places.first, self._places.chunks, inputs.sequences, inputs.heads)
            call(invert, self._chunks, self._kind, arguments, warps=INVERT_WARPS, **self._constants)

    @property
    def _chunks(self) -> tuple[int, int]:
        """The grid of a kernel with one program per chunk and head."""
        return self._places.chunks, self.inputs.v.shape[0] * self.inputs.heads

    def _on_chunks(self, kernel: object, arguments: tuple[object, ...], like: Tensor, key: int) -> None:
        """Launch a kernel on all chunks, in which a program holds `key` columns of keys at a time."""
        tiles, kind = self.tiles, (self._kind, kind_of(like))
        parts = {"BK": key, "BV": tiles.channel_value, "LEVELS": tiles.chunk.bit_length() - 1}
        call(kernel, self._chunks, kind, arguments, warps=tiles.channel_warps, **{**self._constants, **parts})
