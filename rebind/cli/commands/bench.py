"""`rebind bench`: how fast it is on this machine, beside its peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rebind.cli import options
from rebind.cli.ui.progress import Bars
from rebind.cli.ui.terminal import Screen, screen
from rebind.files import require_writable

if TYPE_CHECKING:
    from rebind.bench.scan import Report, Row

EXAMPLES = """[bold]Examples[/bold]

rebind bench scan --quick

rebind bench scan --shapes 1x2048x8x64,1x8192x8x64 --only ours,transformers --threads 2

It writes scan-DEVICE.json, .png and .svg. Peers take part if they are installed: transformers, flash-linear-attention."""  # noqa: E501

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True, help="Measure speed and memory on this machine.")


@app.callback()
def root() -> None:
    """Measure speed and memory on this machine."""


@app.command("scan", epilog=EXAMPLES)
def scan(
    shapes: Annotated[
        str | None, typer.Option(metavar="LIST", help="BxTxHxD, separated by commas. Default: the device's own.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, few rounds: a minute or two.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="ours, transformers, fla, SDPA, loop. Default: all.")
    ] = None,
    rules: Annotated[
        str | None, typer.Option(metavar="NAMES", help="gated delta, delta, sum, softmax. Default: all, and decoding.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=3, help="At most so many timings of each.")] = 30,
    seconds: Annotated[float, typer.Option(metavar="X", min=0.1, help="About how long a column takes.")] = 15.0,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads. Default: torch's.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the results.")] = Path("runs/bench"),
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps. Default: cuda if there is one.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: float32 on a CPU, bfloat16 elsewhere.")
    ] = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Time the scan beside its peers: forward, backward, memory, decoding; a table, JSON and a figure."""
    with screen(as_json, quiet, debug) as shown:
        import torch

        from rebind.bench.scan import Setup, parse_shape, run
        from rebind.bench.table import spared
        from rebind.memory.checks import usable_device

        setup = Setup.of(
            device,
            options.parse_dtype(dtype),
            tuple(map(parse_shape, _split(shapes))),
            quick=quick,
            rounds=rounds,
            seconds=seconds,
            only=_split(only),
            rules=_split(rules),
        )
        usable_device(setup.device)
        require_writable(out, "name another with --out")
        path = out / f"scan-{setup.device.replace(':', '-')}.json"
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        bars = Bars(shown)
        done: list[list[Row]] = []
        try:
            with bars.drawn():
                report = run(
                    setup,
                    told=lambda done, total, doing: bars.count("measuring", done, total, doing),
                    found=lambda report, rows: _found(done, path, report, rows),
                )
        finally:
            torch.set_num_threads(before)
            _show(shown, done)
        for one in filter(None, [spared(report.rows, shown.out.width), *report.missing]):
            shown.hint(one)
        shown.hint(report.note)
        written = [path, *_draw(shown, report, path)]
        shown.show(f"written to {', '.join(map(str, written))}")
        shown.result(report.document() | {"written": [str(one) for one in written]}, str(path))


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _found(done: list[list[Row]], path: Path, report: Report, rows: list[Row]) -> None:
    """A shape is done: what there is is kept, should a later one fail."""
    report.save(path)
    done.append(rows)


def _show(shown: Screen, done: list[list[Row]]) -> None:
    """A table a shape; not while the bar is drawn, whose line it would be written on."""
    from rebind.bench.table import notes, tables

    for rows in done:
        shown.show(*tables(rows, shown.out.width))
        for note in notes(rows):
            shown.hint(note)


def _draw(shown: Screen, report: Report, path: Path) -> list[Path]:
    try:
        from rebind.bench.figure import draw

        wanted = [path.with_suffix(".png"), path.with_suffix(".svg")]
        if draw(report.document(), *wanted):
            return wanted
        shown.hint("no figure: it needs one shape in two lengths")
    except ModuleNotFoundError as problem:
        if problem.name != "matplotlib":
            raise
        shown.hint("no figure: pip install 'rebind[lab]'")
    return []
