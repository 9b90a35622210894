"""Out of the editor, for other programs: an edited checkpoint, or a LoRA adapter for peft.

What an edit changes is exactly low-rank (see `low_rank_change`). So an edit *is* a LoRA adapter, with B A = Δ
and a scaling of 1, and nothing is lost on the way but the rounding to float32. `delta` has the change
alone.

Everything is written beside its place and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn
from transformers.pytorch_utils import Conv1D

from rebind.edit.export.delta import storable
from rebind.edit.export.folders import write_folder
from rebind.edit.export.low_rank_change import relative_error, require_changes, require_fitting
from rebind.errors import InputError
from rebind.memory.low_rank import LowRank
from rebind.models.sites import module_at
from rebind.models.transformers_io import no_bars

# A checkpoint


def save_model(model: Any, tokenizer: Any, folder: str | Path, card: str, *, overwrite: bool = False) -> Path:
    """The model as it stands, with its tokenizer and `card` as README.md, in its own format.

    `overwrite` replaces what an earlier export wrote there, and nothing else; never the model it was loaded from.
    """
    folder = Path(folder).expanduser()
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    if origin and Path(origin).is_dir() and Path(origin).resolve() == folder.resolve():
        raise InputError(
            f"{folder} holds the base model, expected another folder: without its base no edit can be taken back, "
            f"so save beside it"
        )

    def fill(target: Path) -> None:
        with no_bars():
            try:
                model.save_pretrained(target)
            except ValueError as problem:  # an invalid generation config, say
                said = " ".join(str(problem).split())
                raise InputError(
                    f"transformers will not save this {type(model).__name__} ({said[:200]}), expected configs that it "
                    f"finds valid: correct model.config or model.generation_config first"
                ) from problem
            if tokenizer is not None:
                tokenizer.save_pretrained(target)
        (target / "README.md").write_text(card, encoding="utf-8")

    return write_folder(folder, fill, "config.json", overwrite)


# An adapter


@dataclass(frozen=True)
class Exported:
    """An adapter, and what became of each site's change in it."""

    folder: Path
    ranks: dict[str, int]
    errors: dict[str, float]  # ‖Δ − B A‖ / ‖Δ‖, as stored: rounding to float32 included


def export_peft(
    model: nn.Module,
    changes: Mapping[str, LowRank],
    folder: str | Path,
    *,
    rank: int | None = None,
    base_name: str,
    card: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """A LoRA adapter for `peft.PeftModel.from_pretrained(base, folder)`: B A = Δ at each site, scaling 1.

    The factors are split by singular values: their entries are then as small as they can be, and rounding them to
    float32 costs no more than rounding Δ would. Where sites differ in rank, `rank_pattern` and `alpha_pattern` say
    so. Only a loader that ignores both *and* divides by each tensor's own rank needs one rank everywhere.

    Args:
        model: the edited model or its base; only looked at, for the kind of its modules.
        changes: from `changes`.
        folder: a new or empty one, or with `overwrite` that of an earlier export.
        rank: keep this many directions of each change at most. None keeps all.
        base_name: what the adapter's config calls the base model: a Hub id or a path.
        card: README.md, where one is wanted.
        overwrite: replace what an earlier export wrote there, and nothing else.
    """
    require_changes(changes)
    if rank is not None and rank < 1:
        raise InputError(f"rank is {rank}, expected 1 or more: leave it out to keep the whole change")
    require_fitting(model, changes)
    ranks, errors, tensors = {}, {}, {}
    for site, change in changes.items():
        if not change.rank:
            continue
        cut = change.truncate(change.rank if rank is None else rank)  # never of more rows than the matrix can need
        B, A = cut.left.float(), cut.right.float()
        ranks[site] = cut.rank
        errors[site] = relative_error(LowRank(B.to(change.left), A.to(change.right)).dense(), change.dense())
        tensors[f"base_model.model.{site}.lora_A.weight"] = storable(A)
        tensors[f"base_model.model.{site}.lora_B.weight"] = storable(B)
    config = _adapter_config(ranks, base_name, all(isinstance(module_at(model, site), Conv1D) for site in ranks))

    def fill(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        if card is not None:
            (target / "README.md").write_text(card, encoding="utf-8")

    return Exported(write_folder(Path(folder).expanduser(), fill, "adapter_config.json", overwrite), ranks, errors)


def _adapter_config(ranks: Mapping[str, int], base_name: str, transposed: bool) -> dict[str, Any]:
    """adapter_config.json. Alpha is the rank everywhere, so that peft's scaling alpha / r is exactly 1."""
    most = max(ranks.values())
    lower = {site: rank for site, rank in ranks.items() if rank != most}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "auto_mapping": None,
        "inference_mode": True,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": lower,
        "alpha_pattern": lower,
        "lora_dropout": 0.0,
        "target_modules": list(ranks),  # whole paths: a bare name would match every layer
        "fan_in_fan_out": transposed,
        "bias": "none",
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
