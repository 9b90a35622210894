"""Models: from a name, a folder, a file or an object to a language model ready to be edited.

Weights come from safetensors or GGUF only: nothing is unpickled, no code from a repository is run, and
nothing is fetched unless a Hub id was asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rebind.errors import InputError
from rebind.models.locate import DEFAULT_MODEL, locate
from rebind.models.tokenizer import load_tokenizer, start_ids
from rebind.models.transformers_io import one_line, quiet, require_complete
from rebind.storage import cache_dir

# By model type. They do not lie below this layer: imported by name, and for such a model only.
OWN = {"rebind": "rebind.nn.lm.model", "rebind-seq2seq": "rebind.nn.seq2seq.model"}


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode without gradients, its tokenizer, and the ids to put before every prompt."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    start: tuple[int, ...]

    @property
    def base_name(self) -> str:
        """What another program can load the model by: a Hub id, or the folder it came from."""
        home = Path(str(getattr(self.model.config, "_name_or_path", "")))
        local = "/" not in self.name and home.is_dir() and str(home) != "."
        return str(home.resolve()) if local else self.name


def load_model(
    spec: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> Loaded:
    """Load a model; `LanguageModel.load` replaces this function."""
    model, loaded_tokenizer, name = load_pretrained(spec, tokenizer, dtype=dtype, device=device, device_map=device_map)
    return Loaded(model, loaded_tokenizer, name, start_ids(loaded_tokenizer))


def load_pretrained(
    spec: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Load a model in eval mode without gradients, its tokenizer, and its name; see `LanguageModel.load`."""
    if device is not None and device_map is not None:
        raise InputError(
            f"got device={str(device)!r} and device_map={device_map!r}, expected one of them: "
            f"device puts the whole model in one place, device_map spreads it"
        )
    if isinstance(spec, PreTrainedModel):
        if any(option is not None for option in (dtype, device, device_map)):
            raise InputError(
                "got dtype, device or device_map with a loaded model, expected them only with a name or path: "
                "move or cast the model yourself before passing it"
            )
        model, name, home = spec, spec.config._name_or_path or spec.config.model_type, None
    else:
        _require_device(device)
        while True:
            name, home = locate(spec)
            try:
                model = _load_folder(home, name, dtype, device, device_map)
                return _ready(model, name), load_tokenizer(tokenizer, home, name), name
            except (InputError, OSError):
                if home.exists():
                    raise
                # a training that goes on beside us has removed its checkpoint: there is a newer one
    return _ready(model, name), load_tokenizer(tokenizer, home, name), name


def _ready(model: PreTrainedModel, name: str) -> PreTrainedModel:
    _require_finite_weights(model, name)
    model.train(False).requires_grad_(False)
    return model


def _load_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    device_map: str | dict[str, Any] | None,
) -> PreTrainedModel:
    if cached := folder.is_relative_to(cache_dir()):
        step = f"remove {folder} and try again: it will be made anew"
    else:
        step = "check that the folder is complete and that save_pretrained of a causal language model wrote it"
    try:
        with quiet():
            _register_own(folder)
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if config.is_encoder_decoder:
                raise InputError(
                    f"{name} is an encoder-decoder ({config.model_type}), expected a causal (decoder-only) language "
                    f"model: choose one such as {DEFAULT_MODEL!r}"
                )
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                device_map=device_map,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # transformers, safetensors and accelerate each have their own
        kind = "converted model" if cached else "folder"
        raise InputError(
            f"the {kind} {folder} cannot be loaded as a causal language model ({one_line(problem)}): {step}"
        ) from problem
    model: PreTrainedModel
    model, report = loaded  # because of output_loading_info
    require_complete(report, folder, step)
    return model if device is None else nn.Module.to(model, device)


def _register_own(folder: Path) -> None:
    """Tell transformers of a model of ours: importing its class does."""
    told, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    if (kind := told.get("model_type")) in OWN:
        import_module(OWN[kind])


def _require_device(device: torch.device | str | None) -> None:
    """Ask before minutes of loading, not after."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except Exception as problem:  # an AssertionError where CUDA was not compiled in, a RuntimeError elsewhere
        raise InputError(
            f"device {str(device)!r} cannot be used ({one_line(problem)}), expected one this machine has: try 'cpu'"
        ) from None


def _require_finite_weights(model: nn.Module, name: str) -> None:
    for path, parameter in model.named_parameters():
        weights = parameter.detach()
        if weights.is_meta or not weights.is_floating_point() or weights.element_size() == 1:
            continue
        # One NaN or infinity makes the sum one; a sum may also overflow on its own, hence the second look.
        if not torch.isfinite(weights.sum()) and not torch.isfinite(weights).all():
            bad = int((~torch.isfinite(weights)).sum())
            raise InputError(
                f"{path} of {name} holds {bad} NaN or infinite weight{'s' if bad > 1 else ''} of {weights.numel()}, "
                f"expected finite numbers: the model is damaged (or was cast to a dtype too small for it), "
                f"so load an intact copy"
            )
