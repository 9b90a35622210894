"""Folders that other programs load: the edited model as a checkpoint, and the edits as a LoRA adapter for peft.

The change that edits make is exactly low-rank, so edits *are* a LoRA adapter with B A = Δ and a scaling of 1. Nothing
is lost but the rounding to float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from rebind.edit.export.change import require_changes, require_matching, storable
from rebind.errors import InputError
from rebind.memory.low_rank import LowRank
from rebind.models.load import quiet
from rebind.models.locate import first_line
from rebind.models.sites import module_at
from rebind.storage import replace_folder


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

    return replace_folder(folder, fill, kind="checkpoint", overwrite=overwrite)


@dataclass(frozen=True)
class AdapterExport:
    """A written adapter, and how closely it holds the change of each site."""

    folder: Path
    ranks: dict[str, int]
    errors: dict[str, float]  # ‖Δ − B A‖ / ‖Δ‖ as stored, including the rounding to float32


def export_peft(
    model: nn.Module,
    changes: Mapping[str, LowRank],
    folder: str | Path,
    *,
    rank: int | None = None,
    base_name: str,
    card: str | None = None,
    overwrite: bool = False,
) -> AdapterExport:
    """Write a LoRA adapter for `peft.PeftModel.from_pretrained(base, folder)`: B A = Δ at each site, scaling 1.

    Args:
        model: the edited model or its base; read only for the kind of its modules.
        changes: the change of each site, from `compute_changes`.
        folder: a new or empty folder, or with `overwrite` that of an earlier adapter.
        rank: keep at most this many directions of each change; None keeps all.
        base_name: the name of the base model for the adapter's config: a Hub id or a path.
        card: the content of README.md, if there should be one.
        overwrite: replace an earlier adapter, and nothing else.
    """
    require_changes(changes)
    if rank is not None and rank < 1:
        raise InputError(f"The rank is {rank}", expected="1 or more, or none to keep the whole change", code="bad_rank")
    require_matching(model, changes)
    ranks: dict[str, int] = {}
    errors: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    for site, change in changes.items():
        if not change.rank:
            continue
        # Factors split by singular values have the smallest entries, so float32 rounds them least.
        cut = change.truncate(change.rank if rank is None else rank)
        B, A = cut.left.float(), cut.right.float()
        dense = change.dense()
        gap = LowRank(B.to(change.left), A.to(change.right)).dense() - dense
        ranks[site] = cut.rank
        errors[site] = float(torch.linalg.vector_norm(gap) / torch.linalg.vector_norm(dense))
        tensors[f"base_model.model.{site}.lora_A.weight"] = storable(A)
        tensors[f"base_model.model.{site}.lora_B.weight"] = storable(B)
    largest = max(ranks.values())
    smaller = {site: rank for site, rank in ranks.items() if rank != largest}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": largest,
        "lora_alpha": largest,  # alpha equals the rank everywhere: peft's scaling alpha / r is exactly 1
        "rank_pattern": smaller,
        "alpha_pattern": smaller,
        "target_modules": list(ranks),  # whole paths: a bare name would match every layer
        "fan_in_fan_out": all(isinstance(module_at(model, site), Conv1D) for site in ranks),
        "bias": "none",
    }

    def fill(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        if card is not None:
            (target / "README.md").write_text(card, encoding="utf-8")

    path = replace_folder(Path(folder).expanduser(), fill, kind="adapter", overwrite=overwrite)
    return AdapterExport(path, ranks, errors)
