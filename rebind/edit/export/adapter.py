"""Export the change of the weights as a LoRA adapter for peft and vLLM.

The change that edits make is low-rank, so edits *are* a LoRA adapter with B A = Δ. All sites of an adapter have the
same rank, because llama.cpp divides one alpha by the rank of each tensor; smaller changes are padded with zeros. Alpha
equals the rank, so the scaling is exactly 1 in every program, and only the rounding to float32 is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from rebind.edit.export.change import cpu_copy, require_changes, require_matching
from rebind.errors import InputError
from rebind.memory.checks import require_number
from rebind.memory.low_rank import LowRank
from rebind.models.experts import is_experts
from rebind.models.sites import module_at
from rebind.storage import replace_folder

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank
VLLM_DEFAULT_RANK = 16
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterExport:
    """A written adapter, and how closely it holds the change of each site."""

    path: Path  # a folder for peft, a file for llama.cpp
    rank: int  # the same for all sites
    errors: dict[str, float]  # ‖Δ − B A‖ / ‖Δ‖ as stored, including the rounding to float32

    @property
    def error(self) -> float:
        """The largest error of a site."""
        return max(self.errors.values())

    @property
    def note(self) -> str:
        """The option that vLLM needs to serve this rank; empty if its defaults are sufficient."""
        served = _vllm_rank(self.rank)
        if served is None:
            return f"vLLM serves ranks up to {VLLM_RANKS[-1]}; export with that rank"
        if served > VLLM_DEFAULT_RANK:
            return f"vLLM needs --max-lora-rank {served}"
        return "" if served == self.rank else "vLLM pads this rank to the next one that it serves"


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
    """Write a LoRA adapter for `peft.PeftModel.from_pretrained(base, folder)`.

    Args:
        model: the edited model or its base; read only for the kind of its modules.
        changes: the change of each site, from `compute_changes`.
        folder: a new or empty folder, or with `overwrite` that of an earlier adapter.
        rank: the rank of every site; by default the smallest rank of vLLM that loses only float32 rounding.
        base_name: the name of the base model for the adapter's config: a Hub id or a path.
        card: the content of README.md, if there should be one.
        overwrite: replace an earlier adapter, and nothing else.
    """
    factors, rank, errors = fit_factors(model, changes, rank)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(factors),  # full paths: a bare name would match every layer
        "fan_in_fan_out": all(isinstance(module_at(model, site), Conv1D) for site in factors),
        "bias": "none",
    }
    tensors = {}
    for site, change in factors.items():
        tensors[f"{PEFT_PREFIX}{site}.lora_A.weight"] = cpu_copy(change.right)
        tensors[f"{PEFT_PREFIX}{site}.lora_B.weight"] = cpu_copy(change.left)

    def fill(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        if card is not None:
            (target / "README.md").write_text(card, encoding="utf-8")

    path = replace_folder(Path(folder).expanduser(), fill, kind="adapter", overwrite=overwrite)
    return AdapterExport(path, rank, errors)


def read_peft(folder: Path) -> dict[str, LowRank]:
    """Return the changes that a peft adapter makes."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    tensors, scale = load_file(folder / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    factors = {}
    for site in config["target_modules"]:
        A, B = (tensors[f"{PEFT_PREFIX}{site}.lora_{part}.weight"] for part in "AB")
        factors[site] = LowRank(scale * B, A)
    return factors


def fit_factors(
    model: nn.Module, changes: Mapping[str, LowRank], rank: int | None
) -> tuple[dict[str, LowRank], int, dict[str, float]]:
    """Return the changes as float32 factors of one rank, the rank, and the error of each site."""
    require_changes(changes)
    if rank is not None:
        widths = [change.right.shape[-1] for change in changes.values()]  # a higher rank would be padding alone
        require_number("rank", rank, least=1, most=max(*VLLM_RANKS, *widths), whole=True, code="bad_rank")
    require_matching(model, changes)
    for site in changes:
        if is_experts(module_at(model, site)):
            raise InputError(
                f"{site} holds many matrices, which a LoRA adapter cannot change one by one",
                advice="Export a checkpoint or a delta file",
                code="no_adapter_for_experts",
            )
    # Factors that share the singular values evenly have the smallest entries, so float32 rounds them least.
    balanced = {site: change.truncate(change.rank) for site, change in changes.items() if change.rank}
    if rank is None:
        smallest = max(_numerical_rank(change) for change in balanced.values())
        rank = _vllm_rank(smallest) or smallest
    factors, errors = {}, {}
    for site, change in balanced.items():
        B, A = change.left[:, :rank].float(), change.right[:rank].float()
        gap = LowRank(B.to(change.left), A.to(change.right)).dense() - change.dense()
        errors[site] = float(torch.linalg.vector_norm(gap) / torch.linalg.vector_norm(change.dense()))
        padding = rank - A.shape[0]
        factors[site] = LowRank(pad(B, (0, padding)), pad(A, (0, 0, 0, padding)))
    return factors, rank, errors


def _numerical_rank(change: LowRank) -> int:
    """Return the number of singular values that float32 can tell from zero, for factors that share them evenly."""
    singular = change.right.square().sum(-1)
    tail = singular.square().flip(0).cumsum(0).flip(0).sqrt()  # norm of the values from each one on
    return max(1, int((tail > torch.finfo(torch.float32).eps * tail[0]).sum()))


def _vllm_rank(rank: int) -> int | None:
    """Return the smallest rank of vLLM that is not below this one, or None."""
    return next((served for served in VLLM_RANKS if served >= rank), None)
