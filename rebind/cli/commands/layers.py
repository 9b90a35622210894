"""`rebind layers`: choose the layers to edit by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from rebind.cli import options
from rebind.cli.fact_input import FactInput, quoted, read_fact_file
from rebind.cli.options import ModelOptions, examples, flag, option
from rebind.cli.session import load_editor
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import seconds, table
from rebind.cli.ui.terminal import Terminal
from rebind.edit.wording import percent
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.analysis.layer_search import Choice
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact

EXAMPLES = examples(
    "rebind layers --model Qwen/Qwen3-0.6B",
    "rebind layers --facts facts.jsonl --again",
    note='Each fact needs the true answer beside the new one: {"prompt": "The capital of {France} is", '
    '"target": "Vienna", "old": "Paris"}. The result is cached, and `rebind edit` uses it.',
)


def layers(
    facts: Annotated[
        Path | None, option("FILE", "Facts to try, with their true answers.", default="facts that come with rebind")
    ] = None,
    limit: Annotated[int, option("N", "Try at most N facts, 3 or more.", min=3)] = 8,
    skip_bad: options.SkipBad = False,
    again: Annotated[bool, flag("Measure again instead of using the cached result.", "--again")] = False,
    *,
    source: ModelOptions,
    terminal: Terminal,
) -> None:
    """Choose the layers to edit: trace a few facts, then try an edit at each candidate."""
    given = FactInput()
    if facts is not None:
        given = read_fact_file(terminal, facts, skip_bad).checked(_require_old, terminal, skip_bad=skip_bad)
        given = given.without_conflicts(terminal, skip_bad=skip_bad)
    phases = Phases(terminal)
    with phases.shown():
        editor = load_editor(source, phases)
        from rebind.analysis.layer_search import cached_choice, choice_path, choose_layers, held_from
        from rebind.analysis.trial_facts import HELD

        if facts is not None:
            phases.start("contexts")
            given = given.checked(lambda fact: _require_fit(editor, fact), terminal, skip_bad=skip_bad)
        trials = HELD if facts is None else held_from(given.facts)
        choice = None if again or facts is not None else cached_choice(editor.fingerprint)
        cached = choice is not None
        if choice is None:
            choice = choose_layers(editor, trials, most=limit, told=phases.count)
    given.print_skipped(terminal)
    _print(terminal, choice)
    path = choice_path(editor.fingerprint)
    terminal.hint(f"cached in {path}" if cached else f"measured in {seconds(phases.total_seconds)}, stored in {path}")
    more = {"skipped": given.skipped, "cached": cached, "path": str(path), "seconds": phases.seconds}
    terminal.result(choice.to_json() | more, ",".join(map(str, choice.layers)))


def _require_old(fact: Fact) -> None:
    if fact.old is None:
        raise InputError(
            f"The fact {quoted(fact.text)} has no true answer",
            advice="Add the field 'old': what the model answers now",
            code="missing_old_answer",
        )


def _require_fit(editor: Editor, fact: Fact) -> None:
    """Check before the trials that every prompt fits into the model's context."""
    from rebind.models import Prompt

    texts = (fact.text, *fact.paraphrases, *fact.neighbors)
    editor.language_model.encode([Prompt(text, str(target)) for text in texts for target in (fact.target, fact.old)])
    editor.requests([fact])  # behind contexts as well


def _print(terminal: Terminal, choice: Choice) -> None:
    known = f"{choice.known} of {choice.asked} facts known"
    terminal.print(f"Effect of restoring the MLPs at the subject's last token, by layer ({known})")
    terminal.print(*heatmap(["effect"], [choice.trace], "mlp", width=terminal.out.width, top=max(choice.trace)))
    numbers = ("trace", "efficacy", "paraphrase", "neighbor", "drift", "score")
    made = table("layers", *numbers, "", right=numbers)
    candidates = sorted(choice.candidates, key=lambda one: one.layers)
    for one in candidates:
        is_best = one.layers == choice.layers
        shares = ("" if share is None else percent(share) for share in (one.efficacy, one.paraphrase, one.neighbor))
        cells = [_span(one.layers), f"{one.effect:.3f}", *shares, f"{one.drift:.3f}", f"{one.score:.3f}"]
        style = "bold green" if is_best else ""
        made.add_row(*(Text(cell, style=style) for cell in [*cells, "chosen" if is_best else ""]))
    terminal.print(made)
    terminal.hint(f"why these: {'; '.join(f'{_span(one.layers)} {one.why}' for one in candidates)}")
    terminal.hint("score: harmonic mean of efficacy, paraphrase and neighbor, minus the drift in nats")


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
