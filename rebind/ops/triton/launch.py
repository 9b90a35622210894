"""Which kernels run, and what they pass to one another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton.language as tl
from torch import Tensor

from rebind.ops.backend import Gradients
from rebind.ops.inputs import ScanInputs
from rebind.ops.kernels import interpreted
from rebind.ops.triton.backward import column_gradients, row_gradients, walk_backward
from rebind.ops.triton.calls import aligned, call
from rebind.ops.triton.forward import walk_forward
from rebind.ops.triton.places import Places
from rebind.ops.triton.prepare import NUMBERS, prepare_plain, prepare_solve
from rebind.ops.triton.tiles import Tiles, segments_of

WIDEST = 256  # largest head size: a state's columns and a chunk's keys must fit in a multiprocessor


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """One scan, ready to be launched."""

    inputs: ScanInputs
    tiles: Tiles
    segments: int = 1  # number of segments into which a sequence is cut

    @staticmethod
    def refuses(inputs: ScanInputs) -> str | None:
        """Return why these inputs cannot run on kernels, or None."""
        if not (inputs.q.is_cuda or interpreted()):
            return f"the tensors are on {inputs.q.device.type}, and its kernels need a CUDA device"
        if interpreted() and inputs.v.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies the bits of bfloat16 as integers"
        if inputs.v.dtype == torch.float64:
            return "float64 has no tensor cores to run on"
        if max(inputs.d_k, inputs.d_v) > WIDEST:
            return f"heads are {inputs.d_k} and {inputs.d_v} wide, and its kernels take up to {WIDEST}"
        if inputs.chunk not in (None, 64 if inputs.v.element_size() == 2 else 32):
            return f"the chunk size is {inputs.chunk}, and its kernels have a fixed one"
        if inputs.mini_batch is not None and inputs.mini_batch not in (16, 32, 64):
            return f"the mini-batch size is {inputs.mini_batch}, and its kernels take 16, 32 and 64"
        if not inputs.v.numel() or not inputs.k.numel():
            return "there is nothing to compute"
        return None

    @classmethod
    def of(cls, inputs: ScanInputs) -> LaunchPlan:
        """Return the plan with the tiles and segments that suit these inputs."""
        tiles = Tiles.of(inputs)
        return cls(inputs, tiles, segments_of(inputs, tiles))

    @cached_property
    def places(self) -> Places:
        return Places.of(self.inputs, self.tiles.chunk)

    @property
    def changes(self) -> bool:
        """Whether what is written, U, differs from the values."""
        return self.inputs.erase is not None or self.inputs.write is not None

    @property
    def segment(self) -> int:
        """Number of chunks in a segment."""
        return -(-self.places.chunks // self.segments)

    def forward(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        inputs = self.inputs
        with torch.cuda.device_of(inputs.v):
            inverses, products, table, sums = self._prepare()
            maps = self._maps(inverses, table) if self.segments > 1 else None
            out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
            written, states = self._for_backward() if inputs.keep else (out, out)
            starts = inputs.state if maps is None else self._starts(maps)
            final = inputs.v.new_empty(self._state_shape(), dtype=torch.float32)
            self._walk(inverses, products, table, starts, out, written, states, final)
            if maps is not None:
                final = final[:, -1].contiguous()
        final = final.view(inputs.state_shape)
        if not inputs.keep:
            return out, final, []
        saved = [products, table, sums, written, states]
        saved += [inverses] if self.inputs.solves else []
        saved += [maps] if maps is not None else []
        return out, final, saved

    def backward(self, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        inputs, tiles = self.inputs, self.tiles
        products, table, sums, written, states, *rest = saved
        inverses = rest[0] if self.inputs.solves else products
        with torch.cuda.device_of(inputs.v):
            written = written if self.changes else self._v
            d_written, d_states = torch.empty_like(written), torch.empty_like(states)
            ends = d_final
            if self.segments > 1:
                d_ends = self._walk_back(inverses, products, table, d_out, None, d_written, d_states, store=False)
                ends = self._ends(rest[-1], d_ends, d_final)
            d_state = self._walk_back(inverses, products, table, d_out, ends, d_written, d_states, store=True)
            wide = (*inputs.v.shape[:3], inputs.d_k)
            dq, dk = (inputs.k.new_empty(wide) for _ in range(2))
            # V̄ = diag(η) R̄. Each program reads R̄ before it writes V̄: they share their memory if it is read once.
            shares = inputs.write is None or inputs.d_v <= tiles.value_part
            dv = d_written if shares else torch.empty_like(written)
            decay, erase, write = (None if x is None else torch.empty_like(x) for x in inputs.tensors[3:6])
            d_products = torch.empty_like(products)
            d_erased = torch.empty_like(products) if inputs.solves else d_products
            d_sums = torch.empty_like(table[:, :, 0])
            grid = (-(-self.places.chunks // tiles.run), self.places.rows * inputs.heads)
            constants = {
                **self._constants,
                "BK": tiles.key_part,
                "BV": tiles.value_part,
                "STAGES": self._stages(tiles.gradient_stages),
            }
            call(
                row_gradients,
                grid,
                (self._kind, aligned(d_out)),
                (
                    *(self._q, self._k, self._v, table, sums, written, states, d_out, d_written),
                    *(dq, dk, dv, erase, write, d_products, d_erased, d_sums),
                    *self._all_chunks,
                    tiles.run,
                ),
                warps=tiles.gradient_warps,
                **constants,
            )
            call(
                column_gradients,
                grid,
                self._kind,
                (
                    *(self._q, self._k, inputs.log_decay, table, written, states, d_states),
                    *(d_products, d_erased, d_sums, dk, decay),
                    *self._all_chunks,
                    tiles.run,
                ),
                warps=tiles.gradient_warps,
                **constants,
            )
        shared = inputs.sharing
        if shared > 1:
            dq, dk = (x.unflatten(2, (-1, shared)).sum(3, dtype=torch.float32).to(x) for x in (dq, dk))
        start = None if inputs.state is None else d_state[:, 0].to(inputs.state.dtype).contiguous()
        return dq, dk, dv, decay, erase, write, start

    def saved_like(self) -> list[Tensor]:
        """Return uninitialized tensors like those that `forward` saves."""
        inverses, products, table, sums = self._buffers()
        saved = [products, table, sums, *self._for_backward()]
        saved += [inverses] if self.inputs.solves else []
        if self.segments > 1:
            saved.append(self.inputs.v.new_empty(self._state_shape(self.inputs.d_k), dtype=torch.float32))
        return saved

    # The arguments of kernels

    @cached_property
    def _q(self) -> Tensor:
        return self.inputs.q.contiguous()

    @cached_property
    def _k(self) -> Tensor:
        return self.inputs.k.contiguous()

    @cached_property
    def _v(self) -> Tensor:
        return self.inputs.v.contiguous()

    @property
    def _precision(self) -> str:
        """Precision of products of float32 numbers: three products of their parts give nearly all digits."""
        return "tf32" if self.inputs.v.element_size() == 2 else "tf32x3"

    @cached_property
    def _kind(self) -> tuple[object, ...]:
        """What decides, besides the constants, which compiled kernel a call means."""
        inputs = self.inputs
        tensors = (self._q, self._k, self._v, *inputs.tensors[3:], inputs.cu_seqlens)
        return inputs.v.device, tuple(None if x is None else x.dtype for x in tensors), aligned(*tensors)

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
            "PRECISION": self._precision,
        }

    def _stages(self, wanted: int) -> int:
        """Return how far loads run ahead in a run of chunks; boundaries of packed sequences must be loaded first."""
        return 1 if self.inputs.cu_seqlens is not None else wanted

    @property
    def _all_chunks(self) -> tuple[object, ...]:
        """Arguments of kernels that run on all chunks at once."""
        return *self.places.arguments, self.inputs.sequences, self.inputs.heads, self.inputs.sharing

    @property
    def _along_sequences(self) -> tuple[object, ...]:
        """Arguments of kernels that walk along sequences."""
        boundaries, first, _, length, chunks = self.places.arguments
        return boundaries, first, length, chunks, self.inputs.heads, self.inputs.sharing, self.segment

    def _walks(self, columns: int) -> tuple[int, int, int]:
        return columns, self.inputs.sequences * self.inputs.heads, self.segments

    def _state_shape(self, more: int = 0) -> tuple[int, ...]:
        n, heads, columns, rows = self.inputs.state_shape
        return n, self.segments, heads, columns + more, rows

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, size = self.inputs, self.tiles.chunk
        every = (self.places.all_chunks, inputs.heads)
        products = inputs.v.new_empty(*every, size, size)
        inverses = torch.empty_like(products) if self.inputs.solves else products
        table = inputs.v.new_empty(*every, NUMBERS, size, dtype=torch.float32)
        sums = inputs.v.new_empty(*every, size, dtype=self._wide)
        return inverses, products, table, sums

    @property
    def _wide(self) -> torch.dtype:
        """The dtype in which decays are summed: differences of large sums must keep their digits."""
        return torch.float32 if self.inputs.v.element_size() == 2 else torch.float64

    def _for_backward(self) -> tuple[Tensor, Tensor]:
        inputs = self.inputs
        written = inputs.v.new_empty(inputs.v.shape if self.changes else 0)
        every = (self.places.all_chunks, inputs.heads)
        return written, inputs.v.new_empty(*every, inputs.d_k, inputs.d_v)

    # Launches

    def _prepare(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, tiles = self.inputs, self.tiles
        inverses, products, table, sums = self._buffers()
        coefficients = (self._q, self._k, inputs.log_decay, inputs.erase, inputs.write)
        constants = {**self._constants, "WIDE": tl.float32 if self._wide == torch.float32 else tl.float64}
        rows = self.places.rows * inputs.heads
        if inputs.solves:
            call(
                prepare_solve,
                (-(-self.places.chunks // tiles.prepare_run), rows),
                self._kind,
                (*coefficients, inverses, products, table, sums, *self._all_chunks, tiles.prepare_run),
                warps=2,
                HALVES=inputs.v.element_size() == 2,
                STAGES=self._stages(tiles.prepare_stages),
                **constants,
            )
        else:
            call(
                prepare_plain,
                (self.places.chunks, rows),
                self._kind,
                (*coefficients, products, table, sums, *self._all_chunks),
                warps=4,
                **constants,
            )
        return inverses, products, table, sums

    def _walk(
        self, inverses: Tensor, products: Tensor, table: Tensor, start: Tensor | None,
        out: Tensor, written: Tensor, states: Tensor, final: Tensor, *, mapped: bool = False,
    ) -> None:  # fmt: skip
        inputs, tiles = self.inputs, self.tiles
        columns = -(-inputs.d_v // tiles.value)
        if mapped:
            columns += -(-inputs.d_k // tiles.value)
        call(
            walk_forward,
            self._walks(columns),
            self._kind,
            (
                *(self._q, self._k, self._v, inverses, products, table, start),
                *(out, written, states, final),
                *self._along_sequences,
            ),
            warps=tiles.walk_warps,
            STAGES=tiles.walk_stages,
            INITIAL=start is not None,
            OUTPUT=not mapped,
            KEEP=inputs.keep and not mapped,
            MAP=mapped,
            **self._constants,
        )

    def _walk_back(
        self, inverses: Tensor, products: Tensor, table: Tensor, d_out: Tensor, ends: Tensor | None,
        d_written: Tensor, d_states: Tensor, *, store: bool,
    ) -> Tensor:  # fmt: skip
        """Return the gradients of the states that segments begin with, [N, segments, H, d_v, d_k]."""
        inputs, tiles = self.inputs, self.tiles
        d_state = inputs.v.new_empty(self._state_shape(), dtype=torch.float32)
        call(
            walk_backward,
            self._walks(-(-inputs.d_v // tiles.value)),
            (self._kind, aligned(d_out, ends)),
            (
                *(self._q, self._k, inverses, products, table, d_out, ends),
                *(d_written, d_states, d_state),
                *self._along_sequences,
            ),
            warps=tiles.walk_warps,
            FINAL=ends is not None,
            STORE=store,
            STAGES=tiles.walk_stages,
            **self._constants,
        )
        return d_state

    # Segments: S' = M S + N, as W' = W A + B with W = Sᵀ

    def _maps(self, inverses: Tensor, table: Tensor) -> Tensor:
        """Return each segment's map [N, segments, H, d_v + d_k, d_k]: B above A."""
        maps = self.inputs.v.new_empty(self._state_shape(self.inputs.d_k), dtype=torch.float32)
        self._walk(inverses, inverses, table, None, self._v, self._v, self._v, maps, mapped=True)
        return maps

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
