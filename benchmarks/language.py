"""Quality of language models by the kind of their layers, with the same tokens, parameters and schedule for all.

    python -m benchmarks.language --data train.txt more.txt --valid valid.txt --device cuda --jobs 4

For every kind and seed a small model (the small setting of Schlag et al. with fewer layers) is trained on --data, in
the same order for all kinds, with one byte-level BPE trained on it. The width of the MLPs is chosen such that every
kind has as many parameters as attention has with --intermediate, to about half a per cent. Then the model reads
--valid-tokens of --valid:

- *perplexity*: memories are emptied every --length tokens, as in training (Tables 2, 3 and 5 of the paper);
- *×2 … ×16*: the same tokens, with memories emptied every 2 to 16 times --length;
- *carried*: the same tokens, with memories never emptied (the question of Table 4). With --carry they are also carried
  from segment to segment in training, as in that table; attention is then left out.

A run is one kind and one seed. Every kind runs in a process of its own, --jobs at a time, since models this small leave
most of a GPU idle. Every run has a file and a folder in --work called KIND-SEED-MARK. The mark is a digest of the texts
and of the options that its numbers depend on: the same command continues an interrupted run, and other options do not
touch it. --out has the results of all runs with the same mark. Means are over seeds; ± is half the range.
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
from torch import Tensor
from torch.nn import functional

from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.nn import RebindForCausalLM
from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig, carried_perplexity, train
from rebind.nn.training.data import TokenizedText, prepare_text
from rebind.nn.training.outputs import TIMES
from rebind.storage import JsonLines, write_file, write_json

KINDS = (  # the slowest first
    "ttt-linear",
    "rwkv7",
    "gdn2",
    "kda",
    "comba",
    "gla",
    "attention",
    "linear-sum",
    "linear-delta",
    "performer-sum",
    "performer-delta",
    "dpfp-sum",
    "dpfp-delta",
    "delta",
    "gated_delta",
    "mamba2",
    "longhorn",
)
FACTORS = (1, 2, 4, 8, 16)  # of the training length
BATCH_TOKENS = 2**15  # tokens with their logits in memory at once
MARKED_OPTIONS = (  # the numbers of a run depend on these
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
    intermediate: int  # width of the MLPs, which makes up for the parameters of the layers
    state: int | None  # numbers stored for a sequence; None if they grow with it
    loss: float  # of the last training batch
    epochs: float
    perplexity: float  # memories emptied every `length` tokens
    by_length: dict[str, float]  # … every so many times `length`
    by_position: list[float]  # of each stretch of `length` tokens in the longest windows
    carried: float | None  # never emptied; None for attention
    seconds: float  # of all training steps, by the times that the run logs
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
        optimizer=OptimizerConfig(learning_rate=options.rate, warmup=options.warmup),
        length=options.length,
        batch_size=options.batch,
        steps=options.steps,
        carry=options.carry,
        seed=seed,
        evaluate_every=options.steps,
        evaluate_tokens=4 * options.length,  # what matters is measured afterwards
        save_every=options.steps,
        keep_checkpoints=1,
        log_every=50,
        precision=options.precision,
        record=options.device.startswith("cuda") and not options.carry,  # launching would take longer than computing
        device=options.device,
    )


def count_parameters(options: argparse.Namespace, kind: str, intermediate: int, vocabulary: int) -> int:
    with torch.device("meta"):
        model = RebindForCausalLM(config_of(options, kind, 0, intermediate).model_config(vocabulary))
    return int(model.num_parameters())


def matching_width(options: argparse.Namespace, kind: str, vocabulary: int) -> int:
    """Return the width of the MLPs with which this kind has as many parameters as attention; they are linear in it."""
    target = count_parameters(options, "attention", options.intermediate, vocabulary)
    first, second = (count_parameters(options, kind, width, vocabulary) for width in (1, 2))
    return max(1, round((target - first) / (second - first)) + 1)


def run(options: argparse.Namespace, kind: str, seed: int, corpus: TokenizedText) -> Result:
    """Train a model and measure it on the validation text."""
    intermediate = matching_width(options, kind, len(corpus.tokenizer))
    folder = work_folder(options) / run_name(kind, seed, mark_of(options))
    result = train(config_of(options, kind, seed, intermediate), folder, cache=work_folder(options) / "tokens")
    begin = time.perf_counter()
    model: Any = RebindForCausalLM.from_pretrained(result.checkpoint).to(options.device)
    summary = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    bfloat16 = options.precision == "bfloat16"
    with torch.autocast(torch.device(options.device).type, dtype=torch.bfloat16, enabled=bfloat16):
        measurements = measure(options, model, corpus)
    return Result(
        kind=kind,
        seed=seed,
        parameters=result.summary["parameters"],
        intermediate=intermediate,
        state=summary["state"],
        loss=summary["loss"],
        epochs=summary["epochs"],
        seconds=sum(row["seconds"] for row in JsonLines(folder / TIMES).read()),
        evaluation_seconds=time.perf_counter() - begin,
        **measurements,
    )


def count_tokens(options: argparse.Namespace, corpus: TokenizedText) -> int:
    """Return how many tokens of --valid are predicted: as many of the longest windows as there are."""
    longest = FACTORS[-1] * options.length
    if options.valid_tokens < longest:
        raise SystemExit(f"--valid-tokens is {options.valid_tokens}; expected {longest} or more.")
    if len(corpus.validation) <= longest:
        count = len(corpus.validation)
        raise SystemExit(f"{options.valid} has {count} tokens; expected more than {longest}. Add text.")
    return int(min(options.valid_tokens, len(corpus.validation) - 1) // longest * longest)


def measure(options: argparse.Namespace, model: RebindForCausalLM, corpus: TokenizedText) -> dict[str, Any]:
    longest, count = FACTORS[-1] * options.length, count_tokens(options, corpus)
    ids = torch.from_numpy(corpus.validation[: count + 1].astype("int64"))
    losses = {}
    for factor in FACTORS:
        length = factor * options.length
        losses[factor] = loss_by_position(model, ids, length, rows=max(1, BATCH_TOKENS // length))
    stretches = losses[FACTORS[-1]].view(-1, options.length).mean(1)
    return {
        "perplexity": _perplexity(float(losses[1].mean())),
        "by_length": {f"{factor}": _perplexity(float(losses[factor].mean())) for factor in FACTORS},
        "by_position": [_perplexity(loss) for loss in stretches.tolist()],
        "carried": None if model.grows else carried_perplexity(model, ids, longest).perplexity,
    }


@torch.no_grad()
def loss_by_position(model: RebindForCausalLM, ids: Tensor, length: int, *, rows: int = 8) -> Tensor:
    """Return the mean loss [length] of the first, second, … token of windows, each of which starts with empty states.

    The text is cut into windows of `length` tokens without overlap, and the model reads `rows` of them at once.
    """
    losses = []
    for windows in ids.unfold(0, length + 1, length).to(model.device).split(rows):
        logits = model(windows[:, :-1], use_cache=False).logits.float().transpose(1, 2)
        losses.append(functional.cross_entropy(logits, windows[:, 1:], reduction="none").cpu().double())
    return torch.cat(losses).mean(0)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


# Files


def work_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the runs and their results."""
    return Path(options.work or Path("runs") / Path(options.out).stem)


