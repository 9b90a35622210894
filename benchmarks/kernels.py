"""Time every kernel of a scan alone, in several sizes of tiles, to choose those in `rebind.ops.triton.tiles`.

    python -m benchmarks.kernels --rule kda --shape 1x4096x16x128
    python -m benchmarks.kernels --rule kda --kernels channel_rows channel_columns --tiles BK=64,warps=8 BK=32,warps=4

One forward and backward pass of the rule launches its kernels, and each is launched again by itself with the tensors of
that pass: as it is by default, then in every set of tiles whose constants it has. `warps` and `maxnreg` (the most
registers of a thread) are options of the compiler. A set that a kernel cannot run in is reported as such; after an
illegal memory access everything fails, so narrow the sets down with --kernels and --tiles then.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from rebind.bench.contenders import draw_inputs, our_scan, parse_shape, run_both
from rebind.bench.measure import timed
from rebind.ops.triton import calls, channel_plan, launch

KEYS = [f"BK={width},warps={warps}" for width in (64, 128) for warps in (4, 8)]
VALUES = [f"BV={width},STAGES={stages},warps=4" for width in (16, 32, 64) for stages in (2, 3)]
REPEATS = 30


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with the arguments of a launch."""

    kernel: Any
    grid: tuple[int, ...]
    tensors: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def run(self, changes: dict[str, int]) -> None:
        """Launch the kernel, with other constants or options."""
        options = {"num_warps": changes.get("warps", self.warps)}
        options |= {"maxnreg": changes["maxnreg"]} if "maxnreg" in changes else {}
        constants = {**self.constants, **{name: changes[name] for name in self.constants if name in changes}}
        grid = self.grid
        if self.name.startswith("walk"):  # one program per block of columns
            grid = (-(-constants["D_V"] // constants["BV"]), *grid[1:])
        self.kernel[grid](*self.tensors, **constants, **options)

    def takes(self, changes: dict[str, int]) -> bool:
        """Return whether the kernel has these constants, and may change them: walks hold all columns of keys."""
        fixed = {"BK"} if self.name.startswith("walk") else set()
        return set(changes) - {"warps", "maxnreg"} <= set(self.constants) - fixed


@contextmanager
def recorded() -> Iterator[dict[str, Launch]]:
    """Collect the launches of a block, the last one of each kernel."""
    launches: dict[str, Launch] = {}
    call = calls.call

    def record(kernel: Any, grid: Any, kind: Any, tensors: Any, *, warps: int, **constants: Any) -> None:
        needed = {name: constants[name] for name in kernel.arg_names[len(tensors) :]}
        one = Launch(kernel, grid, tensors, needed, warps)
        launches[one.name] = one
        call(kernel, grid, kind, tensors, warps=warps, **constants)

    with patch.object(launch, "call", record), patch.object(channel_plan, "call", record):
        yield launches


def time_of(one: Launch, changes: dict[str, int], device: str) -> str:
    """Return the median microseconds of a launch, or why it failed."""
    try:
        one.run(changes)
        return f"{1e3 * median(timed(lambda: one.run(changes), device) for _ in range(REPEATS)):.0f}"
    except Exception as problem:  # a compiler may raise anything
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="kda")
    parser.add_argument("--shape", type=parse_shape, default=(1, 4096, 16, 128), help="BxTxHxD")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", nargs="*", help="only these")
    parser.add_argument("--tiles", nargs="*", default=[*KEYS, *VALUES], help="sets such as BK=64,warps=8")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    by_channel = options.rule not in ("sum", "delta", "gated_delta", "mamba2")
    leaves = draw_inputs(options.shape, device, getattr(torch, options.dtype), by_channel=by_channel)
    with recorded() as launches:
        run_both(our_scan(options.rule, "triton"), leaves, torch.randn_like(leaves[2]))
    print("microseconds, medians")
    for name, one in launches.items():
        if options.kernels and name not in options.kernels:
            continue
        print(f"{name:18s} {time_of(one, {}, device):>8s}  as it is", flush=True)
        for text in options.tiles:
            changes = {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
            if one.takes(changes):
                print(f"{'':18s} {time_of(one, changes, device):>8s}  {text}", flush=True)


if __name__ == "__main__":
    main()
