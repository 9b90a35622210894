"""The scan on a GPU, in Triton, and the kernels of the other operations.

- `prepare`: everything about a chunk that does not depend on the state, for all chunks at once.
- `forward`: states and outputs, chunk after chunk. `backward`: the states' gradients, chunk after chunk the other way,
  then everything else for all chunks at once.
- `channels`: chunks with a decay per key channel or a probe; `channel_plan`: their launches.
- `launch`: which kernels run; `places`: where tokens and chunks are; `tiles`: all tuning; `calls`: quick calls of
  compiled kernels; `selfcheck`: the comparison with the reference.
- `decode`: one token. `convolution`, `entropy`, `gated`, `norm`: the operations of the same names in `rebind.ops`.

Where heads are too few to fill the device, sequences are cut in segments, each segment's effect on any state is
computed first (writes compose), and all segments then run side by side. Nothing here waits for the device except the
self-check, once for each kind of problem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.ops.inputs import Gradients, ScanInputs
from rebind.ops.triton import convolution, entropy, gated, norm
from rebind.ops.triton.channel_plan import plan_of
from rebind.ops.triton.decode import decode
from rebind.ops.triton.launch import why_not
from rebind.ops.triton.selfcheck import fault_of

__all__ = ["TRITON", "Triton", "convolution", "decode", "entropy", "gated", "norm"]


class Triton:
    """Kernels for the whole recurrence: decay, erase and write per token; any head sizes up to 256."""

    name = "triton"

    def refuses(self, inputs: ScanInputs) -> str | None:
        """Return why these inputs cannot run here, or None if they can. Called for every scan on a GPU."""
        return why_not(inputs) or fault_of(inputs)

    def forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        return plan_of(inputs).forward()

    def saved_like(self, inputs: ScanInputs) -> list[Tensor]:
        return plan_of(inputs).buffers() if inputs.keep else []

    def backward(self, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        with torch.no_grad():
            return plan_of(inputs).backward(saved, d_out, d_final)


TRITON = Triton()
