"""Quality of language models by the kind of their layers: the same tokens, parameters and schedule for all.

    python -m benchmarks.language --data train.txt more.txt --valid valid.txt --device cuda --jobs 4

For every kind and seed a small model (Schlag et al.'s small setting with fewer layers) is trained on --data, in the
same order for all kinds, with one byte-level BPE trained on it. The MLPs' width makes the parameters as many as
--intermediate gives to attention, to half a per cent or so. Then the model reads --valid-tokens of --valid:

- *perplexity*: memories begin empty every --length tokens, as in training (the papers' tables 2, 3 and 5);
- *×2 … ×16*: the same tokens, memories begin empty every so many times --length only;
- *carried*: the same tokens again, memories never emptied (the question of table 4). With --carry they are carried
  from segment to segment in training too, which is that table's setting; attention is left out then.

A run is one kind and one seed. Kinds run as processes of their own, --jobs at a time: models this small leave most of a
GPU idle. Every run has a file and a folder of its own in --work, KIND-SEED-MARK. The mark is a digest of the texts and
the options that decide its numbers: the same command goes on from there, another one leaves it alone. Results of all
runs of a mark are merged in --out. Means are over seeds, ± is half the range between the best and the worst.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS
from rebind.bench.machine import machine
from rebind.files import write_atomically
from rebind.nn import RebindForCausalLM
from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig, by_position, carried, train
from rebind.nn.training.data import Corpus, prepare
from rebind.nn.training.load import load
from rebind.nn.training.log import Log
from rebind.nn.training.loop import TIMES

KINDS = (  # the slowest first
    "ttt-linear",
    "attention",
    "linear-sum",
    "linear-delta",
    "performer-sum",
    "performer-delta",
    "dpfp-sum",
    "dpfp-delta",
    "delta",
    "gated-delta",
    "longhorn",
)
FACTORS = (1, 2, 4, 8, 16)  # of the training length
AT_ONCE = 2**15  # tokens whose logits are held together
DECIDES = (  # of the options: what a run's numbers depend on
    "steps",
    "length",
    "batch",
    "carry",
    "rate",
    "warmup",
    "hidden",
    "heads",
    "layers",
    "intermediate",
    "dropout",
    "vocabulary",
    "valid_tokens",
    "precision",
)


@dataclass(frozen=True)
class Result:
    """One kind and one seed."""

    kind: str
    seed: int
    parameters: int
    intermediate: int  # width of the MLPs, which makes up for what the layers take
    state: int | None  # numbers held for a sequence; None where they grow with it
    loss: float  # of the last training batch
    epochs: float
    perplexity: float  # memories begin empty every `length` tokens
    by_length: dict[str, float]  # … every so many times `length`
    by_position: list[float]  # of each stretch of `length` tokens in the longest windows
    carried: float | None  # never emptied; None for attention
    seconds: float  # of all training steps that were made, by the run's own log of times
    evaluation_seconds: float


# A run


def config_of(options: argparse.Namespace, kind: str, seed: int, intermediate: int) -> TrainConfig:
    model = {
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "intermediate_size": intermediate,
        "dropout": options.dropout,
    }
    return TrainConfig(
        DataConfig(str(corpus_file(options)), vocabulary=options.vocabulary, validation=options.valid),
        preset="schlag-small",
        layers=kind,
        model=model,
        optimizer=OptimizerConfig(rate=options.rate, warmup=options.warmup),
        length=options.length,
        batch=options.batch,
        steps=options.steps,
        carry=options.carry,
        seed=seed,
        evaluate_every=options.steps,
        evaluate_tokens=4 * options.length,  # all that counts is measured afterwards
        save_every=options.steps,
        keep=1,
        log_every=50,
        precision=options.precision,
        record=options.device.startswith("cuda") and not options.carry,  # launching would take longer than computing
        device=options.device,
    )


def parameters_of(options: argparse.Namespace, kind: str, intermediate: int, vocabulary: int) -> int:
    with torch.device("meta"):
        model = RebindForCausalLM(config_of(options, kind, 0, intermediate).model_config(vocabulary))
    return int(model.num_parameters())


def matched(options: argparse.Namespace, kind: str, vocabulary: int) -> int:
    """The MLPs' width with which this kind has attention's parameters: their number is linear in it."""
    wanted = parameters_of(options, "attention", options.intermediate, vocabulary)
    none, one = (parameters_of(options, kind, width, vocabulary) for width in (1, 2))
    return max(1, round((wanted - none) / (one - none)) + 1)


def run(options: argparse.Namespace, kind: str, seed: int, corpus: Corpus) -> Result:
    """Train, then read the validation text in every way."""
    intermediate = matched(options, kind, len(corpus.tokenizer))
    folder = parts(options) / name_of(kind, seed, mark(options))
    result = train(config_of(options, kind, seed, intermediate), folder, cache=parts(options) / "tokens")
    trained = time.perf_counter()
    model = load(folder, device=options.device).model
    told = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    narrow = options.precision == "bfloat16"
    with torch.autocast(torch.device(options.device).type, dtype=torch.bfloat16, enabled=narrow):
        measured = measure(options, model, corpus)
    return Result(
        kind=kind,
        seed=seed,
        parameters=result.summary["parameters"],
        intermediate=intermediate,
        state=told["state"],
        loss=told["loss"],
        epochs=told["epochs"],
        seconds=sum(row["seconds"] for row in Log(folder / TIMES).rows()),
        evaluation_seconds=time.perf_counter() - trained,
        **measured,
    )


def tokens_read(options: argparse.Namespace, corpus: Corpus) -> int:
    """How many tokens of --valid are predicted: as many of the longest windows as there are."""
    longest = FACTORS[-1] * options.length
    if options.valid_tokens < longest:
        raise SystemExit(f"--valid-tokens is {options.valid_tokens}, expected {longest} or more: raise it")
    if len(corpus.held) <= longest:
        raise SystemExit(f"{options.valid} has {len(corpus.held)} tokens, expected more than {longest}: give more text")
    return int(min(options.valid_tokens, len(corpus.held) - 1) // longest * longest)


def measure(options: argparse.Namespace, model: RebindForCausalLM, corpus: Corpus) -> dict[str, Any]:
    longest, count = FACTORS[-1] * options.length, tokens_read(options, corpus)
    ids = torch.from_numpy(corpus.held[: count + 1].astype("int64"))
    losses = {}
    for factor in FACTORS:
        length = factor * options.length
        losses[factor] = by_position(model, ids, length, rows=max(1, AT_ONCE // length))
    along = losses[FACTORS[-1]].view(-1, options.length).mean(1)
    return {
        "perplexity": _perplexity(float(losses[1].mean())),
        "by_length": {f"{factor}": _perplexity(float(losses[factor].mean())) for factor in FACTORS},
        "by_position": [_perplexity(loss) for loss in along.tolist()],
        "carried": None if model.grows else carried(model, ids, longest).perplexity,
    }


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


# Files


def parts(options: argparse.Namespace) -> Path:
    """Where runs and their results lie."""
    return Path(options.work or Path("runs") / Path(options.out).stem)


def corpus_file(options: argparse.Namespace) -> Path:
    """All of --data in one file: what the tokenizer and the models are trained on."""
    return parts(options) / "corpus.txt"


def mark(options: argparse.Namespace) -> str:
    """A digest of all that decides a run's numbers besides its kind and seed."""
    texts = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in (*options.data, options.valid)]
    told = [(name, getattr(options, name)) for name in DECIDES]
    return hashlib.sha256(repr((told, texts)).encode()).hexdigest()[:16]


