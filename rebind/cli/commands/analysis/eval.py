"""`rebind eval`: measure an editing method on records, and compare runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import harmonic_mean
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rebind.cli import options as opt
from rebind.cli.command import add_command, new_app, with_option_groups
from rebind.cli.session import load_editor
from rebind.cli.ui import Terminal
from rebind.cli.ui.progress import DESCRIPTIONS, Phases
from rebind.cli.ui.tables import counted, pairs, table
from rebind.edit import DEFAULT_METHOD

if TYPE_CHECKING:
    from rebind.evals import EvalProgress, EvalResult
    from rebind.evals.protocols import Stage

EXAMPLES = opt.examples(
    "rebind eval --limit 10",
    "rebind eval --facts counterfact.json --limit 1000 --protocol sequential --method alphaedit --out runs/alpha",
    "rebind eval compare runs/memit runs/alpha",
    note="Without --facts it uses sixty facts that come with rebind. An interrupted run continues where it stopped "
    "when the same command is run again.",
)

question_value, question_flag = partial(opt.value, panel="Questions"), partial(opt.flag, panel="Questions")
NAME_WIDTH = 18  # columns for the name of a run


def evaluate(
    method: opt.Method = DEFAULT_METHOD,
    facts: Annotated[
        str | None,
        opt.value("FILE", "Records: CounterFact, zsRE, MQuAKE, your own or hf:NAME:SPLIT.", default="bundled"),
    ] = None,
    limit: opt.Limit = None,
    protocol: Annotated[
        str, opt.value("NAME", "How to write the records: single (one by one), batch (all at once) or sequential.")
    ] = "single",
    batch: Annotated[int, opt.value("N", "Write N records per edit with --protocol sequential.", min=1)] = 100,
    every: Annotated[
        int | None, opt.value("N", "Measure after every N batches.", default="after 1, 2, 4, 8, ...", min=1)
    ] = None,
    out: Annotated[Path | None, opt.value("DIR", "Folder for the results.", default="a new one in runs/")] = None,
    layers: opt.Layers = None,
    lam: opt.Lambda = None,
    steps: Annotated[int | None, opt.value("N", "Search each target for at most N steps.", min=1)] = None,
    skip_bad: opt.SkipBad = False,
    seed: Annotated[int, opt.seed_value("Random seed for contexts, generated texts and confidence intervals.")] = 0,
    known: Annotated[bool, question_flag("--known", "Use only records whose true answer the model prefers.")] = False,
    free_tokens: Annotated[int, question_value("N", "Continue each prompt by N tokens.", min=0)] = 24,
    texts: Annotated[int, question_value("N", "Generate N longer texts per record to measure fluency.", min=0)] = 1,
    baselines: Annotated[
        bool,
        question_flag("--baselines", "Also ask the unedited model with the facts in its prompt, and a LoRA fine-tune."),
    ] = False,
    text: Annotated[
        Path | None, question_value("FILE", "Text to measure perplexity on.", default="a bundled text")
    ] = None,
    *,
    source: opt.ModelOptions,
    terminal: Terminal,
) -> None:
    """Measure an editing method: write records, ask before and after, and report scores."""
    from rebind import evals
    from rebind.edit import Progress
    from rebind.edit.methods import get_method
    from rebind.edit.moments import read_text

    get_method(method)  # raises an error for an unknown name, before anything is loaded
    chosen_protocol = evals.get_protocol(protocol, batch=batch, every=every)
    question_settings = evals.QuestionSettings(free_tokens, texts)
    config = evals.EvalConfig(
        method,
        chosen_protocol,
        opt.parse_layers(layers),
        lam,
        steps,
        question_settings,
        baselines=baselines,
    )
    perplexity_text = None if text is None else read_text(text)
    # With --known or --skip-bad, the limit counts the selected records.
    read_limit = None if known or skip_bad else limit
    if facts is None:
        records = evals.bundled_records(read_limit)
    else:
        records = evals.read_records(facts, limit=read_limit, skip_bad=skip_bad)
    with Phases(terminal) as phases:
        editor = load_editor(source, phases)
        editor.seed = seed
        phases.begin("asking")
        usable_limit = None if known else limit
        selected = evals.usable_records(editor, records, chosen_protocol, skip_bad=skip_bad, limit=usable_limit)
        selected = evals.known_records(editor, selected) if known else selected
        selected = replace(selected, records=selected[:limit])
    for reason in selected.skipped:
        terminal.report("skipped", reason)
    with Phases(terminal) as phases:
        progress = _progress(phases, f"{method}, {protocol}")
        editor.progress = Progress(phase=progress.phase)
        result = evals.evaluate(editor, selected, config, out, text=perplexity_text, progress=progress)
    if terminal.writes:
        _print(terminal, result)


def _progress(phases: Phases, label: str) -> EvalProgress:
    """Return callbacks that show the phase and the running scores of an evaluation."""
    from rebind.evals import EvalProgress

    def show_phase(name: str) -> None:
        phases.note(label, DESCRIPTIONS.get(name, name))

    def show_scores(done: int, total: int, stage: Stage, scores: dict[str, float]) -> None:
        parts = [scores[name] for name in ("ES", "PS", "NS") if name in scores]
        scores = {"S": harmonic_mean(parts), **scores} if len(parts) == 3 else scores
        phases.count(label, done, total, " ".join(f"{name} {value:.2f}" for name, value in scores.items()))

    return EvalProgress(unit=show_scores, phase=show_phase)


def _print(terminal: Terminal, result: EvalResult) -> None:
    from rebind.evals.summary import describe_protocol, framings_table, retention_table, scores_table, states_table

    summary = result.summary
    count = counted(summary["states"][0]["records"], "record")
    heading = f"{summary['method']} on {summary['model']}, {describe_protocol(summary)}: {count} of {summary['data']}"
    terminal.print(Text(heading, style="bold"))
    if len(summary["states"]) > 2:
        print_states(terminal, *states_table([("", summary)]))
    for header, rows in (framings_table(summary), scores_table(summary), retention_table(summary)):
        # Columns that do not fit on a terminal are in table.md.
        hidden = {"95 %"} if "framing" in header else {"meaning"} if summary["baselines"] else set()
        columns = [index for index, name in enumerate(header) if name not in hidden]
        if rows:
            grid = table(*(header[index] for index in columns), right=[name for name in header if name != "meaning"])
            for row in rows:
                grid.add_row(*(row[index] for index in columns))
            for column in grid.columns[: 2 if "framing" in header else 1]:
                column.justify = "left"
            terminal.print(grid)
    skipped = [("skipped", counted(summary["skipped"], "record"))] if summary["skipped"] else []
    files = ", ".join(sorted(file.name for file in result.folder.glob("[!.]*")))
    terminal.print(pairs([*skipped, ("results", result.folder), ("files", files)]))
    terminal.hint("table.md says what the columns and scores mean, report.png shows them")
    if not (result.folder / "report.png").exists():
        terminal.hint("no figure: it needs matplotlib (pip install 'rebind[lab]')")
    terminal.result({"folder": str(result.folder), "config": result.config, "summary": summary}, str(result.folder))


def compare(
    folders: Annotated[list[Path], opt.argument("DIR", "Folders with results of `rebind eval`.")],
    figure: Annotated[Path | None, opt.value("FILE", "Draw the runs side by side into this PNG file.")] = None,
    *,
    terminal: Terminal,
) -> None:
    """Compare the scores of several evaluations."""
    from rebind import evals
    from rebind.evals.figures import draw_runs

    comparison = evals.compare(folders)
    print_states(terminal, comparison.header, comparison.rows)
    for note in comparison.notes:
        terminal.print(note, style="yellow")
    if figure is not None:
        draw_runs(figure, comparison.runs)
        terminal.hint(f"wrote {figure}")
    runs = [{"name": name, **run} for name, run in comparison.runs]
    terminal.result({"runs": runs, "notes": comparison.notes}, comparison.markdown.rstrip())


def print_states(terminal: Terminal, header: list[str], rows: list[list[str]]) -> None:
    """Print states of models as columns and scores as rows, in several tables if one would be too wide."""
    group: list[list[str]] = []
    for row in rows:
        width = Console(width=1_000).measure(_states_columns(header, [*group, row])).maximum
        if group and width > terminal.out.width:
            terminal.print(_states_columns(header, group))
            group = []
        group.append(row)
    terminal.print(_states_columns(header, group))


def _states_columns(header: list[str], rows: list[list[str]]) -> Table:
    """Return the transposed rows; `header` names the run (if there are several), the edits, then scores."""
    first = header.index("edits")
    grid = table("score")
    for row in rows:
        edits = row[first] if row[first] == "before" else f"after {row[first]}"
        heading = "\n".join([*(fill(run, NAME_WIDTH) for run in row[:first]), edits])
        grid.add_column(heading, justify="right", no_wrap=True)
    for index in range(first + 1, len(header)):
        grid.add_row(header[index], *(row[index] for row in rows))
    return grid


app = new_app(invoke_without_command=True, callback=with_option_groups(evaluate, processes="shared"), epilog=EXAMPLES)
add_command(app, "compare", compare, opt.examples("rebind eval compare runs/memit runs/rome --figure both.png"))
