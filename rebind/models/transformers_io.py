"""transformers while it loads and saves: no progress bars, errors on one line, no invented weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from rebind.errors import InputError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars and the messages of transformers while it loads or saves."""
    logs: Any = transformers_logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    gguf_reader = vars(modeling_gguf_pytorch_utils)
    gguf_bar = gguf_reader.get("tqdm")  # obeys no setting
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    gguf_reader["tqdm"] = lambda items, *args, **kwargs: items
    try:
        yield
    finally:
        gguf_reader["tqdm"] = gguf_bar
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def first_line(problem: BaseException) -> str:
    """Return the first line of an error message, shortened if it is long."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return line if len(line) <= 200 else f"{line[:199]}…"


def require_complete(report: dict[str, Any], source: Path, advice: str) -> None:
    """Raise if weights were missing: transformers fills them with random numbers and only mentions it."""
    missing = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if missing:
        problem = f"{source} lacks {len(missing)} of the weights of the model (such as {missing[0]})"
        raise InputError(problem, advice=advice, code="missing_weights")
