"""Which kernels run, and what they pass to one another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton.language as tl
from torch import Tensor

from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.kernels import interpreted
from rebind.ops.triton.backward import column_gradients, row_gradients, walk_backward
from rebind.ops.triton.calls import call, kind_of
from rebind.ops.triton.forward import walk_forward
from rebind.ops.triton.places import Places
from rebind.ops.triton.prepare import NUMBERS, prepare_plain, prepare_solve
from rebind.ops.triton.tiles import RUN, WARPS, Tiles

WIDEST = 256  # largest head size: a state's columns and a chunk's keys must fit in a multiprocessor


def why_not(inputs: ScanInputs) -> str | None:
    """Return why these inputs cannot run on kernels, or None."""
    if not (inputs.q.is_cuda or interpreted()):
        return f"the tensors are on {inputs.q.device.type}, and its kernels need a CUDA device"
    if interpreted() and inputs.v.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies the bits of bfloat16 as integers"
    if inputs.v.dtype == torch.float64:
        return "its kernels compute in float32, and these inputs are float64"
    if inputs.probe_before_decay and inputs.v.dtype == torch.float16:
        return "its kernels divide probes that read before the decay by it, which overflows float16"
    if max(inputs.d_k, inputs.d_v) > WIDEST:
        return f"heads are {inputs.d_k} and {inputs.d_v} wide, and its kernels take up to {WIDEST}"
    if inputs.chunk not in (None, 64 if inputs.v.element_size() == 2 else 32):
        return f"the chunk size is {inputs.chunk}, and its kernels have a fixed one"
    if inputs.mini_batch is not None and inputs.mini_batch not in (16, 32, 64):
        return f"the mini-batch size is {inputs.mini_batch}, and its kernels take 16, 32 and 64"
    if not inputs.v.numel() or not inputs.k.numel():
        return "there is nothing to compute"
    return None


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One scan, ready to be launched."""

    inputs: ScanInputs
    tiles: Tiles
    segments: int = 1  # number of segments into which a sequence is cut

    def forward(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        inputs = self.inputs
        with torch.cuda.device_of(inputs.v):
            buffers = self.buffers()
            self._prepare(buffers)
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            starts = inputs.state
            if self.segments > 1:
                maps = buffers[-1]
                self._walk(buffers, None, out, maps, mapped=True)
                starts = self._starts(maps)
            final = inputs.v.new_empty(self._state_shape(), dtype=torch.float32)
            self._walk(buffers, starts, out, final)
        return out, final[:, -1].contiguous(), buffers if inputs.keep else []

    def backward(self, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        inputs, tiles = self.inputs, self.tiles
        q, k, v = self._sequences
        _, products, table, sums, written, states, *maps = saved
        with torch.cuda.device_of(v):
            written = written if self._writes_differ else v
            d_written, d_states = torch.empty_like(written), torch.empty_like(states)
            ends = d_final
            if maps:
                d_ends = self._walk_back(saved, d_out, None, d_written, d_states, store=False)
                ends = self._ends(maps[0], d_ends, d_final)
            d_state = self._walk_back(saved, d_out, ends, d_written, d_states, store=True)
            dq, dk = (k.new_empty(*v.shape[:3], inputs.d_k) for _ in range(2))
            # V̄ = diag(η) R̄. Each program reads R̄ before it writes V̄: they share their memory if it is read once.
            shares = inputs.write is None or inputs.d_v <= tiles.value_part
            dv = d_written if shares else torch.empty_like(written)
            decay, erase, write = (None if x is None else torch.empty_like(x) for x in inputs.tensors[3:6])
            d_products = torch.empty_like(products)
            d_erased = torch.empty_like(products) if inputs.solves else d_products
            d_sums = torch.empty_like(table[:, :, 0])
            grid = (-(-self._places.chunks // RUN), v.shape[0] * inputs.heads)
            constants = {
                **self._constants,
                "BK": tiles.key_part,
                "BV": tiles.value_part,
                "STAGES": self._stages(tiles.gradient_stages),
            }
            rows = (
                *(q, k, v, table, sums, written, states, d_out, d_written),
                *(dq, dk, dv, erase, write, d_products, d_erased, d_sums),
            )
            columns = (
                *(q, k, inputs.log_decay, table, written, states, d_states),
                *(d_products, d_erased, d_sums, dk, decay),
            )
            for kernel, tensors in ((row_gradients, rows), (column_gradients, columns)):
                arguments = (*tensors, *self._all_chunks, RUN)
                call(kernel, grid, (self._kind, kind_of(d_out)), arguments, warps=WARPS, **constants)
        if inputs.sharing > 1:
            dq, dk = (x.unflatten(2, (-1, inputs.sharing)).sum(3, dtype=torch.float32).to(x) for x in (dq, dk))
        start = None if inputs.state is None else d_state[:, 0].to(inputs.state.dtype).contiguous()
        return dq, dk, dv, decay, erase, write, None, start

    def buffers(self) -> list[Tensor]:
        """Allocate what kernels leave for one another: inverses, products, table, sums, written, states and maps.

        What a problem does not need is empty. Maps are there only if a sequence is cut in segments.
        """
        inputs, size = self.inputs, self.tiles.chunk
        every = (inputs.q.shape[0] * self._places.chunks, inputs.heads)
        buffers = [
            inputs.v.new_empty((*every, size, size) if inputs.solves else 0),
            inputs.v.new_empty(*every, size, size),
            inputs.v.new_empty(*every, NUMBERS, size, dtype=torch.float32),
            inputs.v.new_empty(*every, size, dtype=self._wide),
            inputs.v.new_empty(inputs.v.shape if inputs.keep and self._writes_differ else 0),
            inputs.v.new_empty((*every, inputs.d_k, inputs.d_v) if inputs.keep else 0),
        ]
        if self.segments > 1:
            buffers.append(inputs.v.new_empty(self._state_shape(inputs.d_k), dtype=torch.float32))
        return buffers

    # The arguments of kernels

    @cached_property
    def _sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """Contiguous q, k and v."""
        return self.inputs.q.contiguous(), self.inputs.k.contiguous(), self.inputs.v.contiguous()

    @cached_property
    def _places(self) -> Places:
        return Places.of(self.inputs, self.tiles.chunk)

    def _rows(self, buffers: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Return what walks read of each token: q, k, v, and for a decay per channel the probe, the totals and η."""
        return *self._sequences, None, None, None

    @property
    def _writes_differ(self) -> bool:
        """Whether what is written, U, differs from the values."""
        return self.inputs.erase is not None or self.inputs.write is not None

    @property
    def _wide(self) -> torch.dtype:
        """The dtype in which decays are summed: differences of large sums must keep their digits."""
        return torch.float32 if self.inputs.v.element_size() == 2 else torch.float64

    @cached_property
    def _kind(self) -> tuple[object, ...]:
        """What decides, besides the constants, which compiled kernel a call means."""
        return kind_of(*self._sequences, *self.inputs.tensors[3:], self.inputs.cu_seqlens)

    @cached_property
    def _constants(self) -> dict[str, object]:
        """What kernels are compiled for; each takes some of it."""
        inputs = self.inputs
        return {
            "D_K": inputs.d_k,
            "D_V": inputs.d_v,
            "BK": self.tiles.key,
            "BV": self.tiles.value,
            "C": self.tiles.chunk,
            "DECAY": inputs.log_decay is not None,
            "ERASE": inputs.erase is not None,
            "SOLVE": inputs.solves,
            "WRITE": inputs.write is not None,
            "PACKED": inputs.cu_seqlens is not None,
            "CHANNELS": False,
            # Of products of float32 numbers: three products of their parts give nearly all digits.
            "PRECISION": "tf32" if inputs.v.element_size() == 2 else "tf32x3",
        }

    def _stages(self, stages: int) -> int:
        """Return how far loads run ahead in a run of chunks; boundaries of packed sequences must be loaded first."""
        return 1 if self.inputs.cu_seqlens is not None else stages

    @property
    def _all_chunks(self) -> tuple[object, ...]:
        """Arguments of kernels that run on all chunks at once."""
        return *self._places, self.inputs.sequences, self.inputs.heads, self.inputs.sharing

    @property
    def _along_sequences(self) -> tuple[object, ...]:
        """Arguments of kernels that walk along sequences, the last one the number of chunks in a segment."""
        boundaries, first, _, length, chunks = self._places
        return boundaries, first, length, chunks, self.inputs.heads, self.inputs.sharing, -(-chunks // self.segments)

    def _walks(self, columns: int) -> tuple[int, int, int]:
        """Return the grid of a kernel that walks along sequences with so many blocks of columns."""
        return columns, self.inputs.sequences * self.inputs.heads, self.segments

    def _state_shape(self, more: int = 0) -> tuple[int, ...]:
        n, heads, columns, rows = self.inputs.state_shape
        return n, self.segments, heads, columns + more, rows

    # Launches

    def _prepare(self, buffers: list[Tensor]) -> None:
        """Fill the first four buffers."""
        inputs, run = self.inputs, self.tiles.prepare_run
        q, k, _ = self._sequences
        inverses, *others = buffers[:4]
        coefficients = (q, k, inputs.log_decay, inputs.erase, inputs.write)
        constants = {**self._constants, "WIDE": tl.float32 if self._wide == torch.float32 else tl.float64}
        chunks, rows = self._places.chunks, q.shape[0] * inputs.heads
        if not inputs.solves:
            arguments = (*coefficients, *others, *self._all_chunks)
            call(prepare_plain, (chunks, rows), self._kind, arguments, warps=4, **constants)
            return
        call(
            prepare_solve,
            (-(-chunks // run), rows),
            self._kind,
            (*coefficients, inverses, *others, *self._all_chunks, run),
            warps=2,
            HALVES=inputs.v.element_size() == 2,
            STAGES=self._stages(self.tiles.prepare_stages),
            **constants,
        )

    def _walk(
        self, buffers: list[Tensor], start: Tensor | None, out: Tensor, final: Tensor, *, mapped: bool = False
    ) -> None:
        """Compute the outputs and the final states of segments, or if `mapped` each segment's map as its `final`."""
        inputs, tiles = self.inputs, self.tiles
        inverses, products, table, _, written, states = buffers[:6]
        columns = -(-inputs.d_v // tiles.value)
        if mapped:
            columns += -(-inputs.d_k // tiles.value)
        tensors = (*self._rows(buffers), inverses, products, table, start, out, written, states, final)
        call(
            walk_forward,
            self._walks(columns),
            self._kind,
            (*tensors, *self._along_sequences),
            warps=WARPS,
            STAGES=tiles.walk_stages,
            INITIAL=start is not None,
            OUTPUT=not mapped,
            KEEP=inputs.keep and not mapped,
            MAP=mapped,
            **self._constants,
        )

    def _walk_back(
        self,
        saved: list[Tensor],
        d_out: Tensor,
        ends: Tensor | None,
        d_written: Tensor,
        d_states: Tensor,
        *,
        store: bool,
    ) -> Tensor:
        """Return the gradients of the states that segments begin with, [N, segments, H, d_v, d_k]."""
        inputs, tiles = self.inputs, self.tiles
        q, k, _, probe, totals, _ = self._rows(saved)
        d_state = inputs.v.new_empty(self._state_shape(), dtype=torch.float32)
        call(
            walk_backward,
            self._walks(-(-inputs.d_v // tiles.value)),
            (self._kind, kind_of(d_out, ends)),
            (q, k, probe, totals, *saved[:3], d_out, ends, d_written, d_states, d_state, *self._along_sequences),
            warps=WARPS,
            FINAL=ends is not None,
            STORE=store,
            STAGES=tiles.walk_stages,
            **self._constants,
        )
        return d_state

    # Segments: S' = M S + N, as W' = W A + B with W = Sᵀ. A map [N, segments, H, d_v + d_k, d_k] is B above A.

    def _starts(self, maps: Tensor) -> Tensor:
        """Return the state that each segment begins with."""
        inputs = self.inputs
        B, A = maps.split([inputs.d_v, inputs.d_k], dim=3)
        now = torch.zeros_like(B[:, 0]) if inputs.state is None else inputs.state.float()
        starts = [now]
        for part in range(self.segments - 1):
            now = now @ A[:, part] + B[:, part]
            starts.append(now)
        return torch.stack(starts, dim=1)

    def _ends(self, maps: Tensor, d_starts: Tensor, d_final: Tensor | None) -> Tensor:
        """Return the gradient of the state that each segment ends with; `d_starts` is what each gives alone."""
        A = maps[:, :, :, self.inputs.d_v :]
        now = torch.zeros_like(d_starts[:, 0]) if d_final is None else d_final.float()
        ends = [now]
        for part in range(self.segments - 1, 0, -1):
            now = now @ A[:, part].mT + d_starts[:, part]
            ends.append(now)
        return torch.stack(ends[::-1], dim=1)
