"""`rebind train`: train a language model on text, or resume a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.tables import pairs, table
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.nn.training import TrainingProgress, TrainingResult, TrainingUpdate

EXAMPLES = opt.examples(
    "rebind train --data corpus.txt --out runs/delta --layers delta --steps 2000",
    "rebind train --data corpus.txt --out runs/hybrid --layers gated_delta,gated_delta,attention --device cuda",
    "rebind train --data hf:roneneldan/TinyStories --out runs/stories --preset modern-60m --length 512 --carry",
    "torchrun --nproc-per-node 4 -m rebind train --data corpus.txt --out runs/four --batch-size 64 --device cuda",
    "torchrun --nproc-per-node 4 -m rebind train --data corpus.txt --out runs/large --sharded --device cuda",
    note="An interrupted run resumes from its last checkpoint when the same command is run again.",
)

DATA, STEPS, MODEL = "Data", "Training", opt.MODEL


def train(
    data: Annotated[str, opt.value("TEXT", "UTF-8 text file, or hf:NAME:SPLIT from the Hub.", panel=DATA)],
    out: Annotated[Path, opt.value("DIR", "Folder of the run: a new one, or one to resume.")],
    preset: Annotated[
        str, opt.value("NAME", "modern-10m, modern-60m, modern-350m, schlag-small or schlag-medium.", panel=MODEL)
    ] = "modern-10m",
    layers: Annotated[
        str | None,
        opt.value("KINDS", "Kind of the layers, or a pattern: delta,delta,attention.", default="preset's", panel=MODEL),
    ] = None,
    changes: Annotated[
        list[str] | None,
        opt.value("FIELD=X", "Set a field of the model's config. Can be repeated.", "--set", panel=MODEL),
    ] = None,
    tokenizer: Annotated[
        str, opt.value("NAME", "bpe or characters (trained on the text), a folder or a Hub id.", panel=DATA)
    ] = "bpe",
    vocabulary: Annotated[int, opt.value("N", "Largest vocabulary of a trained bpe tokenizer.", panel=DATA)] = 8_000,
    validation: Annotated[
        str | None, opt.value("TEXT", "Text to measure perplexity on.", default="the end of --data", panel=DATA)
    ] = None,
    validation_fraction: Annotated[
        float, opt.value("X", "Fraction of the text, taken from its end, held out for validation.", panel=DATA)
    ] = 0.05,
    length: Annotated[int, opt.value("N", "Number of tokens per segment.", panel=STEPS)] = 256,
    batch_size: Annotated[int, opt.value("N", "Number of segments per step, over all processes.", panel=STEPS)] = 16,
    accumulate: Annotated[int, opt.value("N", "Number of pieces that a batch is computed in.", panel=STEPS)] = 1,
    steps: Annotated[int, opt.value("N", "Number of training steps.", panel=STEPS)] = 1_000,
    learning_rate: Annotated[float, opt.value("X", "Peak learning rate.", panel=STEPS)] = 1e-3,
    warmup: Annotated[int, opt.value("N", "Number of steps until the learning rate peaks.", panel=STEPS)] = 100,
    weight_decay: Annotated[float, opt.value("X", "Weight decay of matrices.", panel=STEPS)] = 0.1,
    clip_norm: Annotated[float, opt.value("X", "Largest norm of the gradient.", panel=STEPS)] = 1.0,
    carry: Annotated[bool, opt.flag("--carry", "Carry memories from each segment to the next.", panel=STEPS)] = False,
    evaluate_every: Annotated[int, opt.value("N", "Number of steps between evaluations.", panel=STEPS)] = 250,
    evaluate_tokens: Annotated[int, opt.value("N", "Evaluate on at most N tokens.", panel=STEPS)] = 100_000,
    save_every: Annotated[int, opt.value("N", "Number of steps between checkpoints.", panel=STEPS)] = 250,
    keep_checkpoints: Annotated[int, opt.value("N", "Number of checkpoints to keep.", panel=STEPS)] = 2,
    seed: Annotated[int, opt.value("N", "Random seed for initial weights, data order and dropout.", panel=STEPS)] = 0,
    precision: Annotated[
        str, opt.value("NAME", "float32, bfloat16, or auto (bfloat16 on a GPU, else float32).", panel=MODEL)
    ] = "auto",
    record: Annotated[
        bool | None,
        opt.flag(
            "--record/--no-record",
            "Record steps as a CUDA graph. [dim]\\[default: on one GPU, up to 400M parameters][/dim]",
            panel=MODEL,
        ),
    ] = None,
    compiled: Annotated[bool, opt.flag("--compile", "Compile the model with torch.compile.", panel=MODEL)] = False,
    sharded: Annotated[bool, opt.flag("--sharded", "Shard weights over processes (FSDP).", panel=MODEL)] = False,
    tensorboard: Annotated[bool, opt.flag("--tensorboard", "Also log for TensorBoard, in DIR/tensorboard.")] = False,
    device: opt.Device = None,
    *,
    terminal: Terminal,
) -> None:
    """Train a language model on text, or resume the run in a folder."""
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first:  # only one of torchrun's processes prints
        terminal.as_json, terminal.quiet = False, True
    from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig
    from rebind.nn.training import train as run
    from rebind.storage import cache_dir

    config = TrainConfig(
        DataConfig(data, tokenizer, vocabulary, validation, validation_fraction),
        preset=preset,
        layers=_kinds(layers),
        model=_fields(changes or []),
        optimizer=OptimizerConfig(learning_rate, warmup=warmup, weight_decay=weight_decay, clip_norm=clip_norm),
        length=length,
        batch_size=batch_size,
        accumulate=accumulate,
        steps=steps,
        carry=carry,
        seed=seed,
        evaluate_every=evaluate_every,
        evaluate_tokens=evaluate_tokens,
        save_every=save_every,
        keep_checkpoints=keep_checkpoints,
        precision=precision,
        compile=compiled,
        record=record,
        device=device or "cpu",
        sharded=sharded,
        tensorboard=tensorboard,
    )
    with Phases(terminal) as phases:
        result = run(config, out, cache=cache_dir() / "tokens", progress=_progress(phases))
    if is_first:
        _print(terminal, result)
        if sharded and os.environ.get("WORLD_SIZE", "1") == "1":
            terminal.hint("--sharded had no effect with one process: start several with torchrun")


def _kinds(text: str | None) -> str | tuple[str, ...] | None:
    """Return the layer kinds in a text.

    >>> _kinds("delta"), _kinds("gated_delta, attention")
    ('delta', ('gated_delta', 'attention'))
    """
    if text is None:
        return None
    kinds = tuple(part.strip() for part in text.split(","))
    return kinds if len(kinds) > 1 else kinds[0]


def _fields(changes: list[str]) -> dict[str, Any]:
    """Return fields of the model's config.

    >>> _fields(["hidden_size=64", "mlp=relu"])
    {'hidden_size': 64, 'mlp': 'relu'}
    """
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not (equals and name.strip()):
            expected = "FIELD=X, such as num_hidden_layers=4"
            raise InputError(f"{change!r} does not set a field", expected=expected, code="invalid_field")
        try:
            values[name.strip()] = json.loads(value)
        except ValueError:
            values[name.strip()] = value.strip()
    return values


def _progress(phases: Phases) -> TrainingProgress:
    """Show the speed and the losses."""
    from rebind.nn.training import TrainingProgress

    def step(update: TrainingUpdate) -> None:
        validation = "" if update.validation is None else f", validation {update.validation:.3f}"
        note = f"{update.tokens_per_second:,.0f} tokens/s, loss {update.loss:.3f}{validation}"
        phases.count("training", update.step, update.steps, note)

    def phase(name: str) -> None:
        if name in ("evaluating", "saving"):  # again and again: no bars of their own
            phases.note("training", name)
        else:
            phases.begin(name)

    return TrainingProgress(step=step, phase=phase)


def _print(terminal: Terminal, result: TrainingResult) -> None:
    summary = result.summary
    if result.resumed_from == summary["steps"]:
        terminal.print(f"{result.folder} is already complete: all {summary['steps']:,} steps are done")
    kinds = ", ".join(dict.fromkeys(summary["layers"]))
    terminal.print(Text(f"{summary['parameters']:,} parameters, layers: {kinds}", style="bold"))
    grid = table("validation", "loss", "perplexity", "tokens", right=("loss", "perplexity", "tokens"))
    for name, measured in summary["validation"].items():
        grid.add_row(name, f"{measured['loss']:.4f}", f"{measured['perplexity']:,.2f}", f"{measured['tokens']:,}")
    rows = [
        ("trained on", f"{summary['tokens']:,} tokens, {summary['epochs']:.2f} epochs"),
        ("state", "grows with the text" if summary["state"] is None else f"{summary['state']:,} numbers"),
        ("checkpoint", result.checkpoint),
    ]
    terminal.print(grid, pairs(rows))
    if not (result.folder / "curve.png").exists():
        terminal.hint("no loss curve: it needs matplotlib (pip install 'rebind[lab]')")
    terminal.suggest("generate", opt.command_line("generate", str(result.folder), "Once"))
    document = {"folder": str(result.folder), "checkpoint": str(result.checkpoint), "resumed_from": result.resumed_from}
    terminal.result({**document, "summary": summary}, str(result.folder))
