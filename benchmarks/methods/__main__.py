"""What every method makes of one fact to ten thousand, written at once or batch after batch, with a figure.

    python -m benchmarks.methods --facts counterfact.json --text held.txt --out methods.json --figure methods.png

Records are those of the file whose true object the unedited model prefers, at most --records of them. *Batch*: all
facts in one edit; one and ten facts are the mean of several disjoint groups. *Sequential*: edits of --batch facts one
after another, nothing taken back, everything written so far asked again at --at. The guard is off: what a method breaks
is to be seen.

Where more facts are written than there are records, the file's other records and neighbors of all of them are facts
too (`benchmarks/made.py`), evenly mixed with the records; each number of facts is a sequence of its own. Of these facts
the model may prefer the new object before they are written.

A sequence is written in two ways. *On the base*, as rebind does it: targets and keys of every edit are those of the
unedited model, and the weights are the fold of the edits. *On the edited model*, as in the papers, by the methods that
write to several layers: each batch's targets and keys are found on the model that holds the batches before it; the
moments stay those of the unedited model, and methods that remember are handed the keys of earlier batches.

What is asked: ES and EA of all facts; PS and NS of --around records, evenly spaced, with --neighbors each, of which
none is made a fact; what the model says by itself to --free facts of an edit; perplexity of --tokens tokens. Rows with
made facts ask PS and NS of the same records as the row of all records. Scores come with 95 % intervals. Two states that
are the same are measured once: in one edit recursive is memit, and the first batch of a sequence is a batch.

The search for targets takes nearly all of the time, so those on the base are found in one search for all rows and
methods that set them at the same layer with the same settings. Seconds here are therefore no measure of a method: those
are `benchmarks.editing`'s. Rows come in the order of their weight, and a file that --out names already is gone on with:
rows that it holds are not measured again, but for those of facts made in a former way, or with --again. With --seconds
no row is begun after that time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.methods.jobs import Results, jobs, run
from benchmarks.methods.shared import SEVERAL_FIRST, known_records
from benchmarks.methods.states import WAYS, Amount, Bench, Row
from benchmarks.methods.tables import show, table
from benchmarks.report import RESULTS
from rebind.edit.editor import Editor
from rebind.evals.reading import read_records
from rebind.evals.records import Records
from rebind.evals.selection import without_conflicts


def opened(options: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """The bench, and what its rows depend on."""
    editor = Editor(options.model, device=options.device, seed=options.seed, guard=None)
    everything = without_conflicts(read_records(options.facts, limit=options.read, skip_bad=True), skip_bad=True)
    records = known_records(editor, everything, options.records)
    text = Path(options.text).read_text(encoding="utf-8")
    amount = Amount(options.around, options.neighbors, options.free, options.tokens)
    bench = Bench(editor, records, everything, text, amount)
    of = {
        "model": editor.language_model.name,
        "fingerprint": editor.fingerprint,
        "records": Records(tuple(records)).digest,
        "known": len(records),
        "read": len(everything),
        "text": hashlib.sha256(bench.held_text.encode()).hexdigest(),
        "batch": options.batch,
        "asked": asdict(amount),
        "seed": options.seed,
        "moments": editor.moments.source,
    }
    return bench, of


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", required=True, help="CounterFact records, nested or flat")
    parser.add_argument("--text", required=True, help="held-out text for perplexity")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, nargs="*", default=[1, 10, 100, 1000], help="numbers of facts in one edit")
    parser.add_argument("--methods", nargs="+", default=SEVERAL_FIRST, choices=SEVERAL_FIRST)
    parser.add_argument("--protocols", nargs="+", default=["batch", "sequential"], choices=["batch", "sequential"])
    parser.add_argument("--found", nargs="+", default=["base", "edited"], choices=list(WAYS), help="of sequences")
    parser.add_argument("--batch", type=int, default=100, help="facts an edit of a sequence")
    parser.add_argument("--at", type=int, nargs="+", default=[100, 300, 1000], help="facts of a sequence")
    parser.add_argument("--read", type=int, help="records of the file that are looked at; default: all")
    parser.add_argument("--records", type=int, default=1000, help="of them written; more facts than these are made")
    parser.add_argument("--around", type=int, default=Amount.around, help="facts that PS and NS are asked of")
    parser.add_argument("--neighbors", type=int, default=Amount.neighbors, help="of each, for NS")
    parser.add_argument("--free", type=int, default=Amount.free, help="facts that are decoded freely")
    parser.add_argument("--tokens", type=int, default=Amount.tokens, help="of held text, for perplexity")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no row is begun; default: none")
    parser.add_argument("--again", action="store_true", help="measure rows anew that --out holds already")
    parser.add_argument("--seed", type=int, default=0, help="of contexts and of sampled moments")
    parser.add_argument("--out", type=Path, default=RESULTS / "methods.json")
    parser.add_argument("--figure", type=Path, help="PNG of the sequences")
    options = parser.parse_args(arguments)
    if off := [stop for stop in options.at if stop % options.batch]:
        parser.error(f"--at has {off[0]}, expected multiples of --batch ({options.batch})")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options, console = parse(arguments), Console(width=130, highlight=False)
    bench, of = opened(options)
    results = Results.open(options.out, of)
    if results.former:
        console.print(f"{results.former} rows of {options.out} are not kept: their facts were made in a former way")

    def told(row: Row, seconds: float) -> None:
        console.print(table(f"{row.protocol}, {WAYS[row.found]}: {seconds:.1f} s", [row], row.why))

    ordered = jobs(
        bench,
        methods=options.methods,
        numbers=options.n,
        protocols=options.protocols,
        found=options.found,
        size=options.batch,
        at=options.at,
    )
    left = run(bench, results, ordered, told, seconds=options.seconds, again=options.again)
    show(results.rows, console)
    if options.figure is not None and any(row.protocol == "sequential" and not row.made for row in results.rows):
        from benchmarks.methods.figure import figure

        figure(results.rows, options.figure)
    if left:
        console.print(f"{len(left)} jobs were not begun, {left[0].names[0]} the first: the same command goes on")
    console.print(f"written to {options.out}")


if __name__ == "__main__":
    main()