def name_of(kind: str, seed: int, told: str) -> str:
    """What a run's file and folder are called."""
    return f"{kind}-{seed}-{told}"


def found(options: argparse.Namespace, expected: str) -> dict[tuple[str, int], Result]:
    """The runs of that mark that are done."""
    rows = {}
    for path in sorted(parts(options).glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("options") == expected:
            rows[told["kind"], told["seed"]] = Result(**told)
    return rows


def ready(options: argparse.Namespace) -> Corpus:
    """The corpus, tokenized now or earlier."""
    texts = [Path(name).read_text(encoding="utf-8") for name in options.data]
    text = "\n".join(texts).encode()
    if not corpus_file(options).exists() or corpus_file(options).read_bytes() != text:
        write_atomically(corpus_file(options), text)
    return prepare(config_of(options, "delta", 0, 8).data, parts(options) / "tokens")


# One process a kind


def work(options: argparse.Namespace, kind: str) -> None:
    """Every seed of a kind that is not done yet."""
    corpus, told = ready(options), mark(options)
    done = found(options, told)
    for seed in range(options.seeds):
        if (kind, seed) not in done:
            content = {**asdict(run(options, kind, seed, corpus)), "options": told}
            path = parts(options) / f"{name_of(kind, seed, told)}.json"
            write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def share(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Every kind in a process of its own, --jobs at a time; what went wrong."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))} if options.jobs > 1 else {}
    told = mark(options)
    done = found(options, told)
    waiting = [kind for kind in options.kinds if any((kind, seed) not in done for seed in range(options.seeds))]
    running: dict[str, subprocess.Popen[bytes]] = {}
    problems, begin = [], time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                kind = waiting.pop(0)
                command = [sys.executable, "-m", "benchmarks.language", *words, "--worker", kind]
                with (parts(options) / f"{kind}.log").open("wb") as log:
                    running[kind] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **threads})
            time.sleep(0.2)
            for kind in [kind for kind, process in running.items() if process.poll() is not None]:
                if running.pop(kind).returncode:
                    lines = (parts(options) / f"{kind}.log").read_text(errors="replace").strip().splitlines()
                    problems.append(f"{kind}: {lines[-1] if lines else 'ended without a word'}")
            now = found(options, told)
            for key in sorted(now.keys() - done.keys()):
                print(f"{time.perf_counter() - begin:6.0f} s  {line(now[key])}", flush=True)
            if now.keys() != done.keys():
                save(options, list(now.values()))
            done = now
    finally:
        for process in running.values():
            process.kill()
    return problems


