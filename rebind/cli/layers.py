"""`rebind layers`: which layers of a model to edit, by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.bars import Bars
from rebind.cli.heat import heatmap
from rebind.cli.opening import Wanted, open_editor
from rebind.cli.screen import Screen, screen
from rebind.cli.tables import seconds, table
from rebind.edit.wording import percent

if TYPE_CHECKING:
    from rebind.edit.held import Held
    from rebind.edit.layers import Choice

EXAMPLES = """[bold]Examples[/bold]

rebind layers --model Qwen/Qwen3-0.6B

rebind layers --facts facts.jsonl --again

Facts of your own need the true answer beside the new one: {"prompt": "The capital of {France} is", "target": "Vienna", "old": "Paris"}. The choice is kept in the cache."""  # noqa: E501


def layers(
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Facts to try, with their true answers. Default: our own.")
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", min=3, help="At most so many facts are tried.")] = 8,
    again: Annotated[bool, typer.Option("--again", help="Measure anew, whatever the cache holds.")] = False,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Choose the layers to edit: a small trace, then a trial edit on each candidate."""
    with screen(as_json, quiet, debug) as shown:
        held = _held(facts)
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, None, device, dtype, corpus=corpus, moment_tokens=moment_tokens)
            editor = open_editor(wanted, bars, base_only=True)
            from rebind.edit.layers import cached_choice, choice_path, choose_layers

            made = None if again or facts is not None else cached_choice(editor.fingerprint)
            cached = made is not None
            if made is None:
                made = choose_layers(editor, held, most=most, told=bars.count)
        _show(shown, made, cached=cached)
        spent = sum(bars.seconds.values())
        path = choice_path(editor.fingerprint)
        shown.hint(f"{'from' if cached else f'measured in {seconds(spent)}, kept in'} {path}")
        picked = ",".join(map(str, made.layers))
        shown.result(made.to_json() | {"cached": cached, "path": str(path), "seconds": bars.seconds}, picked)


def _held(facts: Path | None) -> tuple[Held, ...]:
    from rebind.edit.held import HELD
    from rebind.edit.layers import held_from
    from rebind.edit.reading import read_facts

    return HELD if facts is None else tuple(held_from(list(read_facts(str(facts)))))


def _show(shown: Screen, made: Choice, *, cached: bool) -> None:
    shown.show(f"MLPs restored at the subject's last token, by layer ({made.known} of {made.asked} facts known)")
    shown.show(*heatmap(["effect"], [made.trace], "mlp", width=shown.out.width, top=max(made.trace)))
    numbers = ("trace", "efficacy", "paraphrase", "neighbour", "drift", "score")
    drawn = table("layers", *numbers, "", right=numbers)
    tried = sorted(made.candidates, key=lambda one: one.layers)
    for row in tried:
        best = row.layers == made.layers
        parts = (percent(one) for one in (row.efficacy, row.paraphrase, row.neighbour))
        cells = (
            _span(row.layers),
            f"{row.effect:.3f}",
            *parts,
            f"{row.drift:.3f}",
            f"{row.score:.3f}",
            "chosen" if best else "",
        )
        drawn.add_row(*(Text(cell, style="bold green" if best else "") for cell in cells))
    shown.show(drawn)
    shown.hint(f"why these: {'; '.join(f'{_span(row.layers)} {row.why}' for row in tried)}")
    shown.hint("score: harmonic mean of efficacy, paraphrase and neighbour, less the drift (nats on unrelated prompts)")


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
