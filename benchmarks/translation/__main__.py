"""German to English on Multi30k: softmax attention against fast weights, the question of Schlag et al.'s Table 1.

python -m benchmarks.translation --data DIR --out translation.json --device cuda
python -m benchmarks.translation --data DIR --kinds softmax dpfp --seeds 1 --steps 400 --out quick.json

DIR holds train, val and test_2016_flickr, each as .de and .en, one sentence a line, plain or .gz. Every run is written
to --out as it ends; started again, the runs that are there are not made again. A file of other settings or other
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
from benchmarks.translation.runs import TITLE, Run, kept_runs, require_sacrebleu, run, save
from benchmarks.translation.training import Settings, Task
from rebind.errors import InputError
from rebind.nn.seq2seq.kinds import SEQ2SEQ_KINDS


def table(runs: list[Run]) -> Table:
    """A row a kind: means, and how far the seeds lie apart."""
    made = Table(
        title=TITLE, title_justify="left",
        caption="mean (least to most) over seeds; state: numbers a decoder keeps of 16 + 16 tokens",
        caption_justify="left",
    )  # fmt: skip
    made.add_column("attention", no_wrap=True)
    for column in ("seeds", "BLEU", "validation loss", "train s", "test s", "parameters", "state"):
        made.add_column(column, justify="right", no_wrap=True)
    for kind in dict.fromkeys(found.kind for found in runs):
        mine = [found for found in runs if found.kind == kind]
        made.add_row(
            kind,
            str(len(mine)),
            _spread([found.bleu for found in mine], 1),
            _spread([found.valid_loss for found in mine], 3),
            f"{mean(found.train_seconds for found in mine):.1f}",
            f"{mean(found.test_seconds for found in mine):.1f}",
            f"{mine[0].parameters / 1e6:.1f}M",
            f"{mine[0].state:,}",
        )
    return made


def _spread(numbers: list[float], digits: int) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{mean(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with Multi30k's raw files")
    parser.add_argument("--kinds", nargs="+", choices=[*SEQ2SEQ_KINDS], default=[*SEQ2SEQ_KINDS])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind: seeds 0 to this less 1")
    parser.add_argument("--out", type=Path, required=True, help="JSON; the tokenizer is kept beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="%(default)s")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    args = parsed(arguments)
    require_sacrebleu()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    console = Console(width=130, highlight=False)
    pairs = read_splits(args.data)
    digest = digest_of(pairs)
    runs = kept_runs(args.out, settings, digest)
    done = {(found.kind, found.seed) for found in runs}
    waiting = [(kind, seed) for seed in range(args.seeds) for kind in args.kinds if (kind, seed) not in done]
    if waiting:
        task = Task.of(pairs, settings, args.out.resolve().parent, torch.device(args.device))
    for kind, seed in waiting:
        with _progress(console, f"{kind}, seed {seed}", settings.steps) as told:
            found = run(kind, seed, task, settings, told)
        runs.append(found)
        save(args.out, settings, digest, runs)
        console.print(
            f"{kind}, seed {seed}: BLEU {found.bleu:.1f}, validation loss {found.valid_loss:.3f}, "
            f"{found.train_seconds:.1f} s and {found.test_seconds:.1f} s"
        )
    console.print(table(runs), f"written to {args.out}", sep="\n")


@contextmanager
def _progress(console: Console, name: str, steps: int) -> Iterator[Callable[[int, float | None], None]]:
    """A bar for one run; what it gives takes the step, and the best validation loss where it was taken."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(name, total=steps, loss="")

    def told(step: int, loss: float | None) -> None:
        if loss is not None:
            bar.update(task, completed=step, loss=f"validation loss {loss:.3f}")
        elif step % 20 == 0:
            bar.update(task, completed=step)

    with bar:
        yield told


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as problem:
        sys.exit(f"error: {problem}")
