"""`rebind bench`: measure speed and memory on this machine, beside other libraries."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rebind.cli import completion
from rebind.cli import options as opt
from rebind.cli.command import add_command, new_app
from rebind.cli.ui import Phases, Terminal
from rebind.limits import MAX_SECONDS, MAX_THREADS
from rebind.storage import check_writable

if TYPE_CHECKING:
    from rebind.bench.scan import Measurement, ScanReport

EXAMPLES = opt.examples(
    "rebind bench scan --quick",
    "rebind bench scan --shapes 1x2048x8x64,1x8192x8x64 --only ours,transformers --threads 2",
    note="Writes scan-DEVICE.json, .png and .svg. transformers and flash-linear-attention are measured if they are "
    "installed.",
)


def scan(
    shapes: Annotated[
        str | None,
        opt.value("LIST", "Shapes batch x tokens x heads x width, such as 1x2048x8x64.", default="the device's"),
    ] = None,
    quick: Annotated[bool, opt.flag("--quick", "Measure two shapes in few rounds; takes a minute or two.")] = False,
    only: Annotated[
        str | None, opt.value("NAMES", "Implementations: ours, transformers, fla, SDPA, loop.", default="all")
    ] = None,
    rules: Annotated[
        str | None,
        opt.value(
            "NAMES",
            "Rules: gated_delta, kda, softmax, ...",
            default="gated_delta,delta,sum,kda,softmax",
            autocompletion=completion.list_of(*completion.BENCH_RULES),
        ),
    ] = None,
    rounds: Annotated[int, opt.value("N", "Time each implementation at most N times.", min=3)] = 30,
    seconds: Annotated[
        float, opt.value("X", "Spend about X seconds per column of the table.", min=0.1, max=MAX_SECONDS)
    ] = 15.0,
    threads: Annotated[
        int | None, opt.value("N", "Number of CPU threads.", default="torch's choice", min=1, max=MAX_THREADS)
    ] = None,
    out: Annotated[Path, opt.value("DIR", "Folder for the results.")] = Path("runs/bench"),
    device: Annotated[str | None, opt.value("NAME", "Device: cpu, cuda or mps.", default="cuda, else cpu")] = None,
    dtype: Annotated[str | None, opt.value("NAME", "Dtype of the inputs.", default="bfloat16, CPU: float32")] = None,
    *,
    terminal: Terminal,
) -> None:
    """Time the scan beside other implementations: forward, backward, memory and decoding."""
    import torch

    from rebind.bench.contenders import parse_shape
    from rebind.bench.report import draw, notes, tables
    from rebind.bench.scan import ScanSetup, run

    sizes = tuple(map(parse_shape, opt.parse_names(shapes) or ()))
    selection = {"only": opt.parse_names(only) or (), "rules": opt.parse_names(rules) or ()}
    setup = ScanSetup(device, opt.parse_dtype(dtype), sizes, quick=quick, rounds=rounds, seconds=seconds, **selection)
    check_writable(out)
    path = out / f"scan-{setup.device.replace(':', '-')}.json"
    default_threads = torch.get_num_threads()
    torch.set_num_threads(threads or default_threads)
    measurements: list[Measurement] = []

    def save_shape(report: ScanReport, rows: list[Measurement]) -> None:
        report.save(path)  # a later failure must not lose it
        measurements.extend(rows)

    try:
        with Phases(terminal) as phases:
            report = run(setup, on_progress=partial(phases.count, "measuring"), on_shape=save_shape)
    finally:
        torch.set_num_threads(default_threads)
        terminal.print(*tables(measurements, terminal.out.width))
    for note in [*notes(report.rows, terminal.out.width), *report.missing, report.note]:
        terminal.hint(note)
    files, figures = [path], [path.with_suffix(".png"), path.with_suffix(".svg")]
    if find_spec("matplotlib") is not None and draw(report.document(), *figures):
        files += figures
    else:
        terminal.hint("no figure: it needs one shape in two lengths, and matplotlib (pip install 'rebind[lab]')")
    terminal.print(f"wrote {', '.join(map(str, files))}")
    terminal.result(report.document() | {"written": [str(file) for file in files]}, str(path))


app = new_app(help="Measure speed and memory on this machine.", callback=lambda: None, no_args_is_help=True)

add_command(app, "scan", scan, EXAMPLES)
