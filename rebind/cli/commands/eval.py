"""`rebind eval`: write records by a method, ask everything before and after, and report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from rebind.cli import options
from rebind.cli.session import Wanted, open_editor
from rebind.cli.ui.progress import LABELS, Bars, Drawn
from rebind.cli.ui.tables import pairs, table, width
from rebind.cli.ui.terminal import Screen, counted, screen
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.evals.protocols import Protocol, Stage
    from rebind.evals.records import Records
    from rebind.evals.report import Comparison
    from rebind.evals.run import Progress as Told
    from rebind.evals.run import Result, Trial

EXAMPLES = """[bold]Examples[/bold]

rebind eval --n 10

rebind eval --facts counterfact.json --n 1000 --protocol sequential --batch 100 --method alphaedit --out runs/alpha

rebind eval compare runs/memit runs/alpha

Without --facts it takes sixty facts that come with it. A run that was stopped goes on where it was when the same command is given again."""  # noqa: E501

ASKED = "What is asked"
NAME = 18  # columns for the name of a run

app = typer.Typer(rich_markup_mode="rich", invoke_without_command=True, epilog=EXAMPLES)


@app.callback()
def evaluate(
    context: typer.Context,
    method: Annotated[str, typer.Option(metavar="NAME", help=f"{options.METHODS}.")] = "memit",
    facts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CounterFact, zsRE, MQuAKE or our own records, or hf:name:split. Default: our sixty."
        ),
    ] = None,
    n: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many records. Default: all.")] = None,
    protocol: Annotated[
        str, typer.Option(metavar="NAME", help="single (each alone), batch (all at once) or sequential.")
    ] = "single",
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Records an edit, where they are sequential.")] = 100,
    every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Batches between two checkpoints. Default: after 1, 2, 4, 8 and so on."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results. Default: one in runs/.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to write, as 2,3,4 or 2-6. Default: by the model.")
    ] = None,
    lam: Annotated[float | None, typer.Option(metavar="X", help="λ. Default: from the keys.")] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most steps to search a target. Default: the method's.")
    ] = None,
    known: Annotated[
        bool,
        typer.Option("--known", help="Only records whose true target the model prefers.", rich_help_panel=ASKED),
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out records that cannot be used.", rich_help_panel=ASKED)
    ] = False,
    free_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens of free decoding; 0 for none.", rich_help_panel=ASKED)
    ] = 16,
    texts: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Longer texts a record, for fluency; 0: none.", rich_help_panel=ASKED),
    ] = 1,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Held text for perplexity. Default: one of ours.", rich_help_panel=ASKED),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of contexts, texts and intervals.")] = 0,
    model: options.Model = options.DEFAULT_MODEL,
    chat: options.Chat = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    corpus: options.CorpusFile = None,
    moment_tokens: options.MomentTokens = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a method: write records, ask everything before and after, report with intervals."""
    if context.invoked_subcommand is not None:
        return
    with screen(as_json, quiet, debug, skips=True) as shown:
        from rebind.edit.methods import get_method
        from rebind.evals.answers import Asking
        from rebind.evals.protocols import get_protocol
        from rebind.evals.run import Trial, evaluate

        get_method(method)
        if lam is not None and not 0 < lam < math.inf:
            raise InputError(f"lam is {lam}, expected a number above 0: leave it out to have it found from the keys")
        trial = Trial(
            method,
            get_protocol(protocol, batch=batch, every=every),
            options.parse_layers(layers),
            lam,
            steps,
            Asking(free_tokens, texts),
        )
        held = None if text is None else _held(text)
        # Where some may be left out, `_choose` takes the first n of the rest.
        records = _read(facts, None if known or skip_bad else n, skip_bad)
        bars = Bars(shown)
        with bars.drawn():
            wanted = Wanted(model, None, device, dtype, chat, corpus, moment_tokens)
            editor = open_editor(wanted, bars, base_only=True)
            editor.seed = seed
            bars.phase("asking")
            chosen = _choose(editor, records, trial.protocol, n, known, skip_bad)
        for reason in chosen.skipped:
            shown.complain("skipped", reason)
        with _bar(shown, editor, trial) as progress:
            result = evaluate(editor, chosen, trial, out, text=held, progress=progress)
        _show(shown, result)


def _read(facts: str | None, limit: int | None, skip_bad: bool) -> Records:
    """The records, before minutes are spent on a model."""
    from rebind.evals.records import bundled, read_records

    return bundled(limit) if facts is None else read_records(facts, limit=limit, skip_bad=skip_bad)


def _held(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"held text {path} cannot be read ({problem}), expected plain UTF-8 text: check it") from None


def _choose(
    editor: Editor, records: Records, protocol: Protocol, n: int | None, known: bool, skip_bad: bool
) -> Records:
    from rebind.evals.choosing import known as known_to
    from rebind.evals.choosing import usable

    records = usable(editor, records, protocol, skip_bad=skip_bad, limit=None if known else n)
    if known:
        records = known_to(editor, records)
    return replace(records, records=records[: n or len(records)])