def corpus_file(options: argparse.Namespace) -> Path:
    """Return the file with all of --data, on which the tokenizer and the models are trained."""
    return work_folder(options) / "corpus.txt"


def mark_of(options: argparse.Namespace) -> str:
    """Return a digest of everything that the numbers of a run depend on besides its kind and seed."""
    texts = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in (*options.data, options.valid)]
    values = [(name, getattr(options, name)) for name in MARKED_OPTIONS]
    return hashlib.sha256(repr((values, texts)).encode()).hexdigest()[:16]


def run_name(kind: str, seed: int, mark: str) -> str:
    """Return the name of the file and the folder of a run."""
    return f"{kind}-{seed}-{mark}"


def finished_runs(options: argparse.Namespace, mark: str) -> dict[tuple[str, int], Result]:
    """Return the finished runs with that mark."""
    results = {}
    for path in sorted(work_folder(options).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("options") == mark:
            results[content["kind"], content["seed"]] = Result(**content)
    return results


def prepare_corpus(options: argparse.Namespace) -> TokenizedText:
    """Return the corpus in tokens, tokenized now or earlier."""
    texts = [Path(name).read_text(encoding="utf-8") for name in options.data]
    text = "\n".join(texts).encode()
    if not corpus_file(options).exists() or corpus_file(options).read_bytes() != text:
        write_file(corpus_file(options), text)
    return prepare_text(config_of(options, "delta", 0, 8).data, work_folder(options) / "tokens")


# One process per kind


def run_kind(options: argparse.Namespace, kind: str) -> None:
    """Run every seed of a kind that is not finished."""
    corpus, mark = prepare_corpus(options), mark_of(options)
    finished = finished_runs(options, mark)
    for seed in range(options.seeds):
        if (kind, seed) not in finished:
            content = {**asdict(run(options, kind, seed, corpus)), "options": mark}
            write_json(work_folder(options) / f"{run_name(kind, seed, mark)}.json", content)


def run_processes(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Run every kind in a process of its own, --jobs at a time; return the problems."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.jobs))} if options.jobs > 1 else {}
    mark = mark_of(options)
    finished = finished_runs(options, mark)
    waiting = [kind for kind in options.kinds if any((kind, seed) not in finished for seed in range(options.seeds))]
    running: dict[str, subprocess.Popen[bytes]] = {}
    problems, begin = [], time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                kind = waiting.pop(0)
                command = [sys.executable, "-m", "benchmarks.language", *arguments, "--worker", kind]
                with (work_folder(options) / f"{kind}.log").open("wb") as log:
                    running[kind] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **threads})
            time.sleep(0.2)
            for kind in [kind for kind, process in running.items() if process.poll() is not None]:
                if running.pop(kind).returncode:
                    lines = (work_folder(options) / f"{kind}.log").read_text(errors="replace").strip().splitlines()
                    problems.append(f"{kind}: {lines[-1] if lines else 'no output'}")
            now = finished_runs(options, mark)
            for key in sorted(now.keys() - finished.keys()):
                print(f"{time.perf_counter() - begin:6.0f} s  {describe(now[key])}", flush=True)
            if now.keys() != finished.keys():
                save(options, list(now.values()))
            finished = now
    finally:
        for process in running.values():
            process.kill()
    return problems


