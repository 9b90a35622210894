"""Save the edited model as a checkpoint for transformers.

A model from a GGUF file is loaded in float32, several times the size of the file. Its checkpoint is saved in 16 bits,
in a dtype in which the model still says its facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rebind.edit.dense.files import MEMORY_FOLDER, StoredMemory, fill_folder
from rebind.errors import InputError
from rebind.models.load import quiet
from rebind.models.locate import first_line
from rebind.storage import cache_dir, replace_folder

NARROW_DTYPES = (torch.bfloat16, torch.float16)  # bfloat16 first: activations may overflow in float16


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    card: str,
    *,
    dtype: torch.dtype | None = None,
    memory: StoredMemory | None = None,
    overwrite: bool = False,
) -> Path:
    """Save the model as it is now, its tokenizer, and `card` as README.md; return the folder.

    A dense `memory` goes into the subfolder "memory".

    `dtype` is the dtype of the saved weights, by default that of the model. `overwrite` replaces an earlier checkpoint
    export, and nothing else; never the folder of the base model.
    """
    folder = Path(folder).expanduser()
    origin = model.config._name_or_path
    if origin and Path(origin).is_dir() and Path(origin).resolve() == folder.resolve():
        raise InputError(
            f"{folder} is the folder of the base model, without which no edit can be undone",
            advice="Choose another folder",
            code="folder_of_base_model",
        )

    def fill(target: Path) -> None:
        with quiet():
            try:
                with cast_weights_to(model, dtype or model.dtype):
                    model.save_pretrained(target)
            except ValueError as problem:
                raise InputError(
                    f"transformers does not save this {type(model).__name__} ({first_line(problem)})",
                    advice="Correct model.config or model.generation_config first",
                    code="invalid_config",
                ) from problem
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
        if memory is not None:
            (target / MEMORY_FOLDER).mkdir()
            fill_folder(memory, target / MEMORY_FOLDER)
        (target / "README.md").write_text(card, encoding="utf-8")

    return replace_folder(folder, fill, kind="checkpoint", overwrite=overwrite)


def choose_dtype(model: PreTrainedModel, count_said: Callable[[], int]) -> torch.dtype:
    """Return the dtype for a checkpoint: that of the model, or 16 bits for a float32 model from a GGUF file.

    `count_said` returns how many facts the model says; a 16-bit dtype must lose none.
    """
    came_from_gguf = Path(model.config._name_or_path or "/").is_relative_to(cache_dir() / "models")
    if not came_from_gguf or model.dtype != torch.float32:
        return model.dtype
    said = count_said()
    for dtype in NARROW_DTYPES:
        with cast_weights_to(model, dtype):
            if count_said() >= said:
                return dtype
    return model.dtype


@contextmanager
def cast_weights_to(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Run a block on the model with its weights in another dtype; afterwards the original tensors are restored.

    Weights in another dtype than that of the model are not cast.
    """
    weights = [weight for weight in model.parameters() if weight.dtype == model.dtype]
    originals, stored_dtype = [weight.data for weight in weights], model.config.dtype
    try:
        for weight in weights:
            weight.data = weight.data.to(dtype)
        yield
    finally:
        for weight, original in zip(weights, originals, strict=True):
            weight.data = original
        model.config.dtype = stored_dtype  # saving a model sets it
