"""Export the change of the weights as a LoRA adapter for llama.cpp: one GGUF file.

Tensors have the names of the base model's GGUF tensors with the endings .lora_a and .lora_b. llama.cpp scales each
pair by alpha over the rank of lora_b.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn

from rebind.edit.export.adapter import AdapterExport, fit_factors
from rebind.edit.export.change import cpu_copy, require_new_file
from rebind.edit.export.model_card import LEAK
from rebind.errors import InputError
from rebind.memory.low_rank import LowRank
from rebind.storage import add_to_export, write_file

# The names of architectures in llama.cpp that differ from the model type of transformers.
GGUF_ARCHITECTURES = {
    "bamba": "granitehybrid",
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
    "mistral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}


def export_gguf(
    model: nn.Module,
    changes: Mapping[str, LowRank],
    file: str | Path,
    *,
    rank: int | None = None,
    base_name: str,
    overwrite: bool = False,
) -> AdapterExport:
    """Write a LoRA adapter for llama.cpp's `--lora`; see `export_peft` for the arguments."""
    factors, rank, errors = fit_factors(model, changes, rank)
    file = Path(file).expanduser()
    require_new_file(file, overwrite=overwrite)
    names = gguf_names(model, list(factors))
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "adapter.gguf", gguf_architecture(model))
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
        writer.add_description(f"Facts rewritten in {base_name} by rebind. {LEAK}")
        for site, change in factors.items():
            writer.add_tensor(f"{names[site]}.lora_a", cpu_copy(change.right).numpy())
            writer.add_tensor(f"{names[site]}.lora_b", cpu_copy(change.left).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = (Path(folder) / "adapter.gguf").read_bytes()
    add_to_export(file)
    write_file(file, data)
    return AdapterExport(file.resolve(), rank, errors)


def read_gguf(file: Path, model: nn.Module, sites: list[str]) -> dict[str, LowRank]:
    """Return the changes that a GGUF adapter makes, scaled as llama.cpp does: by alpha over the rank of lora_b."""
    reader = gguf.GGUFReader(file)
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    factors = {}
    for site, name in gguf_names(model, sites).items():
        if f"{name}.lora_b" in tensors:
            A, B = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
            factors[site] = LowRank(alpha / B.shape[-1] * B, A)
    return factors


def gguf_architecture(model: nn.Module) -> str:
    """Return the name of a model's architecture in llama.cpp."""
    config: Any = model.config
    model_type = str(config.get_text_config().model_type)
    name = GGUF_ARCHITECTURES.get(model_type, model_type)
    if name not in gguf.MODEL_ARCH_NAMES.values():
        raise InputError(
            f"No architecture of llama.cpp is known for model type {model_type!r}",
            advice="Export the edits for peft, or as a checkpoint",
            code="no_gguf_architecture",
        )
    return name


def gguf_names(model: nn.Module, sites: list[str]) -> dict[str, str]:
    """Return the name of the weight of each site in a GGUF file of the model, such as blk.3.ffn_down.weight."""
    config: Any = model.config
    architecture = gguf_architecture(model)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    name_map = gguf.get_tensor_name_map(code, config.get_text_config().num_hidden_layers)
    names = {site: name_map.get_name(site.replace("language_model.", "", 1)) for site in sites}
    for site, name in names.items():
        if name is None:
            raise InputError(
                f"The GGUF format has no name for {site}",
                advice="Export the edits for peft, or as a checkpoint",
                code="no_gguf_name",
            )
    return {site: f"{name}.weight" for site, name in names.items()}
