"""`rebind layers`: which layers of a model to edit, by measurement."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rebind.cli import options
from rebind.cli.answers import as_fact
from rebind.cli.given import Given, good_ones, read_file, shortened, without_conflicts
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import seconds, table
from rebind.cli.ui.terminal import Screen, screen
from rebind.edit.wording import percent
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.analysis.layer_search import Choice
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact

EXAMPLES = """[bold]Examples[/bold]

rebind layers --model Qwen/Qwen3-0.6B

rebind layers --facts facts.jsonl --again

Facts of your own need the true answer beside the new one: {"prompt": "The capital of {France} is", "target": "Vienna", "old": "Paris"}. The choice is kept in the cache."""  # noqa: E501


def layers(
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Facts to try, with their true answers. Default: our own.")
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", min=3, help="At most so many facts are tried, 3 or more.")] = 8,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out records that cannot be used.")] = False,
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
    with screen(as_json, quiet, debug, skips=True) as shown:
        given = Given() if facts is None else _read(shown, facts, skip_bad)
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, None, device, dtype, corpus=corpus, moment_tokens=moment_tokens)
            editor = open_editor(wanted, bars, base_only=True)
            from rebind.analysis.layer_search import cached_choice, choice_path, choose_layers, held_from
            from rebind.analysis.trial_facts import HELD

            if facts is not None:
                bars.phase("contexts")
                given = good_ones(shown, given, partial(_require_short, editor), skip_bad)
                given = without_conflicts(shown, given, skip_bad)
            held = HELD if facts is None else held_from(given.facts)
            made = None if again or facts is not None else cached_choice(editor.fingerprint)
            cached = made is not None
            if made is None:
                made = choose_layers(editor, held, most=most, told=bars.count)
        given.tell_skipped(shown)
        _show(shown, made, cached=cached)
        spent = sum(bars.seconds.values())
        path = choice_path(editor.fingerprint)
        shown.hint(f"{'from' if cached else f'measured in {seconds(spent)}, kept in'} {path}")
        picked = ",".join(map(str, made.layers))
        more = {"skipped": given.skipped, "cached": cached, "path": str(path), "seconds": bars.seconds}
        shown.result(made.to_json() | more, picked)


def _read(shown: Screen, facts: Path, skip_bad: bool) -> Given:
    """The facts, checked before minutes are spent on a model."""
    given = good_ones(shown, read_file(shown, facts, skip_bad), _require_old, skip_bad)
    return given if skip_bad else without_conflicts(shown, given, skip_bad)  # else what is too long goes first


def _require_old(fact: Fact) -> None:
    if fact.old is None:
        raise InputError(
            f"fact {shortened(fact.text)!r} has no old answer, expected what is true now beside what to write: add old"
        )


def _require_short(editor: Editor, fact: Fact) -> None:
    """Ask before the trials whether everything they ask fits into the model's context."""
    from rebind.edit.facts.encoding import encode_many

    prompts = (fact.text, *fact.paraphrases, *fact.neighbours)
    asked = [as_fact(text, answer) for text in prompts for answer in (fact.target, str(fact.old))]
    encode_many(asked, editor.tokenizer, editor.loaded.start, limit=editor.trunk.context)
    editor.requests([fact])  # behind contexts as well


def _show(shown: Screen, made: Choice, *, cached: bool) -> None:
    shown.show(f"MLPs restored at the subject's last token, by layer ({made.known} of {made.asked} facts known)")
    shown.show(*heatmap(["effect"], [made.trace], "mlp", width=shown.out.width, top=max(made.trace)))
    numbers = ("trace", "efficacy", "paraphrase", "neighbour", "drift", "score")
    drawn = table("layers", *numbers, "", right=numbers)
    tried = sorted(made.candidates, key=lambda one: one.layers)
    for row in tried:
        best = row.layers == made.layers
        parts = ("" if one is None else percent(one) for one in (row.efficacy, row.paraphrase, row.neighbour))
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
    unasked = [name for name in ("paraphrase", "neighbour") if any(getattr(row, name) is None for row in tried)]
    without = f" (no fact has a {' or a '.join(unasked)})" if unasked else ""
    shown.hint(f"score: harmonic mean of efficacy, paraphrase and neighbour{without}, less the drift in nats")


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
