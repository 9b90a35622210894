"""The kernels for channels compile for a Hopper GPU, and fit in its shared memory: without a GPU, by Triton alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED = 227 * 1024  # bytes per program on sm_90

PROGRAM = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rebind.ops.triton import backward, channels, forward

NUMBERS = {"T", "NT", "N", "H", "G", "run", "segment"}
SINGLE = {"log_decay", "erase", "write", "systems", "totals", "table", "state", "final", "d_final", "d_state",
          "d_erase", "d_write", "slopes", "sums", "d_log_decay"}
ABSENT = {"boundaries", "first", "owner"}
WIDTH = 128
constants = {"D_K": WIDTH, "D_V": WIDTH, "BK": WIDTH, "BV": 64, "C": 64, "WIDE": tl.float32, "PRECISION": "tf32",
             "LEVELS": 6, "PACKED": False, "MAP": False}
flags = ("ERASE", "WRITE", "DECAY", "SOLVE", "CHANNELS", "INITIAL", "OUTPUT", "KEEP", "FINAL", "STORE")
constants |= dict.fromkeys(flags, True)
narrow, walk = {"BK": 64}, {"BV": 32, "STAGES": 3}
kernels = [(channels.prepare_channels, 8, {}), (channels.invert, 2, {}), (channels.channel_rows, 8, narrow),
           (channels.channel_columns, 8, narrow), (forward.walk_forward, 4, walk), (backward.walk_backward, 4, walk)]
common = constants
for kernel, warps, own in kernels:
    constants = common | own
    signature, fixed, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants or name in ABSENT:
            signature[name], fixed[(place,)] = "constexpr", constants.get(name)
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32" if name in SINGLE else "*bf16"
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.fn.__name__, compiled.metadata.shared)
"""


def test_kernels_for_channels_compile_and_fit(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = dict(line.split() for line in done.stdout.splitlines())
    assert len(shared) == 6
    assert all(int(size) <= SHARED for size in shared.values()), shared
