"""`rebind trace`: which hidden states carry a fact."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rebind.cli import options
from rebind.cli.given import Given, good_ones, read_file
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.tables import seconds
from rebind.cli.ui.terminal import Screen, counted, screen, strict_json
from rebind.edit.facts.fact import require_text
from rebind.edit.wording import percent
from rebind.errors import InputError
from rebind.files import require_writable, write_atomically

if TYPE_CHECKING:
    from rebind.analysis.averages import Average
    from rebind.analysis.traces import Trace, TraceSettings
    from rebind.analysis.tracing import Tracer
    from rebind.edit.facts.fact import Fact

EXAMPLES = """[bold]Examples[/bold]

rebind trace "{The Eiffel Tower} is in the city of"

rebind trace "The Space Needle is in the city of" --subject "The Space Needle" --target Seattle --out trace/

rebind trace --facts knowns.json --limit 50 --kind mlp"""

NAMES = {"hidden": "one block's output", "mlp": "MLP", "attention": "attention"}


def trace(
    prompt: Annotated[str | None, typer.Argument(help="A prompt, its subject in braces.")] = None,
    subject: Annotated[str | None, typer.Option(metavar="TEXT", help="The subject, instead of braces.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The answer to trace. Default: what the model says.")
    ] = None,
    kind: Annotated[str, typer.Option(metavar="NAME", help="What to restore: hidden, mlp, attention or all.")] = "all",
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Average over the facts of a file that the model knows.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most so many of its facts.")] = None,
    predicted: Annotated[
        bool, typer.Option("--predicted", help="All of its facts: trace what the model says, right or wrong.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out records that cannot be used.")] = False,
    draws: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Draws of noise to average. Default: 4.")
    ] = None,
    noise: Annotated[
        float | None, typer.Option(metavar="X", help="Its size, in deviations of the embeddings. Default: 3.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Layers restored together (mlp, attention). Default: a fifth of all."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the noise.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write trace.png and trace.json here.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The model without the edits of its ledger.")] = False,
    model: options.Model = options.DEFAULT_MODEL,
    ledger: options.LedgerFolder = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Corrupt the subject, restore one state at a time, and see which brings the answer back."""
    with screen(as_json, quiet, debug, skips=True) as shown:
        given = _read(shown, prompt, subject, target, facts, limit, skip_bad)
        settings = _settings(kind, draws, noise, window, seed)
        own = predicted if facts is not None else target is None
        if out is not None:
            require_writable(out, "name another with --out")
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, ledger, device, dtype, corpus=corpus, moment_tokens=moment_tokens)
            editor = open_editor(wanted, bars, base_only=base)
            if facts is not None:
                given = good_ones(shown, given, partial(_require_short, editor), skip_bad)
            found, left_out = _traced(editor, given.facts, settings, bars, one=facts is None, own=own)
        made: Trace | Average = found[0] if facts is None else _averaged(found, left_out)
        document = {
            "model": editor.loaded.name,
            "fingerprint": editor.fingerprint,
            "active": [edit.id for edit in editor.ledger.active],
            "left_out": left_out,
            "skipped": given.skipped,
            **made.to_json(),
        }
        given.tell_skipped(shown)
        _show(shown, made, found[0].window)
        spent = sum(one.seconds for one in found)
        edited = f", edits {', '.join(document['active'])} in place" if document["active"] else ""
        draws_of = counted(found[0].settings.draws, "draw")
        shown.hint(
            f"{editor.loaded.name}{edited}: traced in {seconds(spent)} ({draws_of} of noise, "
            f"standard deviation {found[0].noise:.3g}, window {found[0].window})"
        )
        files = _written(made, found[0].window, document, out)
        for file in files:
            shown.hint(f"wrote {file}")
        shown.result(document | {"seconds": spent, "files": [str(file) for file in files]}, _brief(made))


def _read(
    shown: Screen,
    prompt: str | None,
    subject: str | None,
    target: str | None,
    facts: Path | None,
    limit: int | None,
    skip_bad: bool,
) -> Given:
    from rebind.edit.facts.fact import Fact

    if (prompt is None) == (facts is None):
        got = "both" if prompt else "neither"
        raise InputError(f'got {got} of a prompt and --facts, expected one: rebind trace "The {{Louvre}} is in"')
    if target is not None:
        require_text("--target", target)
    if prompt is not None:
        return Given((Fact.parse(prompt, target or ".", subject=subject),), ("",))
    if subject is not None or target is not None:
        raise InputError("got --facts with --subject or --target, expected these with a prompt: leave them out")
    return read_file(shown, str(facts), skip_bad, limit=limit)


