"""`rebind train`: a language model from a text, or on from where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.ui.progress import Drawn
from rebind.cli.ui.tables import pairs, table
from rebind.cli.ui.terminal import Screen, screen
from rebind.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from rebind.nn.training import Progress as Told
    from rebind.nn.training import Result
    from rebind.nn.training.loop import Update

EXAMPLES = """[bold]Examples[/bold]

rebind train --data corpus.txt --out runs/delta --layers delta --steps 2000

rebind train --data corpus.txt --out runs/hybrid --layers gated-delta,gated-delta,gated-delta,attention --device cuda

rebind train --data hf:roneneldan/TinyStories --out runs/stories --preset modern-60m --length 512 --carry

torchrun --nproc-per-node 4 -m rebind train --data corpus.txt --out runs/four --batch 64 --device cuda

torchrun --nproc-per-node 4 -m rebind train --data corpus.txt --out runs/large --sharded --device cuda

Stopped or killed, it goes on from its last checkpoint when the same command is run again."""

DATA, STEPS, PLACE = "Text", "Steps", "Model"
LABELS = {"tokens": "reading the corpus", "steps": "training", "evaluating": "measuring", "saving": "saving"}


def train(
    data: Annotated[str, typer.Option(metavar="TEXT", help="UTF-8 text file, or hf:name:split.", rich_help_panel=DATA)],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the run: new, or one to go on with.")],
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="modern-10m, modern-60m, modern-350m, schlag-small, schlag-medium.",
            rich_help_panel=PLACE,
        ),
    ] = "modern-10m",
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            "--rule",
            metavar="KINDS",
            help="Kind of the layers, or a pattern as delta,delta,attention. Default: the preset's.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="FIELD=X", help="Another field of the model's config; repeatable.", rich_help_panel=PLACE
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="bpe or characters, trained; or a folder or Hub id.", rich_help_panel=DATA),
    ] = "bpe",
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Most tokens of a trained bpe.", rich_help_panel=DATA)
    ] = 8_000,
    validation: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Where perplexity is measured. Default: the end.", rich_help_panel=DATA),
    ] = None,
    held: Annotated[
        float, typer.Option(metavar="X", help="How much of the text that end is.", rich_help_panel=DATA)
    ] = 0.05,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens a segment.", rich_help_panel=STEPS)] = 256,
    batch: Annotated[
        int, typer.Option(metavar="N", help="Segments a step, over all processes.", rich_help_panel=STEPS)
    ] = 16,
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="Pieces a batch is computed in.", rich_help_panel=STEPS)
    ] = 1,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps in all.", rich_help_panel=STEPS)] = 1_000,
    rate: Annotated[float, typer.Option(metavar="X", help="Largest learning rate.", rich_help_panel=STEPS)] = 1e-3,
    warmup: Annotated[int, typer.Option(metavar="N", help="Steps until it is reached.", rich_help_panel=STEPS)] = 100,
    decay: Annotated[float, typer.Option(metavar="X", help="Weight decay of matrices.", rich_help_panel=STEPS)] = 0.1,
    clip: Annotated[float, typer.Option(metavar="X", help="Largest norm of gradients.", rich_help_panel=STEPS)] = 1.0,
    carry: Annotated[
        bool, typer.Option("--carry", help="Carry memories on from segment to segment.", rich_help_panel=STEPS)
    ] = False,
    evaluate_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between evaluations.", rich_help_panel=STEPS)
    ] = 250,
    evaluate_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most held tokens that are read for one.", rich_help_panel=STEPS)
    ] = 100_000,
    save_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints.", rich_help_panel=STEPS)
    ] = 250,
    keep: Annotated[int, typer.Option(metavar="N", help="Checkpoints that are kept.", rich_help_panel=STEPS)] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of weights, order and dropout.", rich_help_panel=STEPS)] = 0,
    precision: Annotated[
        str,
        typer.Option(metavar="NAME", help="float32, bfloat16, or auto: bfloat16 on a GPU.", rich_help_panel=PLACE),
    ] = "auto",
    recorded: Annotated[
        bool | None,
        typer.Option(
            "--record/--no-record",
            help="Steps as one CUDA graph. Default: on one GPU, for models up to 400M parameters.",
            rich_help_panel=PLACE,
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile.", rich_help_panel=PLACE)
    ] = False,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Split weights over torchrun's processes (FSDP).", rich_help_panel=PLACE)
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Log for TensorBoard too, in DIR/tensorboard.")
    ] = False,
    device: options.Device = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train a language model on a text; stopped, go on by the same command."""
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes, one talks
    with screen(as_json and first, quiet or not first, debug) as shown:
        from rebind.edit.cache import cache_folder
        from rebind.nn.training import DataConfig, OptimizerConfig, TrainConfig
        from rebind.nn.training import train as run

        config = TrainConfig(
            DataConfig(data, tokenizer, vocabulary, validation, held),
            preset=preset,
            layers=_kinds(layers or []),
            model=_fields(changes or []),
            optimizer=OptimizerConfig(rate=rate, warmup=warmup, weight_decay=decay, clip=clip),
            length=length,
            batch=batch,
            accumulate=accumulate,
            steps=steps,
            carry=carry,
            seed=seed,
            evaluate_every=evaluate_every,
            evaluate_tokens=evaluate_tokens,
            save_every=save_every,
            keep=keep,
            precision=precision,
            compile=compiled,
            record=recorded,
            device=device or "cpu",
            sharded=sharded,
            tensorboard=tensorboard,
        )
        with _bar(shown) as told:
            result = run(config, out, cache=cache_folder() / "tokens", progress=told)
        if first:
            _show(shown, result)
            if sharded and os.environ.get("WORLD_SIZE", "1") == "1":
                shown.hint("--sharded split nothing, there was one process: start several with torchrun")


