"""Shell completion: the names that options accept, without importing torch, which takes seconds.

`tests/cli/test_completion.py` compares the names with the tables that they are copied from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

METHODS = ("memit", "rome", "emmet", "alphaedit", "recursive", "dense")
FRAMINGS = ("start", "plain", "text", "paraphrase", "chat")
BENCH_RULES = (
    *("comba", "delta", "gated_delta", "gdn2", "gla", "kda", "longhorn", "mamba2", "preconditioned", "rfa", "rwkv7"),
    *("sum", "softmax"),
)
PRESETS = ("modern-10m", "modern-60m", "modern-350m", "schlag-small", "schlag-medium")
KINDS = (
    *("attention", "latent", "linear-sum", "linear-delta", "performer-sum", "performer-delta", "dpfp-sum"),
    "dpfp-delta",
    *("rfa", "mamba2", "delta", "longhorn", "gated_delta", "gla", "kda", "gdn2", "comba", "rwkv7"),
    *("mesa", "ttt-linear", "ttt-mlp", "hopfield"),
)
EXPERIMENTS = (
    "capacity",
    "overwrite",
    "consolidation",
    "closed-form",
    "forgetting",
    "hopfield",
    "ttt-1d",
    "cost",
    "mqar",
    "edits",
)
DEVICES = ("cpu", "cuda", "mps")

Completer = Callable[[str], list[str]]


def one_of(*names: str) -> Completer:
    """Complete one name.

    >>> one_of("memit", "rome", "recursive")("r")
    ['rome', 'recursive']
    """
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def list_of(*names: str) -> Completer:
    """Complete the last name of a comma-separated list.

    >>> list_of("delta", "attention")("delta,a")
    ['delta,attention']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names if name.startswith(last)]

    return complete


def model_names(incomplete: str = "") -> list[str]:
    """Complete the built-in model and the models in the cache of the Hub; the shell itself completes folders."""
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folders = sorted(cache.glob("models--*")) if cache.is_dir() else []
    names = ["smollm2", *(folder.name.removeprefix("models--").replace("--", "/") for folder in folders)]
    return [name for name in names if name.startswith(incomplete)]