def _require_short(editor: Any, fact: Fact) -> None:
    from rebind.edit.facts.encoding import encode
    from rebind.edit.facts.fact import Fact

    for target in filter(None, (fact.target, fact.old)):
        asked = Fact(fact.prompt, fact.subject, target)
        encode(asked, editor.tokenizer, editor.loaded.start, limit=editor.trunk.context)


def _settings(kind: str, draws: int | None, noise: float | None, window: int | None, seed: int) -> TraceSettings:
    from rebind.analysis.traces import KINDS, TraceSettings

    if kind != "all" and kind not in KINDS:
        raise InputError(f"kind is {kind!r}, expected {', '.join(KINDS)} or all: choose one of these")
    given: dict[str, Any] = {"draws": draws, "noise": noise, "window": window}
    kinds = KINDS if kind == "all" else (kind,)
    return TraceSettings(kinds=kinds, seed=seed, **{name: value for name, value in given.items() if value is not None})


def _traced(
    editor: Any, listed: Sequence[Fact], settings: TraceSettings, bars: Bars, *, one: bool, own: bool
) -> tuple[list[Trace], int]:
    """The traces, and how many facts were left out because the model does not know them."""
    from rebind.analysis.tracing import Tracer

    at = 0

    def restored(done: int, wanted: int) -> None:
        note = f"{done:,} of {wanted:,} states" if one else f"fact {at + 1} of {len(listed)}"
        bars.count("restoring states", at * wanted + done, len(listed) * wanted, note)

    tracer = Tracer.of(editor, settings, on_pass=restored)
    found = []
    for at, fact in enumerate(listed):  # noqa: B007 - `restored` reads it
        if one or own or _knows(tracer, fact):
            found.append(tracer.trace(fact, own=own or not one))
    return found, len(listed) - len(found)


def _knows(tracer: Tracer, fact: Fact) -> bool:
    said, true = tracer.predicts(fact)
    return said == true


def _averaged(found: list[Trace], left_out: int) -> Average:
    from rebind.analysis.averages import average

    if not found:
        raise InputError(
            f"the model says the answer of none of the {left_out} facts, expected some: pass facts it knows, or "
            f"--predicted to trace what it says instead"
        )
    return average(found)


def _written(made: Trace | Average, window: int, document: dict[str, Any], out: Path | None) -> list[Path]:
    if out is None:
        return []
    from rebind.analysis.plots import draw_trace

    picture = draw_trace(made, out / "trace.png", window=window, title=_title(made))
    file = out / "trace.json"
    write_atomically(file, strict_json(document).encode())
    return [picture, file]


def _title(made: Trace | Average) -> str:
    from rebind.analysis.traces import Trace

    odds = f"{percent(made.clean)}, {percent(made.corrupted)} corrupted"
    if isinstance(made, Trace):
        return f"{made.question.text} → {made.answer.strip() or repr(made.answer)} ({odds})"
    return f"mean of {made.facts} fact{'s' * (made.facts > 1)} ({odds})"


def _show(shown: Screen, made: Trace | Average, window: int) -> None:
    shown.show(_title(made), style="bold")
    top = max(float(rows.max()) for rows in made.effects.values())
    for kind, rows in made.effects.items():
        over = "" if kind == "hidden" else f", {window} layer{'s' * (window > 1)} round each"
        at, layer = divmod(int(rows.argmax()), rows.shape[1])
        where = f"most at {made.labels[at].strip()!r}, layer {layer}: {percent(max(0.0, float(rows.max())))} come back"
        shown.show(f"\n{NAMES[kind]} restored{over} ({where})")
        shown.show(*heatmap(made.labels, rows.tolist(), kind, width=shown.out.width, top=top))
    shown.show("")


def _brief(made: Trace | Average) -> str:
    rows = []
    for kind, effects in made.effects.items():
        at, layer = divmod(int(effects.argmax()), effects.shape[1])
        rows.append(f"{kind}\t{made.labels[at].strip()}\t{layer}\t{float(effects.max()):.4f}")
    return "\n".join(rows)
