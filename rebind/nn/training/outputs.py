"""What the main process writes into the folder of a run besides checkpoints: log, times, TensorBoard, curve, result."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rebind.errors import InputError
from rebind.storage import Row, RunFolder, remove_file, seal_json, write_json

LOG, TIMES, RESULT, CURVE, TENSORBOARD = "log.jsonl", "times.jsonl", "result.json", "curve.png", "tensorboard"


class RunOutputs:
    """The files of one run. Times are not part of the log, so that the logs of two runs can be compared."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.log, self.times = folder.rows(LOG), folder.rows(TIMES)
        self.log_rows = 0
        self.board: Any = None  # for TensorBoard

    def resume(self, step: int, log_rows: int, *, tensorboard: bool) -> None:
        """Continue after a step, which the first `log_rows` rows of the log belong to."""
        self.log.truncate(log_rows)
        self.log_rows = log_rows
        if step == 0:
            for stale in (TIMES, RESULT, CURVE):
                remove_file(self.folder.file(stale))
        if tensorboard:
            self.board = import_tensorboard()(log_dir=str(self.folder.file(TENSORBOARD)), purge_step=step + 1)

    def add(self, rows: Sequence[Row], *, times: bool = False) -> None:
        """Append rows to the log, or to the times."""
        if times:
            self.times.append(rows)
        else:
            self.log.append(rows)
            self.log_rows += len(rows)
        for row in rows if self.board is not None else ():
            for name in row.keys() - {"step", "tokens"}:
                self.board.add_scalar(name, row[name], row["step"])

    def last(self, name: str) -> Any:
        """Return the last value of this name in the log; None if there is none."""
        return next((row[name] for row in reversed(self.log.read()) if name in row), None)

    def finish(self, summary: dict[str, Any], title: str) -> None:
        """Write the loss curve, if matplotlib is installed, and the result."""
        curve = draw_curve(self.log.read(), title)
        if curve is not None:
            self.folder.write(CURVE, curve)
        write_json(self.folder.file(RESULT), seal_json(summary))

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def import_tensorboard() -> Any:
    """Return torch's SummaryWriter."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise InputError(
            f"TensorBoard cannot be imported: {problem}",
            advice="Run pip install 'rebind[tensorboard]', or leave out {tensorboard}: log.jsonl has the same numbers",
            settings={"tensorboard": True},
            code="tensorboard_not_installed",
        ) from None
    return SummaryWriter


def draw_curve(rows: Sequence[Row], title: str) -> bytes | None:
    """Return the losses of a log as a PNG image; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, color, marker in (("loss", "#9bb7d4", ""), ("validation", "#c44e52", ".")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()
