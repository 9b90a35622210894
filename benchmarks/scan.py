"""Our scan beside other implementations, as `rebind bench scan`, with the results in benchmarks/results.

python -m benchmarks.scan                         the shapes of this device: a GPU's, or a CPU's
python -m benchmarks.scan --shapes 1x2048x8x64 --only ours,transformers --device cpu --dtype float32
python -m benchmarks.scan --draw docs/scan-cpu.png benchmarks/results/scan-cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import RESULTS
from rebind.bench.contenders import parse_shape
from rebind.bench.report import draw, notes, tables
from rebind.bench.scan import ScanSetup, run


def parse(arguments: list[str]) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=(), help="BxTxHxD; default: this device's")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--only", type=names, default=(), help="names, separated by commas")
    parser.add_argument("--rules", type=names, default=(), help="rules, separated by commas: gated_delta, delta, ...")
    parser.add_argument("--rounds", type=int, default=30, help="largest number of rounds")
    parser.add_argument("--seconds", type=float, default=15.0, help="time per column of a shape's table, about")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/scan-DEVICE.json")
    parser.add_argument("--draw", nargs="+", type=Path, metavar="PATH", help="only draw a figure from results: "
                        "FIGURE.png RESULT.json ...")  # fmt: skip
    return parser.parse_args(arguments)


def draw_results(figure: Path, results: list[Path]) -> None:
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    if not draw(documents[0] | {"rows": [row for one in documents for row in one["rows"]]}, figure):
        sys.exit("no shape was measured at two lengths")


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments or [])
    if args.draw:
        draw_results(args.draw[0], args.draw[1:])
        return
    setup = ScanSetup(
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

    def on_shape(report, rows) -> None:
        report.save(out)  # what there is, in case a later shape fails
        console.print(*tables(rows), *notes(rows), sep="\n")

    report = run(setup, on_shape=on_shape)
    console.print(*report.missing, report.note, f"written to {out}", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
