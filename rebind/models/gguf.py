"""GGUF files, converted once to a folder in Hugging Face format in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rebind.errors import InputError
from rebind.models.transformers_io import first_line, quiet, require_complete
from rebind.storage import cache_dir, create_folder

GGUF_MAGIC = b"GGUF"
CONVERSION = 1  # increase when the conversion changes: files are then converted again
DOWNLOAD_AGAIN = "Download the file again, or use a folder in Hugging Face format"


def convert_gguf(file: Path) -> Path:
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
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except MemoryError:
        raise
    except Exception as problem:  # a damaged file makes the parser fail in any of a dozen ways
        raise InputError(
            f"{file} cannot be read as a model ({first_line(problem)})",
            advice="Run pip install gguf" if isinstance(problem, ImportError) else DOWNLOAD_AGAIN,
            code="unreadable_gguf",
        ) from problem
    model: PreTrainedModel
    model, report = loaded
    require_complete(report, file, DOWNLOAD_AGAIN)
    with quiet():
        _without_quantization(model).save_pretrained(folder)
        tokenizer.clean_up_tokenization_spaces = False  # else decoding drops spaces before punctuation
        tokenizer.save_pretrained(folder)


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights under a config that does not mention how the file stored them, or saving is refused."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):  # no time spent on random weights
        clean = type(model)(type(model.config).from_dict(config))
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean
