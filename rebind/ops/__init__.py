"""Many writes, fast: operations over whole sequences for every fast rule, and what layers need around them.

- `scan`, `scan_rule`, `explain`: write and read a whole sequence; `step`: one token, for decoding.
- `mesa`, `mesa_step`: ridge regression at every token, by conjugate gradients over scans.
- `short_convolution`, `gated_linear`, `rms_norm`, `add_norm`, `row_losses`: the operations of layers that have fused
  kernels on a GPU.
- `inputs`: the arguments of a scan in one object; `dispatch`: the interface of a backend, and the choice of one;
  `autograd`: any backend as a differentiable, compilable operation.
- `rows`: tokens of several writes; `gradients`: gradients that can be differentiated again.
- `sequence_parallel`: a scan over a sequence whose segments are in several processes.
- `reference`, `chunked`, `triton`: the three backends.
- `kernels`: whether fused kernels can run here, and whether they can be trusted.
"""

from __future__ import annotations

from rebind.ops.convolution import short_convolution, split_convolution
from rebind.ops.dispatch import Explanation
from rebind.ops.entropy import row_losses
from rebind.ops.gated import gated_linear
from rebind.ops.mesa import MesaState, mesa, mesa_step
from rebind.ops.norm import add_norm, rms_norm
from rebind.ops.scan import explain, scan, scan_rule
from rebind.ops.sequence_parallel import SequenceSplit, scan_split, split_sequence
from rebind.ops.step import step

__all__ = [
    "Explanation",
    "MesaState",
    "SequenceSplit",
    "add_norm",
    "explain",
    "gated_linear",
    "mesa",
    "mesa_step",
    "rms_norm",
    "row_losses",
    "scan",
    "scan_rule",
    "scan_split",
    "short_convolution",
    "split_convolution",
    "split_sequence",
    "step",
]
