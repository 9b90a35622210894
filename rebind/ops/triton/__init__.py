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

from dataclasses import replace

import torch
from torch import Tensor

from rebind.memory.rules import SMALLEST_DECAY
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
        return why_not(inputs) or fault_of(replace(inputs, probe_before_decay=False))

    def forward(self, inputs: ScanInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
        return plan_of(_read_after_decay(inputs)[0]).forward()

    def saved_like(self, inputs: ScanInputs) -> list[Tensor]:
        return plan_of(_read_after_decay(inputs)[0]).buffers() if inputs.keep else []

    def backward(self, inputs: ScanInputs, saved: list[Tensor], d_out: Tensor, d_final: Tensor | None) -> Gradients:
        with torch.no_grad():
            after, inverse = _read_after_decay(inputs)
            gradients = plan_of(after).backward(saved, d_out, d_final)
            return gradients if inverse is None else _read_before_decay(inputs, after, inverse, gradients)


TRITON = Triton()


def _read_after_decay(inputs: ScanInputs) -> tuple[ScanInputs, Tensor | None]:
    """Return the scan whose probes read after the decay what these read before it, and 1/d [B, T, H, 1 or d_k].

    The kernels know no other probes. The gradient of the decay is a difference then, with a relative error of about
    1e-7/α; the chunked backend takes none.
    """
    if not inputs.probe_before_decay:
        return inputs, None
    assert inputs.log_decay is not None
    assert inputs.probe is not None
    log_decay = inputs.log_decay if inputs.by_channel else inputs.log_decay.unsqueeze(-1)
    inverse = (-log_decay.float()).exp().clamp_max(1 / SMALLEST_DECAY)
    q, k, probe = inputs.q, inputs.k, inputs.probe
    if inputs.sharing > 1:
        q, k, probe = (x.repeat_interleave(inputs.sharing, dim=2) for x in (q, k, probe))
    return replace(inputs, q=q, k=k, probe=(probe * inverse).to(probe.dtype), probe_before_decay=False), inverse


def _read_before_decay(inputs: ScanInputs, after: ScanInputs, inverse: Tensor, gradients: Gradients) -> Gradients:
    """Return the gradients of these inputs from those of the scan whose probes read after the decay."""
    dq, dk, dv, d_decay, d_erase, d_write, d_probe, d_state = gradients
    assert d_decay is not None
    assert d_probe is not None
    assert after.probe is not None
    divided = torch.where(inverse < 1 / SMALLEST_DECAY, d_probe.float() * after.probe.float(), 0.0)
    d_decay = (d_decay - (divided if inputs.by_channel else divided.sum(-1))).to(d_decay.dtype)
    keys = (dq, dk, (d_probe * inverse).to(d_probe.dtype))
    if inputs.sharing > 1:
        keys = tuple(x.unflatten(2, (-1, inputs.sharing)).sum(3, dtype=torch.float32).to(x) for x in keys)  # type: ignore[union-attr]
    return keys[0], keys[1], dv, d_decay, d_erase, d_write, keys[2], d_state
