"""`rebind trace`: find the hidden states that carry a fact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli import options as opt
from rebind.cli.fact_input import facts_of_file, fits_context, print_skipped, single_fact, valid_facts
from rebind.cli.session import describe, load_editor, open_editor
from rebind.cli.ui import Phases, Terminal
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.tables import counted, seconds
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.limits import MAX_DRAWS
from rebind.storage import check_writable

if TYPE_CHECKING:
    from rebind.analysis import AverageTrace, Trace, Tracer
    from rebind.edit.facts.fact import Fact
    from rebind.edit.facts.readers import Facts

EXAMPLES = opt.examples(
    'rebind trace "{The Eiffel Tower} is in the city of"',
    'rebind trace "The Space Needle is in the city of" --subject "The Space Needle" --target Seattle --out trace/',
    "rebind trace --facts knowns.json --limit 50 --kind mlp",
)

KIND_NAMES = {"hidden": "block output", "mlp": "MLP output", "attention": "attention output"}


def trace(
    prompt: Annotated[str | None, opt.argument("PROMPT", "A prompt with its subject in braces.")] = None,
    subject: opt.Subject = None,
    target: Annotated[str | None, opt.value("TEXT", "The answer to trace.", default="the model's answer")] = None,
    kind: Annotated[str, opt.value("NAME", "States to restore: hidden, mlp, attention or all.")] = "all",
    facts: Annotated[Path | None, opt.value("FILE", "Average over the facts in a file that the model knows.")] = None,
    limit: opt.Limit = None,
    predicted: Annotated[bool, opt.flag("--predicted", "Trace the model's own answer, right or wrong.")] = False,
    skip_bad: opt.SkipBad = False,
    draws: Annotated[int, opt.value("N", "Average over N samples of noise.", min=1, max=MAX_DRAWS)] = 4,
    noise: Annotated[float, opt.value("X", "Standard deviation of the noise, relative to the embeddings.")] = 3.0,
    window: Annotated[
        int | None, opt.value("N", "Restore N adjacent layers together.", default="depth / 5", min=1)
    ] = None,
    seed: Annotated[int, opt.seed_value("Random seed for the noise.")] = 0,
    out: Annotated[Path | None, opt.value("DIR", "Write trace.png and trace.json into this folder.")] = None,
    base: Annotated[bool, opt.flag("--base", "Trace the base model, without the edits of its ledger.")] = False,
    *,
    source: opt.EditorOptions,
    chat: opt.Chat = False,
    terminal: Terminal,
) -> None:
    """Causal tracing: find the layers and tokens where the model recalls a fact."""
    if (prompt is None) == (facts is None) or (facts is not None and (subject or target)):
        raise InputError(
            "There is no single prompt or file to trace",
            expected="a prompt, perhaps with a subject and a target, or a file of facts",
            advice='Try `rebind trace "The {Louvre} is in"`',
            code="prompt_or_facts",
        )
    from rebind.analysis import Tracer, TraceSettings, average_traces
    from rebind.analysis.traces import KINDS
    from rebind.models.prompts import require_text

    if target is not None:
        require_text("target", target)
    if facts is not None:
        input_facts = facts_of_file(terminal, facts, skip_bad, limit)
    else:
        input_facts = single_fact(str(prompt), target or ".", subject=subject)
    settings = TraceSettings(KINDS if kind == "all" else (kind,), noise, draws, window, seed)
    if out is not None:
        check_writable(out)
    with Phases(terminal) as phases:
        editor = load_editor(source, phases, chat=chat) if base else open_editor(source, phases, chat=chat)
        tracer = Tracer(editor.language_model, settings)
        if facts is not None:
            input_facts = valid_facts(terminal, input_facts, fits_context(editor), skip_bad)
        traced = input_facts.facts if facts is None or predicted else _known_facts(tracer, input_facts)
        traces = _trace(tracer, traced, phases, use_target=target is not None)
    if not terminal.writes:
        return
    print_skipped(terminal, input_facts)
    counts = {"unknown": len(input_facts) - len(traces), "skipped": len(input_facts.skipped)}
    _report(terminal, traces[0] if facts is None else average_traces(traces), traces, describe(editor), counts, out)


def _report(
    terminal: Terminal,
    result: Trace | AverageTrace,
    traces: list[Trace],
    description: dict[str, Any],  # of the model and its edits
    counts: dict[str, int],  # of facts that were left out
    out: Path | None,
) -> None:
    """Print a trace, and write its files."""
    from rebind.analysis import draw_trace

    document = description | result.to_json() | counts
    _print(terminal, result)
    duration, settings = sum(trace.seconds for trace in traces), traces[0].settings
    edits = f" with edits {', '.join(document['active'])}" if document["active"] else ""
    samples = f"{counted(settings.draws, 'sample')} of noise with standard deviation {traces[0].noise:.3g}"
    terminal.hint(f"{document['model']}{edits}: traced in {seconds(duration)} ({samples})")
    files = []
    if out is not None:
        figure = draw_trace(result, out / "trace.png", title=_title(result))
        files = terminal.save(document, out / "trace.json", [figure])
    peaks = [(name, *_peak(result, name), f"{float(rows.max()):.4f}") for name, rows in result.effects.items()]
    brief = "\n".join("\t".join(map(str, peak)) for peak in peaks)
    terminal.result(document | {"seconds": duration, "files": files}, brief)


def _known_facts(tracer: Tracer, facts: Facts) -> tuple[Fact, ...]:
    """Return the facts that the model answers correctly."""
    from rebind.parallel import share, unite

    is_known = unite([tracer.knows(fact) for fact in share(facts.facts)])
    if known := tuple(fact for fact, knows in zip(facts, is_known, strict=True) if knows):
        return known
    problem = f"The model knows none of the {len(facts)} facts"
    advice = "Choose facts that it knows, or use {predicted} to trace its own answers instead"
    raise InputError(problem, advice=advice, settings={"predicted": True}, code="no_known_facts")


def _trace(tracer: Tracer, facts: tuple[Fact, ...], phases: Phases, *, use_target: bool) -> list[Trace]:
    """Trace all facts, which are divided between processes."""
    from rebind.analysis.traces import unite_traces
    from rebind.parallel import ranks, share

    traces: list[Trace] = []
    assigned = share(facts)

    def report(done: int, total: int) -> None:
        count = min(len(traces) * ranks().count + 1, len(facts))
        note = f"fact {count} of {len(facts)}" if len(facts) > 1 else f"{done:,} of {total:,} states"
        phases.count("restoring states", len(traces) * total + done, len(assigned) * total, note)

    tracer.on_progress = report
    for fact in assigned:
        traces.append(tracer.trace(fact, use_target=use_target))
    return unite_traces(traces)


def _title(result: Trace | AverageTrace) -> str:
    from rebind.analysis import Trace

    shares = f"{percent(result.clean)}, {percent(result.corrupted)} with noise"
    if isinstance(result, Trace):
        return f"{result.prompt.text} → {result.answer.strip() or repr(result.answer)} ({shares})"
    return f"mean of {counted(result.facts, 'fact')} ({shares})"


def _print(terminal: Terminal, result: Trace | AverageTrace) -> None:
    terminal.print(_title(result), style="bold")
    top = max(float(rows.max()) for rows in result.effects.values())
    for kind, rows in result.effects.items():
        width = "" if kind == "hidden" else f", {counted(result.window, 'layer')} at a time"
        label, layer = _peak(result, kind)
        effect = percent(max(0.0, float(rows.max())))
        terminal.print(f"\n{KIND_NAMES[kind]} restored{width} (largest effect {effect}, at '{label}', layer {layer})")
        terminal.print(*heatmap(result.labels, rows.tolist(), kind, width=terminal.out.width, top=top))


def _peak(result: Trace | AverageTrace, kind: str) -> tuple[str, int]:
    """Return the token and the layer with the largest effect; a token of spaces only is escaped."""
    rows = result.effects[kind]
    token, layer = divmod(int(rows.argmax()), rows.shape[1])
    label = result.labels[token]
    return label.strip() or repr(label)[1:-1], layer
