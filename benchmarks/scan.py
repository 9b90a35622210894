"""Our scan beside the peers, the results kept in benchmarks/results: `rebind bench scan` without its dependencies.

python -m benchmarks.scan                         the shapes of this device: a GPU's, or a CPU's
python -m benchmarks.scan --shapes 1x2048x8x64 --only ours,transformers --device cpu --dtype float32
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import RESULTS
from rebind.bench.scan import Setup, parse_shape, run
from rebind.bench.table import notes, tables


def parsed(arguments: list[str]) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=(), help="BxTxHxD; default: this device's")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--only", type=names, default=(), help="names, separated by commas")
    parser.add_argument("--rules", type=names, default=(), help="rules, separated by commas")
    parser.add_argument("--rounds", type=int, default=30, help="at most")
    parser.add_argument("--seconds", type=float, default=15.0, help="spent on each column of a shape's table, about")
    parser.add_argument("--threads", type=int, help="of a CPU; default: torch's choice")
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/scan-DEVICE.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments or [])
    setup = Setup.of(
        args.device,
        getattr(torch, args.dtype) if args.dtype else None,
        tuple(args.shapes),
        quick=args.quick,
        rounds=args.rounds,
        seconds=args.seconds,
        only=args.only,
        rules=args.rules,
    )
    if args.threads:
        torch.set_num_threads(args.threads)
    out = args.out or RESULTS / f"scan-{setup.device}.json"
    console = Console(width=120, highlight=False)

    def found(report, rows) -> None:
        report.save(out)  # what there is, should a later shape fail
        console.print(*tables(rows), *notes(rows), sep="\n")

    report = run(setup, found=found)
    console.print(*report.missing, report.note, f"written to {out}", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