# Report


def describe(result: Result) -> str:
    never = "" if result.carried is None else f", carried {result.carried:.2f}"
    longest = f"×{FACTORS[-1]} {result.by_length[str(FACTORS[-1])]:.2f}"
    return f"{result.kind}, seed {result.seed}: {result.perplexity:.2f}, {longest}{never} ({result.seconds:.0f} s)"


def spread(values: Sequence[float]) -> str:
    """Return the mean and half the range.

    >>> spread([10.0, 12.0, 11.0])
    '11.00 ± 1.00'
    """
    return f"{statistics.fmean(values):.2f} ± {(max(values) - min(values)) / 2:.2f}"


def show(options: argparse.Namespace, results: Sequence[Result]) -> None:
    training = f"{options.steps} steps of {options.batch} × {options.length} tokens"
    title = f"perplexity: {options.layers} layers of {options.hidden}, {training}"
    table = Table(title=title, title_justify="left", title_style="bold")
    factors = [f"×{factor}" for factor in FACTORS[1:]]
    for column in ("kind", "seeds", "parameters", "state", "perplexity", *factors, "carried"):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for kind in options.kinds:
        seeds = [result for result in results if result.kind == kind]
        if not seeds:
            continue
        longer = [
            f"{statistics.fmean(result.by_length[str(factor)] for result in seeds):.2f}" for factor in FACTORS[1:]
        ]
        never = [result.carried for result in seeds if result.carried is not None]
        table.add_row(
            kind,
            str(len(seeds)),
            f"{seeds[0].parameters:,}",
            "grows" if seeds[0].state is None else f"{seeds[0].state:,}",
            spread([result.perplexity for result in seeds]),
            *longer,
            spread(never) if never else "",
        )
    Console(width=140).print(table)


def save(options: argparse.Namespace, results: list[Result]) -> None:
    content = {
        "machine": machine("transformers"),
        "options": {name: getattr(options, name) for name in MARKED_OPTIONS},
        "rows": [asdict(result) for result in results],
    }
    write_json(options.out, content)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="text files to train on")
    parser.add_argument("--valid", required=True, help="text file to measure on")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per kind")
    parser.add_argument("--steps", type=int, default=1_200)
    parser.add_argument("--length", type=int, default=256, help="tokens per segment")
    parser.add_argument("--batch", type=int, default=16, help="segments per step")
    parser.add_argument("--carry", action="store_true", help="carry memories between segments in training too")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="warm-up steps")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=512, help="width of the MLPs of attention")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--vocabulary", type=int, default=4_000)
    parser.add_argument("--valid-tokens", type=int, default=2**17, help="tokens to measure on, at most")
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on a GPU"
    )
    parser.add_argument("--jobs", type=int, default=1, help="kinds to run at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default=str(RESULTS / "language.json"))
    parser.add_argument("--work", help="folder of the runs; default: runs/ and the name of --out")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.precision == "auto":  # resolved here, so that the mark depends on it
        options.precision = "bfloat16" if options.device.startswith("cuda") else "float32"
    if options.carry:
        options.kinds = [kind for kind in options.kinds if kind != "attention"]  # its state grows without bound
        if not options.kinds:
            parser.error("--carry leaves out attention, because its state grows without bound: choose other --kinds")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.worker:
        run_kind(options, options.worker)
        return 0
    corpus = prepare_corpus(options)
    count_tokens(options, corpus)  # fails before anything is trained if there is too little text
    epochs = options.steps * options.batch * options.length / len(corpus.train)
    print(f"{len(corpus.train):,} tokens for training, {epochs:.1f} epochs; {len(corpus.validation):,} for validation")
    counts = {}
    for kind in options.kinds:
        width = matching_width(options, kind, len(corpus.tokenizer))
        counts[kind] = count_parameters(options, kind, width, len(corpus.tokenizer))
    if max(counts.values()) > 1.02 * min(counts.values()):
        raise SystemExit(
            f"The numbers of parameters differ by more than 2% ({counts}). Choose a larger --intermediate."
        )
    problems = run_processes(options, arguments)
    results = list(finished_runs(options, mark_of(options)).values())
    if results:
        save(options, results)  # including kinds of earlier commands
        show(options, results)
    for problem in problems:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