def _kinds(given: list[str]) -> str | tuple[str, ...] | None:
    """Layer kinds as a person writes them, hyphens as underscores too.

    >>> _kinds(["delta"]), _kinds(["gated_delta, attention"])
    ('delta', ('gated-delta', 'attention'))
    """
    if len(given) > 1:
        raise InputError(
            f"--layers (or --rule, its other name) is given {len(given)} times ({' and '.join(given)}), expected once: "
            f"choose one, or join them to a pattern, {','.join(given)}"
        )
    kinds = tuple(part.strip().replace("_", "-") for text in given for part in text.split(","))
    for kind in kinds:
        _require_more_than_a_rule(kind)
    return kinds if len(kinds) > 1 else next(iter(kinds), None)


def _require_more_than_a_rule(kind: str) -> None:
    """`sum` is a rule that several kinds are built on, none of which has its name alone."""
    from rebind.memory.rules import rule_names
    from rebind.nn.lm.kinds import KINDS

    if kind in rule_names() and kind not in KINDS:
        built = [name for name in KINDS if name.endswith(f"-{kind}")]
        raise UnknownNameError(
            f"{kind!r} is a rule and no kind of layer, expected a kind that is built on it: choose one of "
            f"{', '.join(built)}"
        )


def _fields(changes: list[str]) -> dict[str, Any]:
    """Fields of the model's config.

    >>> _fields(["hidden_size=64", "mlp=relu"])
    {'hidden_size': 64, 'mlp': 'relu'}
    """
    found = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not (equals and name.strip()):
            raise InputError(f"--set is {change!r}, expected field=value, such as num_hidden_layers=4: correct it")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


@contextmanager
def _bar(shown: Screen) -> Iterator[Told]:
    """One bar over the whole run: tokens a second, losses, time left."""
    from rebind.nn.training import Progress as Told

    drawn = Drawn(shown, "note")
    task = drawn.add_task(LABELS["tokens"], total=None, note="")

    def step(update: Update) -> None:
        known = "" if update.validation is None else f", held {update.validation:.3f}"
        note = f"{update.tokens_a_second:,.0f} tokens/s, loss {update.loss:.3f}{known}"
        drawn.update(task, completed=update.step, total=update.steps, note=note)

    def phase(name: str) -> None:
        drawn.update(task, description=LABELS.get(name, name))

    with drawn:
        yield Told(step=step, phase=phase)


def _show(shown: Screen, result: Result) -> None:
    summary = result.summary
    if result.began == summary["steps"]:
        shown.show(Text(f"already finished: {result.folder} has all of its {summary['steps']:,} steps"))
    kinds = ", ".join(dict.fromkeys(summary["layers"]))
    shown.show(Text(f"{summary['parameters']:,} parameters of {kinds}", style="bold"))
    made = table("held text", "loss", "perplexity", "tokens", right=("loss", "perplexity", "tokens"))
    for name, measured in summary["validation"].items():
        made.add_row(name, f"{measured['loss']:.4f}", f"{measured['perplexity']:,.2f}", f"{measured['tokens']:,}")
    shown.show(made)
    shown.show(
        pairs(
            [
                ("trained on", f"{summary['tokens']:,} tokens, {summary['epochs']:.2f} epochs"),
                ("state", "grows with the text" if summary["state"] is None else f"{summary['state']:,} numbers"),
                ("checkpoint", result.checkpoint),
            ]
        )
    )
    if not (result.folder / "curve.png").exists():
        shown.hint("no curve: pip install 'rebind[lab]' for one")
    shown.suggest("ask it", shown.command("generate", str(result.folder), "Once"))
    document = {"folder": str(result.folder), "checkpoint": str(result.checkpoint), "began": result.began}
    shown.result({**document, "summary": summary}, str(result.folder))
