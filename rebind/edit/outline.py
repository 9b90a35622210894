"""The shape of a model: its sites and sizes, from a loaded model or from a config alone, without any weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rebind.errors import InputError
from rebind.models.experts import is_experts
from rebind.models.load import OWN_MODEL_TYPES, quiet
from rebind.models.locate import first_line
from rebind.models.sites import Site, find_sites

CONFIG = "config.json"
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class ModelOutline:
    """What the cost of an edit depends on."""

    name: str
    sites: tuple[Site, ...]  # one per block
    width: int
    vocabulary: int
    parameters: int
    active_parameters: int  # that one token uses: of routed experts, a few
    weight_bytes: int
    on_cpu: bool

    @classmethod
    def of(cls, model: Any, name: str, *, sites: list[Site] | None = None, on_cpu: bool = False) -> ModelOutline:
        """Return the outline of a model, whose weights may be on the meta device."""
        config = model.config.get_text_config()
        sites = find_sites(model) if sites is None else sites
        parameters = {id(one): one for one in model.parameters()}.values()
        total = sum(one.numel() for one in parameters)
        return cls(
            name,
            tuple(sites),
            sites[0].d_v,
            config.vocab_size,
            total,
            total - _idle_parameters(model, config),
            sum(one.numel() * one.element_size() for one in parameters),
            on_cpu,
        )

    @classmethod
    def from_config(cls, path: Path, dtype: torch.dtype | None = None) -> ModelOutline:
        """Return the outline of the model that a config, or a folder with one, describes."""
        folder = path if path.is_dir() else path.parent
        try:
            with quiet():
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                if config.model_type in OWN_MODEL_TYPES:
                    from rebind.nn import RebindForCausalLM  # noqa: F401
                build: Any = AutoModelForCausalLM.from_config  # untyped
                kind = dtype or getattr(config, "dtype", None) or torch.float32
                with torch.device("meta"):
                    model = build(config, dtype=kind, trust_remote_code=False)
        except Exception as problem:  # transformers has an exception for everything
            raise InputError(
                f"{path} does not describe a causal language model ({first_line(problem)})",
                expected=f"the {CONFIG} of a model that transformers knows, or a folder with one",
                code="unreadable_config",
            ) from problem
        return cls.of(model, folder.resolve().name if path.name == CONFIG or path.is_dir() else path.stem)


def is_config_alone(spec: str | Path) -> bool:
    """Return whether a model is given by its config alone: a JSON file, or a folder without weights."""
    path = Path(spec).expanduser()
    if path.is_file():
        return path.suffix == ".json"
    return (path / CONFIG).is_file() and not any(path.glob("*.safetensors")) and not (path / "checkpoints").exists()


def tokenizer_beside(path: Path) -> Any | None:
    """Return the tokenizer in the folder of a config; None if there is none."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "tokenizer.json").exists():
        return None
    with quiet():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _idle_parameters(model: nn.Module, config: Any) -> int:
    """Return the parameters of routed experts that a token does not reach, on average."""
    chosen = next((value for name in EXPERTS_PER_TOKEN if isinstance(value := getattr(config, name, None), int)), None)
    if chosen is None:
        return 0
    idle = 0.0
    for module in model.modules():
        if is_experts(module):
            weights = list(module.parameters(recurse=False))
            count = len(weights[0])
            idle += sum(weight.numel() for weight in weights) * max(0.0, 1 - chosen / count)
    return round(idle)
