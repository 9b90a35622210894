"""The height of memory that a contender's forward and backward reach, inputs and gradients included.

On a CPU it is the highest resident size of a process of its own, less what it was before the inputs were made:

    python -m rebind.bench.memory ours "gated delta" float32 1x2048x8x64
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import torch

from rebind.bench.contenders import Contender, Shape, both, contenders, inputs
from rebind.bench.machine import MIB, Peak


def peak(contender: Contender, shape: Shape, device: str, dtype: torch.dtype) -> float | None:
    """MiB, or None where nobody counts."""
    if device.startswith("cuda"):
        return _allocated(contender, shape, device, dtype)
    if device != "cpu":
        return None
    words = [contender.name, contender.rule, str(dtype).removeprefix("torch."), "x".join(map(str, shape))]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "rebind.bench.memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **threads})
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def _allocated(contender: Contender, shape: Shape, device: str, dtype: torch.dtype) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    leaves = inputs(shape, device, dtype)
    slope = torch.randn_like(leaves[2])
    size = sum(x.numel() * x.element_size() for x in (*leaves, slope))
    before = torch.cuda.memory_allocated() - size
    torch.cuda.reset_peak_memory_stats()
    both(contender.run, leaves, slope)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _resident(name: str, rule: str, dtype: torch.dtype, shape: Shape) -> float:
    (contender,) = (c for c in contenders("cpu")[0] if (c.name, c.rule) == (name, rule))
    small = inputs((1, 64, 1, 8), "cpu", dtype)
    both(contender.run, small, torch.randn_like(small[2]))  # libraries loaded, thread pools made
    with Peak() as highest:
        leaves = inputs(shape, "cpu", dtype)
        both(contender.run, leaves, torch.randn_like(leaves[2]))
    return highest.mib


if __name__ == "__main__":
    _name, _rule, _dtype, _shape = sys.argv[1:]
    _b, _t, _h, _d = map(int, _shape.split("x"))
    print(_resident(_name, _rule, getattr(torch, _dtype), (_b, _t, _h, _d)))
