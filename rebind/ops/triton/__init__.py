"""The scan on a GPU, in Triton.

`prepare`: what a chunk is without its state, for all chunks at once. `forward`: states and outputs, chunk after chunk.
`backward`: the states' gradients, chunk after chunk the other way, then everything else for all chunks at once. Where
heads are too few to fill the device, sequences are cut in segments, each segment's effect on any state is found first
(writes compose), and all segments then run side by side.

Nothing here waits for the device but the self-check, once for each kind of problem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.ops.backend import Gradients
from rebind.ops.inputs import Inputs
from rebind.ops.triton.decode import decode
from rebind.ops.triton.launch import Plan
from rebind.ops.triton.selfcheck import trusted


class Triton:
    """Kernels for the whole recurrence: decay, erase and write a token; any head sizes up to 256."""

    name = "triton"
    step = staticmethod(decode)  # one token, in place on the state

    def refuses(self, inputs: Inputs) -> str | None:
        return Plan.refuses(inputs) or trusted(inputs)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        return Plan.of(inputs).forward()

    def saved_like(self, inputs: Inputs) -> list[Tensor]:
        return Plan.of(inputs).saved_like()

    def backward(self, inputs: Inputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        with torch.no_grad():
            return Plan.of(inputs).backward(saved, d_out, d_final)


TRITON = Triton()