@contextmanager
def _bar(shown: Screen, editor: Editor, trial: Trial) -> Iterator[Told]:
    """One bar over the whole evaluation, with the score so far and what is being done."""
    from rebind.edit.progress import Progress as EditorProgress
    from rebind.evals.run import Progress as Told

    drawn = Drawn(shown, "scores", "doing")
    task = drawn.add_task(f"{trial.method}, {trial.protocol.name}", total=None, scores="", doing="")

    def doing(phase: str) -> None:
        drawn.update(task, doing=LABELS.get(phase, phase))

    def unit(done: int, total: int, stage: Stage, scores: dict[str, float]) -> None:
        drawn.update(task, completed=done, total=total, scores=_running(stage, scores))

    def moments(done: int, wanted: int) -> None:
        drawn.update(task, doing=f"{LABELS['moments']}, {done:,} of {wanted:,} tokens")

    before, editor.progress = editor.progress, EditorProgress(phase=doing, moments=moments)
    try:
        with drawn:
            yield Told(unit=unit, doing=doing)
            drawn.update(task, doing="")
    finally:
        editor.progress = before


def _running(stage: Stage, scores: dict[str, float]) -> str:
    from rebind.evals.metrics import harmonic_score

    if not scores:
        return "base model" if stage.edits == 0 else ""
    told = {"S": harmonic_score(*scores.values()), **scores} if len(scores) == 3 else scores
    return " ".join(f"{name} {value:.2f}" for name, value in told.items())


def _show(shown: Screen, result: Result) -> None:
    from rebind.evals.report import described, long_table, short_table

    summary = result.summary
    count = counted(summary["states"][0]["records"], "record")
    heading = f"{summary['method']} on {summary['model']}, {described(summary)}: {count} of {summary['data']}"
    shown.show(Text(heading, style="bold"))
    if len(summary["states"]) > 2:
        _show_states(shown, *short_table([("", summary)]))
    _show_rows(shown, ["score", "before", "after", "95 %", ""], long_table(summary), ["before", "after", "95 %"])
    shown.show(
        pairs(
            [
                *([("skipped", counted(summary["skipped"], "record"))] if summary["skipped"] else []),
                ("results", result.folder),
                ("files", ", ".join(sorted(file.name for file in result.folder.iterdir()))),
            ]
        )
    )
    if not (result.folder / "scores.png").exists():
        shown.hint("no figures: pip install 'rebind[lab]' for them")
    shown.result({"folder": str(result.folder), "config": result.config, "summary": summary}, str(result.folder))


def _show_rows(shown: Screen, header: list[str], rows: list[list[str]], right: list[str]) -> None:
    made = table(*header, right=right)
    for row in rows:
        made.add_row(*row)
    shown.show(made)


@app.command("compare", epilog="[bold]Example[/bold]\n\nrebind eval compare runs/memit runs/rome --figure both.png")
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `rebind eval` made.", metavar="DIR")],
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them side by side into this PNG file.")
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Put runs side by side."""
    with screen(as_json, quiet, debug) as shown:
        from rebind.evals.report import compare, draw_comparison

        found = compare(folders)
        _show_comparison(shown, found)
        if figure is not None:
            draw_comparison(figure, found)
            shown.hint(f"figure: {figure}")
        document: dict[str, Any] = {"runs": [{"name": name, **run} for name, run in found.runs], "notes": found.notes}
        shown.result(document, found.markdown.rstrip())


def _show_comparison(shown: Screen, found: Comparison) -> None:
    _show_states(shown, found.header, found.rows)
    for note in found.notes:
        shown.show(note, style="yellow")


def _show_states(shown: Screen, header: list[str], rows: list[list[str]]) -> None:
    """States of the model as columns, scores as rows; where not all columns fit, whole runs stand below."""
    some: list[list[str]] = []
    for row in rows:
        if some and width(_states(header, [*some, row])) > shown.out.width:
            others = [one for one in some if one[0] != row[0]] if "run" in header else []
            done = others or some
            shown.show(_states(header, done))
            some = some[len(done) :]
        some.append(row)
    shown.show(_states(header, some))


def _states(header: list[str], rows: list[list[str]]) -> Table:
    """The rows of a `short_table`, turned: `header` names the run, if there are several, the edits, then scores."""
    first = header.index("edits")
    runs = ["".join(row[:first]) for row in rows]
    edits = [row[first] if row[first] == "before" else f"after {row[first]}" for row in rows]
    made = table("score")
    for run, before, count in zip(runs, ["", *runs], edits, strict=False):
        lines = _name_lines("" if run == before else run) if first else []
        made.add_column("\n".join([*lines, count]), justify="right", no_wrap=True)
    for place in range(first + 1, len(header)):
        made.add_row(header[place], *(row[place] for row in rows))
    return made


def _name_lines(run: str) -> list[str]:
    """A run's name in lines of at most `NAME`, broken between its words alone.

    >>> _name_lines("memit-sequential-200-3f2a91c0")
    ['memit-sequential-', '200-3f2a91c0']
    """
    lines = [""]
    for word in re.split(r"(?<=[-_. /])", run):
        if lines[-1] and len(lines[-1] + word) > NAME:
            lines.append("")
        lines[-1] += word
    return lines
