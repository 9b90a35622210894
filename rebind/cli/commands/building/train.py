"""`rebind train`: train a language model on text, or resume a run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from rebind.cli import completion
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
    "torchrun --nproc-per-node 4 -m rebind train --data corpus.txt --out runs/long --context-parallel 4",
    note="An interrupted run resumes from its last checkpoint when the same command is run again.",
)

# Options by heading of the help
data_value = partial(opt.value, panel="Data")
training_value, training_flag = partial(opt.value, panel="Training"), partial(opt.flag, panel="Training")
model_value, model_flag = partial(opt.value, panel=opt.MODEL), partial(opt.flag, panel=opt.MODEL)
RECORD = "Record steps as a CUDA graph. [dim]\\[default: on one GPU, up to 400M parameters][/dim]"


@dataclass(frozen=True)
class RunOptions:
    """Fields of a TrainConfig that are numbers, names or flags."""

    preset: Annotated[
        str,
        model_value(
            "NAME",
            "Model: modern-10m, modern-60m, modern-350m, schlag-small or -medium.",
            autocompletion=completion.one_of(*completion.PRESETS),
        ),
    ] = "modern-10m"
    length: Annotated[int, training_value("N", "Number of tokens per segment.")] = 256
    batch_size: Annotated[int, training_value("N", "Number of segments per step, over all processes.")] = 16
    accumulate: Annotated[int, training_value("N", "Compute a batch in N pieces, to need less memory.")] = 1
    steps: Annotated[int, training_value("N", "Number of training steps.")] = 1_000
    carry: Annotated[bool, training_flag("--carry", "Carry memories from each segment to the next.")] = False
    seed: Annotated[int, training_value("N", "Random seed for initial weights, data order and dropout.")] = 0
    evaluate_every: Annotated[int, training_value("N", "Number of steps between evaluations.")] = 250
    evaluate_tokens: Annotated[int, training_value("N", "Evaluate on at most N tokens.")] = 100_000
    save_every: Annotated[int, training_value("N", "Number of steps between checkpoints.")] = 250
    keep_checkpoints: Annotated[int, training_value("N", "Number of checkpoints to keep.")] = 2
    precision: Annotated[str, model_value("NAME", "Precision: float32, bfloat16, or auto (bfloat16 on a GPU).")] = (
        "auto"
    )
    record: Annotated[bool | None, model_flag("--record/--no-record", RECORD)] = None
    compile: Annotated[bool, model_flag("--compile", "Compile the model with torch.compile.")] = False
    sharded: Annotated[bool, model_flag("--sharded", "Shard weights over processes (FSDP).")] = False
    context_parallel: Annotated[
        int, model_value("N", "Split every sequence over N processes, each with a segment of it.")
    ] = 1
    tensorboard: Annotated[bool, opt.flag("--tensorboard", "Also log for TensorBoard, in DIR/tensorboard.")] = False


@dataclass(frozen=True)
class OptimizerOptions:
    """Fields of an OptimizerConfig."""

    learning_rate: Annotated[float, training_value("X", "Peak learning rate.")] = 1e-3
    warmup: Annotated[int, training_value("N", "Number of steps until the learning rate peaks.")] = 100
    weight_decay: Annotated[float, training_value("X", "Weight decay of matrices.")] = 0.1
    clip_norm: Annotated[float, training_value("X", "Largest norm of the gradient.")] = 1.0


def train(
    data: Annotated[str, data_value("TEXT", "Training text: a UTF-8 file, or hf:NAME:SPLIT from the Hub.")],
    out: Annotated[Path, opt.value("DIR", "Folder of the run: a new one, or one to resume.")],
    layers: Annotated[
        str | None,
        model_value(
            "KINDS",
            "Kind of the layers, or a pattern: delta,delta,attention.",
            default="preset's",
            autocompletion=completion.list_of(*completion.KINDS),
        ),
    ] = None,
    changes: Annotated[
        list[str] | None, model_value("FIELD=X", "Set a field of the model's config. Can be repeated.", "--set")
    ] = None,
    tokenizer: Annotated[
        str, data_value("NAME", "Tokenizer: bpe or characters (trained on the text), a folder or a Hub id.")
    ] = "bpe",
    vocabulary: Annotated[int, data_value("N", "Largest vocabulary of a trained bpe tokenizer.")] = 8_000,
    validation: Annotated[
        str | None, data_value("TEXT", "Text to measure perplexity on.", default="the end of --data")
    ] = None,
    validation_fraction: Annotated[
        float, data_value("X", "Fraction of the text, taken from its end, held out for validation.")
    ] = 0.05,
    *,
    run: RunOptions,
    optimizer: OptimizerOptions,
    device: opt.Device = None,
    terminal: Terminal,
) -> None:
    """Train a language model on text, or resume the run in a folder."""
    from rebind.nn import training
    from rebind.storage import cache_dir, path_inside

    config = training.TrainConfig(
        training.DataConfig(data, tokenizer, vocabulary, validation, validation_fraction),
        layers=_kinds(layers),
        model=_fields(changes or []),
        optimizer=training.OptimizerConfig(**asdict(optimizer)),
        device=device or "cpu",
        **asdict(run),
    )
    with Phases(terminal) as phases:
        result = training.train(
            config, out, cache=path_inside(cache_dir(), "tokens/text").parent, progress=_progress(phases)
        )
    if terminal.writes:
        _print(terminal, result)
        if run.sharded and os.environ.get("WORLD_SIZE", "1") == "1":
            terminal.hint("--sharded had no effect with one process: start several with torchrun")


def _kinds(text: str | None) -> str | tuple[str, ...] | None:
    """Return the layer kinds in a text.

    >>> _kinds("delta"), _kinds("gated_delta, attention")
    ('delta', ('gated_delta', 'attention'))
    """
    kinds = opt.parse_names(text)
    return kinds[0] if kinds and len(kinds) == 1 else kinds


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
    """Return callbacks that show the speed and the losses."""
    from rebind.nn.training import TrainingProgress

    def step(update: TrainingUpdate) -> None:
        validation = "" if update.validation is None else f", validation {update.validation:.3f}"
        note = f"{update.tokens_per_second:,.0f} tokens/s, loss {update.loss:.3f}{validation}"
        phases.count("training", update.step, update.steps, note)

    def phase(name: str) -> None:
        if name in ("evaluating", "saving"):  # they recur, so they get no bars of their own
            phases.note("training", name)
        else:
            phases.begin(name)

    return TrainingProgress(step=step, phase=phase)


def _print(terminal: Terminal, result: TrainingResult) -> None:
    summary = result.summary
    if result.resumed_from == summary["steps"]:
        terminal.print(f"{result.folder} is already complete, with all {summary['steps']:,} steps")
    kinds = ", ".join(dict.fromkeys(summary["layers"]))
    terminal.print(Text(f"{summary['parameters']:,} parameters, layers: {kinds}", style="bold"))
    grid = table("validation", "loss", "perplexity", "tokens", right=("loss", "perplexity", "tokens"))
    for name, scores in summary["validation"].items():
        grid.add_row(name, f"{scores['loss']:.4f}", f"{scores['perplexity']:,.2f}", f"{scores['tokens']:,}")
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
