"""What each speed-up of the engine buys, and that none changes the result: ours with one of them off at a time.

    python -m benchmarks.speedups                                                four facts of our own
    python -m benchmarks.speedups --facts counterfact.json --n 100 --device cuda

A speed-up is turned off here, not by a switch of the engine: the search is handed a trunk that does the work which it
would have been spared (`Plain`), or facts one at a time. Everything runs in float32, with CUDA graphs on a GPU; the
copy in bfloat16 that a GPU searches on has rows of its own, for rounding is what may change the result. The difference
is ‖δ − δ'‖ / ‖δ‖ of the targets, and of keys, gains and moments likewise.

Searches are timed once, on beside off, after two steps of two facts that load the kernels; of what takes milliseconds a
GPU's row has the quickest of three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS
from benchmarks.speedups.phases import key_rows, moment_rows, old_keys, solve_rows
from benchmarks.speedups.searches import Setup, target_rows
from benchmarks.speedups.timing import Row, Timer
from benchmarks.targets import FACTS
from rebind.bench.measure import machine
from rebind.edit.editor import Editor
from rebind.edit.facts.readers import read_facts
from rebind.edit.solve import SubjectStates
from rebind.models.sites import module_at
from rebind.storage import write_file

BRIEF = 3  # times that what takes milliseconds is timed, on a GPU


def run(
    editor: Editor,
    facts: Sequence[Any],
    *,
    steps: int | None,
    repeats: int,
    tokens: int,
    slow: bool,
    told: Callable[[Row], None],
) -> None:
    """Every row, told as it is measured."""
    settings = editor.settings("memit")
    search = settings.targets if steps is None else replace(settings.targets, steps=steps)
    setup = Setup(editor.language_model.trunk, settings.layers[-1], editor.fact_prompts(facts), search)
    sites = [editor.sites[layer] for layer in settings.layers]
    modules = [module_at(editor.model, site.name) for site in sites]
    clock = Timer(editor.language_model.device, repeats)
    brief = replace(clock, repeats=max(repeats, BRIEF)) if editor.language_model.device.type == "cuda" else clock
    subjects = SubjectStates(editor.language_model.trunk, setup.facts)
    keys = [subjects.keys(site).double() for site in sites]
    old = old_keys(editor.language_model.trunk, modules, max(site.d_k for site in editor.sites))
    for row in chain(
        moment_rows(editor.language_model.trunk, modules, brief, tokens),
        key_rows(setup, sites, brief),
        solve_rows(keys, old, brief),
        target_rows(setup, clock, slow=slow),
    ):
        told(row)


def show(rows: Sequence[Row], title: str) -> None:
    note = "difference: relative, between the results with and without; float32 rounding is some 1e-6"
    table = Table(title=title, title_justify="left", title_style="bold", caption=note, caption_justify="left")
    table.add_column("phase", no_wrap=True)
    table.add_column("without it", no_wrap=True)
    for column in ("on, s", "off, s", "buys", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = (f"{row.on:.3f}", f"{row.off:.3f}", f"{row.factor:.1f}×", f"{row.difference:.0e}")
        table.add_row(row.phase, row.name, *cells)
    Console(width=110).print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speedups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", help="records; default: four facts of our own")
    parser.add_argument("--n", type=int, default=4, help="how many of them")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="most steps of the search; default: the method's for the model")
    parser.add_argument("--tokens", type=int, help="for the moments; default: 2,048, on a GPU 65,536")
    parser.add_argument("--repeats", type=int, default=1, help="of which the quickest is told; default: 1")
    parser.add_argument("--quick", action="store_true", help="leave out the search without any speed-up")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/speedups-DEVICE.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    editor = Editor(options.model, device=options.device, guard=None)
    device = editor.language_model.device.type
    facts = FACTS if options.facts is None else list(read_facts(options.facts, skip_bad=True))[: options.n]
    out = options.out or RESULTS / f"speedups-{device}.json"
    rows: list[Row] = []
    title = f"speed-ups: {len(facts)} facts, {editor.language_model.name}, {device}"

    def told(row: Row) -> None:
        rows.append(row)
        print(f"{row.phase}: {row.name}: {row.on:.3f} s on, {row.off:.3f} s off", flush=True)
        content = {
            "title": title,
            "machine": machine("transformers"),
            "steps": options.steps,
            "rows": [asdict(one) | {"buys": round(one.factor, 2)} for one in rows],
        }
        write_file(out, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    tokens = options.tokens or (65_536 if device == "cuda" else 2_048)
    run(editor, facts, steps=options.steps, repeats=options.repeats, tokens=tokens, slow=not options.quick, told=told)
    show(rows, title)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