# What is told


def line(row: Result) -> str:
    on = "" if row.carried is None else f", carried {row.carried:.2f}"
    far = f"×{FACTORS[-1]} {row.by_length[str(FACTORS[-1])]:.2f}"
    return f"{row.kind}, seed {row.seed}: {row.perplexity:.2f}, {far}{on} ({row.seconds:.0f} s)"


def spread(values: Sequence[float]) -> str:
    """Mean and half the range.

    >>> spread([10.0, 12.0, 11.0])
    '11.00 ± 1.00'
    """
    return f"{statistics.fmean(values):.2f} ± {(max(values) - min(values)) / 2:.2f}"


def show(options: argparse.Namespace, rows: Sequence[Result]) -> None:
    trained = f"{options.steps} steps of {options.batch} × {options.length} tokens"
    title = f"perplexity: {options.layers} layers of {options.hidden}, {trained}"
    table = Table(title=title, title_justify="left", title_style="bold")
    far = [f"×{factor}" for factor in FACTORS[1:]]
    for column in ("kind", "seeds", "parameters", "state", "perplexity", *far, "carried"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for kind in options.kinds:
        mine = [row for row in rows if row.kind == kind]
        if not mine:
            continue
        longer = [f"{statistics.fmean(row.by_length[str(factor)] for row in mine):.2f}" for factor in FACTORS[1:]]
        on = [row.carried for row in mine if row.carried is not None]
        table.add_row(
            kind,
            str(len(mine)),
            f"{mine[0].parameters:,}",
            "grows" if mine[0].state is None else f"{mine[0].state:,}",
            spread([row.perplexity for row in mine]),
            *longer,
            spread(on) if on else "",
        )
    Console(width=140).print(table)


def save(options: argparse.Namespace, rows: list[Result]) -> None:
    content = {
        "machine": machine("transformers"),
        "options": {name: getattr(options, name) for name in DECIDES},
        "rows": [asdict(row) for row in rows],
    }
    write_atomically(Path(options.out), (json.dumps(content, indent=2) + "\n").encode())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="text files to train on")
    parser.add_argument("--valid", required=True, help="text file to measure on")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_200)
    parser.add_argument("--length", type=int, default=256, help="tokens a segment")
    parser.add_argument("--batch", type=int, default=16, help="segments a step")
    parser.add_argument("--carry", action="store_true", help="carry memories between segments in training too")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512, help="attention's; the others' is made to match")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=4_000)
    parser.add_argument("--valid-tokens", type=int, default=2**17, help="most that are read")
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on a GPU"
    )
    parser.add_argument("--jobs", type=int, default=1, help="kinds that run at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=str(RESULTS / "language.json"))
    parser.add_argument("--work", help="folder of the runs; default: runs/ and the name of --out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.precision == "auto":  # settled here, so that the mark says which it was
        options.precision = "bfloat16" if options.device.startswith("cuda") else "float32"
    if options.carry:
        options.kinds = [kind for kind in options.kinds if kind != "attention"]  # its memory grows without end
        if not options.kinds:
            parser.error("--carry leaves attention out, whose memory grows without end: name other --kinds")
    return options


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = parse(words)
    if options.worker:
        work(options, options.worker)
        return 0
    corpus = ready(options)
    tokens_read(options, corpus)  # too little text is said before anything is trained
    a_step = options.batch * options.length
    epochs = options.steps * a_step / len(corpus.train)
    print(f"{len(corpus.train):,} tokens to train on, {epochs:.1f} epochs; {len(corpus.held):,} held")
    counts = {}
    for kind in options.kinds:
        width = matched(options, kind, len(corpus.tokenizer))
        counts[kind] = parameters_of(options, kind, width, len(corpus.tokenizer))
    if max(counts.values()) > 1.02 * min(counts.values()):
        raise SystemExit(f"parameters differ by more than 2 per cent ({counts}): give a larger --intermediate")
    problems = share(options, words)
    rows = list(found(options, mark(options)).values())
    if rows:
        save(options, rows)  # of kinds that were not asked for this time, too
        show(options, rows)
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
