"""`rebind trace`: find the hidden states that carry a fact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rebind.cli import options
from rebind.cli.fact_input import FactInput, read_fact_file
from rebind.cli.options import EditorOptions, argument, examples, flag, option
from rebind.cli.session import load_editor, open_editor
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.progress import Phases
from rebind.cli.ui.tables import counted, seconds
from rebind.cli.ui.terminal import Terminal, strict_json
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.storage import check_writable, write_file

if TYPE_CHECKING:
    from rebind.analysis.averages import Average
    from rebind.analysis.traces import Trace, TraceSettings
    from rebind.edit.editor import Editor
    from rebind.edit.facts.fact import Fact

EXAMPLES = examples(
    'rebind trace "{The Eiffel Tower} is in the city of"',
    'rebind trace "The Space Needle is in the city of" --subject "The Space Needle" --target Seattle --out trace/',
    "rebind trace --facts knowns.json --limit 50 --kind mlp",
)

KIND_NAMES = {"hidden": "block output", "mlp": "MLP output", "attention": "attention output"}


def trace(
    prompt: Annotated[str | None, argument("PROMPT", "A prompt with its subject in braces.")] = None,
    subject: Annotated[str | None, option("TEXT", "The subject, if the prompt has no braces.")] = None,
    target: Annotated[str | None, option("TEXT", "The answer to trace.", default="the model's own answer")] = None,
    kind: Annotated[str, option("NAME", "States to restore: hidden, mlp, attention or all.")] = "all",
    facts: Annotated[
        Path | None, option("FILE", "Trace the facts in this file that the model knows, and average.")
    ] = None,
    limit: Annotated[int | None, option("N", "Read only the first N facts.", default="all", min=1)] = None,
    predicted: Annotated[
        bool, flag("Trace the model's own answer to every fact in the file, right or wrong.", "--predicted")
    ] = False,
    skip_bad: options.SkipBad = False,
    draws: Annotated[int, option("N", "Number of noise samples to average over.", min=1)] = 4,
    noise: Annotated[float, option("X", "Standard deviation of the noise, relative to that of the embeddings.")] = 3.0,
    window: Annotated[
        int | None,
        option(
            "N", "Number of adjacent MLPs or attentions to restore together.", default="a fifth of the layers", min=1
        ),
    ] = None,
    seed: Annotated[int, option("N", "Random seed for the noise.")] = 0,
    out: Annotated[Path | None, option("DIR", "Write trace.png and trace.json into this folder.")] = None,
    base: Annotated[bool, flag("Trace the base model, without the edits of its ledger.", "--base")] = False,
    *,
    source: EditorOptions,
    terminal: Terminal,
) -> None:
    """Causal tracing: find the layers and tokens where the model recalls a fact."""
    given = _read(terminal, prompt, subject, target, facts, limit, skip_bad)
    settings = _settings(kind, draws, noise, window, seed)
    if out is not None:
        check_writable(out, advice="Choose another folder for {out}", settings={"out": None})
    phases = Phases(terminal)
    with phases.shown():
        editor = load_editor(source, phases) if base else open_editor(source, phases)
        if facts is None:
            traces = _trace(editor, given.facts, settings, phases, own=target is None)
        else:
            given = given.checked(lambda fact: _require_fit(editor, fact), terminal, skip_bad=skip_bad)
            known = given.facts if predicted else _known(editor, given.facts, settings)
            traces = _trace(editor, known, settings, phases, own=True)
    result = traces[0] if facts is None else _average(traces)
    document = {
        "model": editor.language_model.name,
        "fingerprint": editor.fingerprint,
        "active": [edit.id for edit in editor.ledger.active],
        "unknown": len(given.facts) - len(traces),
        "skipped": given.skipped,
        **result.to_json(),
    }
    given.print_skipped(terminal)
    window = traces[0].window
    _print(terminal, result, window)
    spent = sum(one.seconds for one in traces)
    edits = f" with edits {', '.join(document['active'])}" if document["active"] else ""
    terminal.hint(
        f"{editor.language_model.name}{edits}: traced in {seconds(spent)} ({counted(draws, 'sample')} of noise with "
        f"standard deviation {traces[0].noise:.3g}, window {window})"
    )
    files = [] if out is None else _write(out, result, window, document)
    for file in files:
        terminal.hint(f"wrote {file}")
    terminal.result(document | {"seconds": spent, "files": [str(file) for file in files]}, _brief(result))


def _read(
    terminal: Terminal,
    prompt: str | None,
    subject: str | None,
    target: str | None,
    facts: Path | None,
    limit: int | None,
    skip_bad: bool,
) -> FactInput:
    from rebind.edit.facts.fact import Fact
    from rebind.models.prompts import require_text

    if (prompt is None) == (facts is None):
        raise InputError(
            "Got neither a prompt nor a file of facts" if prompt is None else "Got both a prompt and a file of facts",
            expected="one of them",
            advice='For example, rebind trace "The {Louvre} is in"',
            code="prompt_or_facts",
        )
    if target is not None:
        require_text("target", target)
    if prompt is not None:
        return FactInput((Fact.parse(prompt, target or ".", subject=subject),), ("",))
    if subject is not None or target is not None:
        raise InputError(
            "A file of facts was combined with options that describe a single fact",
            advice="Omit {subject} and {target}",
            settings={"subject": None, "target": None},
            code="file_and_fact_options",
        )
    return read_fact_file(terminal, str(facts), skip_bad, limit=limit)


def _require_fit(editor: Editor, fact: Fact) -> None:
    targets = [None] if fact.old is None else [None, fact.old]
    editor.language_model.with_chat(False).encode([fact.as_prompt(target) for target in targets])


def _settings(kind: str, draws: int, noise: float, window: int | None, seed: int) -> TraceSettings:
    from rebind.analysis.traces import KINDS, TraceSettings

    kinds = KINDS if kind == "all" else (kind,)
    return TraceSettings(kinds=kinds, draws=draws, noise=noise, window=window, seed=seed)


def _known(editor: Editor, facts: tuple[Fact, ...], settings: TraceSettings) -> tuple[Fact, ...]:
    """Return the facts that the model answers correctly."""
    from rebind.analysis.tracing import Tracer

    tracer = Tracer.of(editor, settings)
    known = []
    for fact in facts:
        first_choice, answer = tracer.predicts(fact)
        if first_choice == answer:
            known.append(fact)
    if not known:
        raise InputError(
            f"The model knows none of the {len(facts)} facts",
            advice="Choose facts that it knows, or use {predicted} to trace what it says instead",
            settings={"predicted": True},
            code="no_known_facts",
        )
    return tuple(known)


def _trace(
    editor: Editor, facts: tuple[Fact, ...], settings: TraceSettings, phases: Phases, *, own: bool
) -> list[Trace]:
    from rebind.analysis.tracing import Tracer

    traces: list[Trace] = []

    def report(done: int, total: int) -> None:
        index = len(traces)
        note = f"{done:,} of {total:,} states" if len(facts) == 1 else f"fact {index + 1} of {len(facts)}"
        phases.count("restoring states", index * total + done, len(facts) * total, note)

    tracer = Tracer.of(editor, settings, on_pass=report)
    for fact in facts:
        traces.append(tracer.trace(fact, own=own))
    return traces


def _average(traces: list[Trace]) -> Average:
    from rebind.analysis.averages import average

    return average(traces)


def _write(out: Path, result: Trace | Average, window: int, document: dict[str, Any]) -> list[Path]:
    from rebind.analysis.plots import draw_trace

    picture = draw_trace(result, out / "trace.png", window=window, title=_title(result))
    write_file(out / "trace.json", strict_json(document).encode())
    return [picture, out / "trace.json"]


def _title(result: Trace | Average) -> str:
    from rebind.analysis.traces import Trace

    shares = f"{percent(result.clean)}, {percent(result.corrupted)} with noise"
    if isinstance(result, Trace):
        return f"{result.question.text} → {result.answer.strip() or repr(result.answer)} ({shares})"
    return f"mean of {counted(result.facts, 'fact')} ({shares})"


def _print(terminal: Terminal, result: Trace | Average, window: int) -> None:
    terminal.print(_title(result), style="bold")
    top = max(float(rows.max()) for rows in result.effects.values())
    for kind, rows in result.effects.items():
        width = "" if kind == "hidden" else f", {counted(window, 'layer')} at a time"
        label, layer = _peak(result, kind)
        effect = percent(max(0.0, float(rows.max())))
        terminal.print(f"\n{KIND_NAMES[kind]} restored{width} (largest effect {effect}, at {label!r}, layer {layer})")
        terminal.print(*heatmap(result.labels, rows.tolist(), kind, width=terminal.out.width, top=top))
    terminal.print("")


def _peak(result: Trace | Average, kind: str) -> tuple[str, int]:
    """Return the label of the token and the layer with the largest effect."""
    rows = result.effects[kind]
    token, layer = divmod(int(rows.argmax()), rows.shape[1])
    return result.labels[token].strip(), layer


def _brief(result: Trace | Average) -> str:
    lines = []
    for kind, rows in result.effects.items():
        label, layer = _peak(result, kind)
        lines.append(f"{kind}\t{label}\t{layer}\t{float(rows.max()):.4f}")
    return "\n".join(lines)
