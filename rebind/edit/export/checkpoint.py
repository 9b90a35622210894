"""The edited model as a checkpoint that transformers loads."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rebind.errors import InputError
from rebind.models.transformers_io import first_line, quiet
from rebind.storage import replace_folder

CHECKPOINT = "checkpoint"  # the kind of export


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    card: str,
    *,
    overwrite: bool = False,
) -> Path:
    """Save the model as it is now, its tokenizer, and `card` as README.md; return the folder.

    `overwrite` replaces an earlier checkpoint export, and nothing else; never the folder of the base model.
    """
    folder = Path(folder).expanduser()
    origin = model.config._name_or_path
    if origin and Path(origin).is_dir() and Path(origin).resolve() == folder.resolve():
        raise InputError(
            f"{folder} holds the base model, without which no edit can be undone",
            advice="Choose another folder",
            code="folder_of_base_model",
        )

    def fill(target: Path) -> None:
        with quiet():
            try:
                model.save_pretrained(target)
            except ValueError as problem:
                raise InputError(
                    f"transformers does not save this {type(model).__name__} ({first_line(problem)})",
                    advice="Correct model.config or model.generation_config first",
                    code="invalid_config",
                ) from problem
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
        (target / "README.md").write_text(card, encoding="utf-8")

    return replace_folder(folder, fill, kind=CHECKPOINT, overwrite=overwrite)
