"""A run's rows for TensorBoard, beside the log. The package `tensorboard` is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rebind.errors import InputError
from rebind.nn.training.log import Row

NAMES = {
    "loss": "loss/training",
    "validation": "loss/held",
    "norm": "gradient/norm",
    "rate": "optimizer/rate",
    "tokens_a_second": "speed/tokens_a_second",
}


def require_tensorboard() -> Any:
    """torch's writer, or what to do without one."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise InputError(
            f"tensorboard is on and cannot be imported ({problem}), expected the package tensorboard: "
            f"pip install 'rebind[tensorboard]', or leave it off, log.jsonl has the same numbers"
        ) from None
    return SummaryWriter


class Board:
    """Rows as curves. A run that goes on from a step takes back what was drawn after it."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = require_tensorboard()(log_dir=str(folder), purge_step=step + 1)

    def append(self, rows: Iterable[Row]) -> None:
        for row in rows:
            for name, tag in NAMES.items():
                if name in row:
                    self._writer.add_scalar(tag, row[name], row["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
