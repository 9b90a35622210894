"""`rebind layers`: choose the layers to edit by measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.fact_input import facts_of_file, fits_context, has_one_target, print_skipped, valid_facts
from rebind.cli.session import load_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.tables import seconds, table
from rebind.edit.wording import percent

if TYPE_CHECKING:
    from rebind.analysis.layer_search import LayerChoice

EXAMPLES = opt.examples(
    "rebind layers --model Qwen/Qwen3-0.6B",
    "rebind layers --facts facts.jsonl --again",
    note='Each fact needs the true answer beside the new one: {"prompt": "The capital of {France} is", '
    '"target": "Vienna", "old": "Paris"}. The result is cached, and edits of weights use it.',
)


def layers(
    facts: Annotated[Path | None, opt.value("FILE", "Facts to try.", default="facts that come with rebind")] = None,
    limit: Annotated[int, opt.value("N", "Try at most N facts, 3 or more.", min=3)] = 8,
    skip_bad: opt.SkipBad = False,
    again: Annotated[bool, opt.flag("--again", "Measure again instead of using the cached result.")] = False,
    *,
    source: opt.ModelOptions,
    terminal: Terminal,
) -> None:
    """Choose the layers to edit: trace a few facts, then try an edit at each candidate."""
    from rebind.edit.facts.readers import Facts

    input_facts = Facts(()) if facts is None else facts_of_file(terminal, facts, skip_bad)
    with Phases(terminal) as phases:
        from rebind.analysis import TRIAL_FACTS, saved_layer_choice, search_layers, trial_facts_from
        from rebind.edit.settings import layers_file
        from rebind.parallel import gather

        if facts is not None:
            input_facts = valid_facts(terminal, input_facts, lambda fact: trial_facts_from([fact]), skip_bad)
            input_facts = valid_facts(terminal, input_facts, has_one_target(), skip_bad)
        editor = load_editor(source, phases)
        if facts is not None:
            phases.begin("contexts")
            fits = fits_context(editor, behind_contexts=True)
            input_facts = valid_facts(terminal, input_facts, fits, skip_bad)
        choice = None if again or facts is not None else saved_layer_choice(editor.fingerprint)
        choice = choice if all(gather(choice is not None, "cached layers")) else None
        is_cached = choice is not None
        if choice is None:
            trials = TRIAL_FACTS if facts is None else trial_facts_from(input_facts.facts)
            choice = search_layers(editor, trials, limit=limit, report=phases.count)
    if not terminal.writes:
        return
    print_skipped(terminal, input_facts)
    _print(terminal, choice)
    path, duration = layers_file(editor.fingerprint), seconds(sum(phases.seconds.values()))
    terminal.hint(f"cached in {path}" if is_cached else f"measured in {duration}, stored in {path}")
    details = {"skipped": len(input_facts.skipped), "cached": is_cached, "path": str(path), "seconds": phases.seconds}
    terminal.result(choice.to_json() | details, ",".join(map(str, choice.layers)))


def _print(terminal: Terminal, choice: LayerChoice) -> None:
    known = f"{choice.known} of {choice.facts} facts known"
    terminal.print(f"Effect of restoring the MLPs at the subject's last token, by layer ({known})")
    terminal.print(*heatmap(["effect"], [choice.trace], "mlp", width=terminal.out.width, top=max(choice.trace)))
    numbers = ("trace", "efficacy", "paraphrase", "neighbor", "drift", "score")
    grid = table("layers", *numbers, "", right=numbers)
    candidates = sorted(choice.candidates, key=lambda candidate: candidate.layers)
    for candidate in candidates:
        is_best = candidate.layers == choice.layers
        preferences = (candidate.efficacy, candidate.paraphrase, candidate.neighbor)
        shares = ("" if share is None else percent(share) for share in preferences)
        cells = [_span(candidate.layers), f"{candidate.effect:.3f}", *shares]
        cells += [f"{candidate.drift:.3f}", f"{candidate.score:.3f}"]
        style = "bold green" if is_best else ""
        grid.add_row(*(Text(cell, style=style) for cell in [*cells, "chosen" if is_best else ""]))
    terminal.print(grid)
    terminal.hint(f"why these: {'; '.join(f'{_span(candidate.layers)} {candidate.why}' for candidate in candidates)}")
    terminal.hint("score: harmonic mean of efficacy, paraphrase and neighbor, minus the drift in nats")


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
