"""transformers while it loads and saves: without chatter, its errors in one line, and nothing made up."""

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
    """No progress bars and no chatter from transformers while it loads or saves; as they were afterwards."""
    logs: Any = transformers_logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    reader = vars(modeling_gguf_pytorch_utils)
    gguf_bar = reader.get("tqdm")  # obeys no setting
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    reader["tqdm"] = lambda items, *args, **kwargs: items
    try:
        yield
    finally:
        reader["tqdm"] = gguf_bar
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """No progress bars from transformers; its warnings stay."""
    logs: Any = transformers_logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


def one_line(problem: BaseException) -> str:
    """The first line of a library's message, and not all of a long one."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return line if len(line) <= 200 else f"{line[:197]}…"


def require_complete(report: dict[str, Any], source: Path, step: str) -> None:
    """transformers fills what it does not find with random numbers, and only mentions it."""
    absent = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if absent:
        raise InputError(
            f"{source} lacks {len(absent)} of the model's weights (such as {absent[0]}), expected all of them: {step}"
        )
