"""German to English on Multi30k: softmax attention against fast weights, the question of Table 1 of Schlag et al.

python -m benchmarks.translation --data DIR --out translation.json --device cuda
python -m benchmarks.translation --data DIR --kinds softmax dpfp --seeds 1 --steps 400 --out quick.json

DIR has train, val and test_2016_flickr, each as .de and .en with one sentence per line, plain or .gz. Every run is
written to --out as it ends, and a repeated command skips the runs that are there. A file with other settings or other
sentences is refused. Needs sacrebleu.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.translation.data import digest_of, read_splits
from benchmarks.translation.runs import TITLE, Run, earlier_runs, require_sacrebleu, run, save
from benchmarks.translation.training import Settings, Task
from rebind.errors import InputError
from rebind.nn.seq2seq import SEQ2SEQ_KINDS


def table_of(runs: list[Run]) -> Table:
    """Return a table with one row per kind: means, and the range over seeds."""
    table = Table(
        title=TITLE, title_justify="left",
        caption="mean (least to most) over seeds; state: numbers that a decoder stores after 16 + 16 tokens",
        caption_justify="left",
    )  # fmt: skip
    table.add_column("attention", no_wrap=True)
    for column in ("seeds", "BLEU", "validation loss", "train s", "test s", "parameters", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    for kind in dict.fromkeys(result.kind for result in runs):
        seeds = [result for result in runs if result.kind == kind]
        table.add_row(
            kind,
            str(len(seeds)),
            _spread([result.bleu for result in seeds], 1),
            _spread([result.valid_loss for result in seeds], 3),
            f"{mean(result.train_seconds for result in seeds):.1f}",
            f"{mean(result.test_seconds for result in seeds):.1f}",
            f"{seeds[0].parameters / 1e6:.1f}M",
            f"{seeds[0].state:,}",
        )
    return table


def _spread(numbers: list[float], digits: int) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{mean(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the raw files of Multi30k")
    parser.add_argument("--kinds", nargs="+", choices=SEQ2SEQ_KINDS, default=[*SEQ2SEQ_KINDS])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per kind")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; the tokenizer is written beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="%(default)s")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    require_sacrebleu()
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    console = Console(width=130, highlight=False)
    pairs = read_splits(options.data)
    digest = digest_of(pairs)
    runs = earlier_runs(options.out, settings, digest)
    done = {(result.kind, result.seed) for result in runs}
    waiting = [(kind, seed) for seed in range(options.seeds) for kind in options.kinds if (kind, seed) not in done]
    if waiting:
        task = Task.of(pairs, settings, options.out.resolve().parent, torch.device(options.device))
    for kind, seed in waiting:
        with _progress(console, f"{kind}, seed {seed}", settings.steps) as report:
            result = run(kind, seed, task, settings, report)
        runs.append(result)
        save(options.out, settings, digest, runs)
        console.print(
            f"{kind}, seed {seed}: BLEU {result.bleu:.1f}, validation loss {result.valid_loss:.3f}, "
            f"{result.train_seconds:.1f} s of training and {result.test_seconds:.1f} s of translation"
        )
    console.print(table_of(runs), f"written to {options.out}", sep="\n")


@contextmanager
def _progress(console: Console, name: str, steps: int) -> Iterator[Callable[[int, float | None], None]]:
    """Show a bar for one run; yield a function of the step, and of the best validation loss where it was measured."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(name, total=steps, loss="")

    def report(step: int, loss: float | None) -> None:
        if loss is not None:
            bar.update(task, completed=step, loss=f"validation loss {loss:.3f}")
        elif step % 20 == 0:
            bar.update(task, completed=step)

    with bar:
        yield report


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as problem:
        sys.exit(f"error: {problem.message(lambda name, value: f'--{name}' if value is None else f'--{name} {value}')}")
