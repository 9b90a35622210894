"""Load a model and its tokenizer from a name, a folder, a file or an object.

Weights come from safetensors or GGUF only: nothing is unpickled, no code of a repository is run, and nothing is
downloaded unless a Hub id was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rebind.errors import InputError
from rebind.models.locate import locate
from rebind.models.transformers_io import first_line, load_weights, loading
from rebind.storage import cache_dir

OWN_MODEL_TYPES = ("rebind", "rebind-seq2seq")  # in config.json; transformers knows them after importing rebind.nn


def load_pretrained(
    spec: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Return a model in eval mode without gradients, its tokenizer and its name; see `LanguageModel.load`."""
    if device is not None and device_map is not None:
        raise InputError("Got both a device and a device_map", expected="one of them", code="device_and_device_map")
    if isinstance(spec, PreTrainedModel):
        if any(option is not None for option in (dtype, device, device_map)):
            raise InputError(
                "Got a dtype, device or device_map with a loaded model",
                advice="Move or cast the model before passing it",
                code="options_of_loaded_model",
            )
        model, name, folder = spec, spec.config._name_or_path or spec.config.model_type, None
    else:
        if device is not None:
            _require_device(device)
        name, folder = locate(spec)
        model = _load_folder(folder, dtype, device_map)
        if device is not None:
            nn.Module.to(model, device)
    _require_finite_weights(model, name)
    model.train(False).requires_grad_(False)
    return model, load_tokenizer(tokenizer, folder), name


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, model_folder: Path | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer itself, or load it from a folder: its own, by default that of the model."""
    loaded: Any = tokenizer
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        folder = model_folder if tokenizer is None else Path(tokenizer).expanduser()
        if folder is None:
            raise InputError("The loaded model came without its tokenizer", code="no_tokenizer")
        advice = "Use a local folder with tokenizer.json"
        with loading(folder, "a tokenizer", advice=advice, code="unreadable_tokenizer"):
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not getattr(loaded, "is_fast", False):
        raise InputError(
            f"{type(loaded).__name__} is a slow tokenizer, which cannot tell where the subject of a prompt is",
            advice="Load a fast one with AutoTokenizer from a folder with tokenizer.json",
            code="slow_tokenizer",
        )
    return loaded


def _load_folder(folder: Path, dtype: torch.dtype | None, device_map: str | dict[str, Any] | None) -> PreTrainedModel:
    if folder.is_relative_to(cache_dir()):
        advice = f"Remove {folder} and try again: it will be converted again"
    else:
        advice = "Check that the folder is complete and that save_pretrained of a causal language model wrote it"
    with loading(folder, "a model", advice=advice, code="unreadable_model"):
        config, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    if config.get("model_type") in OWN_MODEL_TYPES:  # importing our model classes registers them with transformers
        from rebind.nn import RebindForCausalLM, RebindForSeq2SeqLM  # noqa: F401
    return load_weights(
        folder, folder, advice=advice, dtype=dtype or "auto", device_map=device_map, use_safetensors=True
    )


def _require_device(device: torch.device | str) -> None:
    """Raise before minutes of loading rather than after."""
    try:
        torch.empty(0, device=device)
    except Exception as problem:  # an AssertionError where CUDA was not compiled in, a RuntimeError elsewhere
        raise InputError(
            f"Device {str(device)!r} cannot be used ({first_line(problem)})",
            advice="Try {device}",
            settings={"device": "cpu"},
            code="device_unavailable",
        ) from None


def _require_finite_weights(model: nn.Module, name: str) -> None:
    for path, parameter in model.named_parameters():
        weights = parameter.detach()
        if weights.is_meta or not weights.is_floating_point() or weights.element_size() == 1:
            continue
        # One NaN or infinity makes the sum one; a sum may also overflow on its own, hence the second look.
        if not torch.isfinite(weights.sum()) and not torch.isfinite(weights).all():
            count = int((~torch.isfinite(weights)).sum())
            raise InputError(
                f"{path} of {name} has {count} NaN or infinite weights of {weights.numel()}",
                advice="The model is damaged or was cast to a dtype too small for it; load an intact copy",
                code="weights_not_finite",
            )
