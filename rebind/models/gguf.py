"""GGUF files, converted once to a folder in Hugging Face format that lies in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rebind.errors import InputError, StorageError
from rebind.files import write_folder_atomically
from rebind.models.transformers_io import one_line, quiet, require_complete
from rebind.storage import cache_dir

GGUF_MAGIC = b"GGUF"
CONVERSION = 1  # raise when converted folders change: older ones are then left alone and made anew
MIB = 1 << 20


def converted(gguf: Path) -> Path:
    """The file as a folder of safetensors in the cache: made once (half a minute), then loaded in a second."""
    folder = cache_dir() / "models" / f"{gguf.stem}-{_file_digest(gguf)}"
    write_folder_atomically(folder, lambda target: _convert(gguf, target))
    return folder


def _file_digest(file: Path) -> str:
    """Of all its bytes, a second for a gigabyte, and not of its time, which another installation changes."""
    with file.open("rb") as stream:
        head = stream.read(len(GGUF_MAGIC))
        if head != GGUF_MAGIC:
            raise InputError(
                f"{file} is no GGUF file: it starts with {head!r}, expected {GGUF_MAGIC!r}: "
                f"pass a .gguf file, or the folder of a Hugging Face model"
            )
        whole = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{CONVERSION} {whole}".encode()).hexdigest()[:12]


def _convert(gguf: Path, folder: Path) -> None:
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except ImportError as problem:
        raise InputError(f"{gguf} cannot be read ({one_line(problem)}): pip install gguf") from None
    except MemoryError:
        raise
    except Exception as problem:  # a damaged file trips the parser in any of a dozen ways
        raise InputError(
            f"{gguf} cannot be read as a model ({one_line(problem)}), expected an undamaged GGUF of an architecture "
            f"that transformers {transformers.__version__} converts: fetch the file again, or use a Hugging Face folder"
        ) from problem
    model: PreTrainedModel
    model, report = loaded
    require_complete(report, gguf, "fetch the file again, or use a Hugging Face folder")
    try:
        with quiet():
            _without_quantisation(model).save_pretrained(folder)
            tokenizer.clean_up_tokenization_spaces = False  # else decoding eats spaces before punctuation
            tokenizer.save_pretrained(folder)
    except SafetensorError as problem:
        raise StorageError(
            f"cannot write {folder.parent} ({one_line(problem)}), expected a folder with room for "
            f"{model.num_parameters() * 4 / MIB:.0f} MiB: free some space or set REBIND_CACHE"
        ) from problem


def _without_quantisation(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under a config that says nothing of how the file stored them: else saving is refused."""
    described = model.config.to_dict()
    described.pop("quantization_config", None)
    with torch.device("meta"):  # no time spent on random weights
        clean = type(model)(type(model.config).from_dict(described))
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean
