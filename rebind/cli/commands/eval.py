"""`rebind eval`: measure an editing method on records, and compare runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from rebind.cli import options
from rebind.cli.command import add_command, new_app, with_option_groups
from rebind.cli.options import ModelOptions, argument, examples, flag, option
from rebind.cli.session import check_positive, load_editor
from rebind.cli.ui.progress import PHASES, Phases, ProgressBar
from rebind.cli.ui.tables import counted, full_width, pairs, table
from rebind.cli.ui.terminal import Terminal
from rebind.errors import InputError

if TYPE_CHECKING:
    from rebind.edit.editor import Editor
    from rebind.evals.protocols import Stage
    from rebind.evals.records import Records
    from rebind.evals.run import Progress as EvalProgress
    from rebind.evals.run import Result, Trial

EXAMPLES = examples(
    "rebind eval --limit 10",
    "rebind eval --facts counterfact.json --limit 1000 --protocol sequential --method alphaedit --out runs/alpha",
    "rebind eval compare runs/memit runs/alpha",
    note="Without --facts it uses sixty facts that come with rebind. An interrupted run continues where it stopped "
    "when the same command is run again.",
)

QUESTIONS = "Questions"
NAME_WIDTH = 18  # columns for the name of a run


def evaluate(
    method: options.Method = "memit",
    facts: Annotated[
        str | None,
        option("FILE", "Records of CounterFact, zsRE, MQuAKE or your own, or hf:NAME:SPLIT.", default="bundled facts"),
    ] = None,
    limit: Annotated[int | None, option("N", "Evaluate only the first N records.", default="all", min=1)] = None,
    protocol: Annotated[
        str, option("NAME", "single (each record alone), batch (all at once) or sequential (one batch after another).")
    ] = "single",
    batch: Annotated[int, option("N", "Number of records per edit with --protocol sequential.", min=1)] = 100,
    every: Annotated[
        int | None,
        option("N", "Measure after every N batches.", default="after 1, 2, 4, 8, ... batches", min=1),
    ] = None,
    out: Annotated[Path | None, option("DIR", "Folder for the results.", default="a new one in runs/")] = None,
    layers: options.Layers = None,
    lam: options.Lambda = None,
    steps: Annotated[
        int | None, option("N", "Search each target for at most N steps.", default="chosen for the method", min=1)
    ] = None,
    known: Annotated[
        bool, flag("Use only records whose true answer the model prefers.", "--known", panel=QUESTIONS)
    ] = False,
    skip_bad: options.SkipBad = False,
    free_tokens: Annotated[
        int, option("N", "Number of tokens to generate per prompt; 0 for none.", panel=QUESTIONS, min=0)
    ] = 16,
    texts: Annotated[
        int,
        option(
            "N", "Number of longer texts to generate per record to measure fluency; 0 for none.", panel=QUESTIONS, min=0
        ),
    ] = 1,
    text: Annotated[
        Path | None, option("FILE", "Text to measure perplexity on.", default="a bundled text", panel=QUESTIONS)
    ] = None,
    seed: Annotated[int, option("N", "Random seed for contexts, generated texts and confidence intervals.")] = 0,
    chat: options.Chat = False,
    *,
    source: ModelOptions,
    terminal: Terminal,
) -> None:
    """Measure an editing method: write records, ask before and after, and report scores with intervals."""
    from rebind.edit.methods import get_method
    from rebind.evals.answers import Asking
    from rebind.evals.protocols import get_protocol
    from rebind.evals.run import Trial
    from rebind.evals.run import evaluate as run

    get_method(method)
    check_positive("lam", lam)
    chosen_protocol = get_protocol(protocol, batch=batch, every=every)
    trial = Trial(method, chosen_protocol, options.parse_layers(layers), lam, steps, Asking(free_tokens, texts))
    perplexity_text = None if text is None else _read_text(text)
    records = _read_records(facts, None if known or skip_bad else limit, skip_bad)  # `_choose` limits the rest
    phases = Phases(terminal)
    with phases.shown():
        editor = load_editor(source, phases, chat=chat)
        editor.seed = seed
        phases.start("asking")
        chosen = _choose(editor, records, trial, limit, known, skip_bad)
    for reason in chosen.skipped:
        terminal.report("skipped", reason)
    with _progress(terminal, editor, trial) as progress:
        result = run(editor, chosen, trial, out, text=perplexity_text, progress=progress)
    _print_result(terminal, result)


def _read_records(facts: str | None, limit: int | None, skip_bad: bool) -> Records:
    from rebind.evals.records import bundled, read_records

    return bundled(limit) if facts is None else read_records(facts, limit=limit, skip_bad=skip_bad)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"Cannot read {path} ({problem})", expected="UTF-8 text", code="unreadable_text") from None


def _choose(editor: Editor, records: Records, trial: Trial, limit: int | None, known: bool, skip_bad: bool) -> Records:
    from rebind.evals.choosing import known as only_known
    from rebind.evals.choosing import usable

    records = usable(editor, records, trial.protocol, skip_bad=skip_bad, limit=None if known else limit)
    if known:
        records = only_known(editor, records)
    return replace(records, records=records[: limit or len(records)])


@contextmanager
def _progress(terminal: Terminal, editor: Editor, trial: Trial) -> Iterator[EvalProgress]:
    """Show one bar for the whole evaluation, with the scores so far and the current phase."""
    from rebind.edit.progress import Progress as EditProgress
    from rebind.evals.run import Progress as EvalProgress

    bar = ProgressBar(terminal, "scores", "phase")
    task = bar.add_task(f"{trial.method}, {trial.protocol.name}", total=None, scores="", phase="")

    def phase(name: str) -> None:
        bar.update(task, phase=PHASES.get(name, name))

    def unit(done: int, total: int, stage: Stage, scores: dict[str, float]) -> None:
        bar.update(task, completed=done, total=total, scores=_running_scores(stage, scores))

    def moments(done: int, total: int) -> None:
        bar.update(task, phase=f"{PHASES['moments']}, {done:,} of {total:,} tokens")

    before, editor.progress = editor.progress, EditProgress(phase=phase, moments=moments)
    try:
        with bar:
            yield EvalProgress(unit=unit, doing=phase)
            bar.update(task, phase="")
    finally:
        editor.progress = before


def _running_scores(stage: Stage, scores: dict[str, float]) -> str:
    from rebind.evals.metrics import harmonic_score

    if not scores:
        return "base model" if stage.edits == 0 else ""
    shown = {"S": harmonic_score(*scores.values()), **scores} if len(scores) == 3 else scores
    return " ".join(f"{name} {value:.2f}" for name, value in shown.items())


def _print_result(terminal: Terminal, result: Result) -> None:
    from rebind.evals.report import described, long_table, short_table

    summary = result.summary
    count = counted(summary["states"][0]["records"], "record")
    heading = f"{summary['method']} on {summary['model']}, {described(summary)}: {count} of {summary['data']}"
    terminal.print(Text(heading, style="bold"))
    if len(summary["states"]) > 2:
        print_states(terminal, *short_table([("", summary)]))
    made = table("score", "before", "after", "95 %", "", right=("before", "after", "95 %"))
    for row in long_table(summary):
        made.add_row(*row)
    rows = [
        *([("skipped", counted(summary["skipped"], "record"))] if summary["skipped"] else []),
        ("results", result.folder),
        ("files", ", ".join(sorted(file.name for file in result.folder.iterdir()))),
    ]
    terminal.print(made, pairs(rows))
    if not (result.folder / "scores.png").exists():
        terminal.hint("no figures: they need matplotlib (pip install 'rebind[lab]')")
    terminal.result({"folder": str(result.folder), "config": result.config, "summary": summary}, str(result.folder))


def compare(
    folders: Annotated[list[Path], argument("DIR", "Folders with results of `rebind eval`.")],
    figure: Annotated[Path | None, option("FILE", "Draw the runs side by side into this PNG file.")] = None,
    *,
    terminal: Terminal,
) -> None:
    """Compare the scores of several evaluations."""
    from rebind.evals.report import compare as compare_runs
    from rebind.evals.report import draw_comparison

    comparison = compare_runs(folders)
    print_states(terminal, comparison.header, comparison.rows)
    for note in comparison.notes:
        terminal.print(note, style="yellow")
    if figure is not None:
        draw_comparison(figure, comparison)
        terminal.hint(f"wrote {figure}")
    runs = [{"name": name, **run} for name, run in comparison.runs]
    terminal.result({"runs": runs, "notes": comparison.notes}, comparison.markdown.rstrip())


def print_states(terminal: Terminal, header: list[str], rows: list[list[str]]) -> None:
    """Print states of models as columns and scores as rows, in several tables where one would be too wide.

    A run is split over two tables only if it alone is too wide.
    """
    part: list[list[str]] = []
    for row in rows:
        if part and full_width(_states_table(header, [*part, row])) > terminal.out.width:
            other_runs = [one for one in part if one[0] != row[0]] if "run" in header else []
            complete = other_runs or part
            terminal.print(_states_table(header, complete))
            part = part[len(complete) :]
        part.append(row)
    terminal.print(_states_table(header, part))


def _states_table(header: list[str], rows: list[list[str]]) -> Table:
    """Return the transposed rows: `header` names the run (if there are several), the edits, then scores."""
    first = header.index("edits")
    runs = ["".join(row[:first]) for row in rows]
    edits = [row[first] if row[first] == "before" else f"after {row[first]}" for row in rows]
    made = table("score")
    for run, previous, count in zip(runs, ["", *runs], edits, strict=False):
        lines = _name_lines("" if run == previous else run) if first else []
        made.add_column("\n".join([*lines, count]), justify="right", no_wrap=True)
    for index in range(first + 1, len(header)):
        made.add_row(header[index], *(row[index] for row in rows))
    return made


def _name_lines(run: str) -> list[str]:
    """Split a run's name into lines of at most `NAME_WIDTH` characters, between its words.

    >>> _name_lines("memit-sequential-200-3f2a91c0")
    ['memit-sequential-', '200-3f2a91c0']
    """
    lines = [""]
    for word in re.split(r"(?<=[-_. /])", run):
        if lines[-1] and len(lines[-1] + word) > NAME_WIDTH:
            lines.append("")
        lines[-1] += word
    return lines


app = new_app(invoke_without_command=True, callback=with_option_groups(evaluate), epilog=EXAMPLES)
add_command(app, "compare", compare, examples("rebind eval compare runs/memit runs/rome --figure both.png"))
