"""transformers while it loads and saves: no progress bars, one error, no invented weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_gguf_pytorch_utils
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


@contextlib.contextmanager
def loading(source: Path, kind: str, *, advice: str, code: str) -> Iterator[None]:
    """Load quietly, and turn whatever transformers raises into one error."""
    try:
        with quiet():
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # transformers, safetensors, accelerate and gguf each have their own
        problem_text = f"{source} cannot be loaded as {kind} ({first_line(problem)})"
        raise InputError(problem_text, advice=advice, code=code) from problem


def load_weights(source: Path, folder: Path, *, advice: str, **options: Any) -> PreTrainedModel:
    """Return the causal language model of `source`, a folder or a file in it. Nothing is downloaded, no code is run."""
    with loading(source, "a causal language model", advice=advice, code="unreadable_model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
    model: PreTrainedModel
    model, report = loaded  # because of output_loading_info
    missing = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if missing:  # transformers fills them with random numbers and only mentions it
        problem = f"{source} lacks {len(missing)} of the weights of the model (such as {missing[0]})"
        raise InputError(problem, advice=advice, code="missing_weights")
    return model
