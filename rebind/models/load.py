"""Load a model and its tokenizer from a name, a folder, a file or an object.

Weights come from safetensors or GGUF only: nothing is unpickled, no code of a repository is run, and nothing is
downloaded unless a Hub id was given.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from rebind.errors import InputError
from rebind.models.locate import first_line, locate
from rebind.models.plausible import require_plausible
from rebind.models.weights.placement import full_tensor, prepare_fsdp
from rebind.models.weights.quantized import keep_gradients
from rebind.storage import cache_dir, create_folder, path_inside

OWN_MODEL_TYPES = ("rebind", "rebind-seq2seq")  # in config.json; transformers knows them after importing rebind.nn
GGUF_MAGIC = b"GGUF"
CONVERSION_VERSION = 1  # increase it when the conversion changes, so that GGUF files are converted again


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
        _require_name(spec)
        if device is not None:
            _require_device(device)
        name, path = locate(spec)
        folder = path if path.is_dir() else _convert_gguf(path)
        model = _load_folder(folder, dtype, device_map)
        if device is not None:
            nn.Module.to(model, device)
    prepare_fsdp(model)
    keep_gradients(model)
    _require_finite_weights(model, name)
    model.train(False).requires_grad_(False)
    return model, load_tokenizer(tokenizer, folder), name


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, model_folder: Path | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer, loaded from its folder, or by default from the model's folder, if it is not an object."""
    loaded: Any = tokenizer
    if tokenizer is None or isinstance(tokenizer, (str, Path)):
        folder = model_folder if tokenizer is None else Path(tokenizer).expanduser()
        if folder is None:
            raise InputError(
                "The loaded model came without its tokenizer",
                advice="Pass it with {tokenizer}",
                settings={"tokenizer": None},
                code="no_tokenizer",
            )
        advice = "Use a local folder with tokenizer.json"
        with _loading(folder, "a tokenizer", advice=advice, code="unreadable_tokenizer"):
            loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            loaded("a")  # a forged config may load and then not work
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
    with _loading(folder, "a model", advice=advice, code="unreadable_model"):
        config, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    require_plausible(config, folder)
    if config.get("model_type") in OWN_MODEL_TYPES:  # importing our model classes registers them with transformers
        from rebind.nn import RebindForCausalLM, RebindForSeq2SeqLM  # noqa: F401
    return _load_weights(
        folder, folder, advice=advice, dtype=dtype or "auto", device_map=device_map, use_safetensors=True
    )


def _convert_gguf(file: Path) -> Path:
    """Return a folder in the cache with the model of a GGUF file as safetensors, converted once (half a minute)."""
    folder = path_inside(cache_dir(), f"models/{file.stem}-{content_digest(file)}")
    create_folder(folder, lambda target: _convert(file, target))
    return folder


def content_digest(file: Path) -> str:
    """Return a digest of a GGUF file's bytes (a second per gigabyte); its time changes with every installation."""
    with file.open("rb") as stream:
        head = stream.read(len(GGUF_MAGIC))
        if head != GGUF_MAGIC:
            raise InputError(
                f"{file} is not a GGUF file (it starts with {head!r})",
                advice="Use a .gguf file, or the folder of a Hugging Face model",
                code="not_gguf",
            )
        file_digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(f"{CONVERSION_VERSION} {file_digest}".encode()).hexdigest()[:12]


def _convert(file: Path, folder: Path) -> None:
    advice = "Download the file again, or use a folder in Hugging Face format"
    with _loading(file, "a model", advice=advice, code="unreadable_model"):
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    model: Any = _load_weights(file, file.parent, advice=advice, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain now, and transformers saves no GGUF quantization
    vars(model.config).pop("quantization_config", None)
    tokenizer.clean_up_tokenization_spaces = False  # else decoding drops spaces before punctuation
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _load_weights(source: Path, folder: Path, *, advice: str, **options: Any) -> PreTrainedModel:
    """Return the causal language model of `source`, a folder or a file in it. Nothing is downloaded, no code is run."""
    with _loading(source, "a causal language model", advice=advice, code="unreadable_model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
        )
    model: PreTrainedModel
    model, report = loaded  # because of output_loading_info
    missing = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if missing:  # transformers fills them with random numbers and only mentions it
        problem = f"{source} lacks {len(missing)} of the weights of the model (such as {missing[0]})"
        raise InputError(problem, advice=advice, code="missing_weights")
    return model


@contextlib.contextmanager
def _loading(source: Path, kind: str, *, advice: str, code: str) -> Iterator[None]:
    """Silence transformers while it loads, and turn any exception into an `InputError`."""
    try:
        with quiet():
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # transformers, safetensors, accelerate and gguf each have their own
        if "trust_remote_code" in str(problem):
            raise InputError(
                f"{source} needs its own code to be loaded as {kind}, and rebind runs no code from model folders",
                expected="a model whose code is in transformers",
                advice="Choose another model, or another copy of it without auto_map in its config files",
                code="needs_code",
            ) from None
        problem_text = f"{source} cannot be loaded as {kind} ({first_line(problem)})"
        raise InputError(problem_text, advice=advice, code=code) from problem


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars and the messages of transformers while it loads or saves."""
    logs: Any = transformers_logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    gguf_reader = vars(modeling_gguf_pytorch_utils)
    gguf_bar = gguf_reader.get("tqdm")  # no setting turns it off
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    gguf_reader["tqdm"] = lambda items, *args, **kwargs: items
    try:
        yield
    finally:
        gguf_reader["tqdm"] = gguf_bar
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()


def _require_name(spec: object) -> None:
    if isinstance(spec, (str, Path)):
        return
    is_adapter = hasattr(spec, "merge_and_unload")  # PEFT wraps the model
    raise InputError(
        f"Got a {type(spec).__name__} as the model",
        expected="a causal language model of transformers, a name or a path",
        advice="Merge the adapter first and pass the result of merge_and_unload()" if is_adapter else "",
        code="adapter" if is_adapter else "not_a_model",
    )


def _require_device(device: torch.device | str) -> None:
    """Raise if the device cannot be used, before the model is loaded rather than after."""
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
        is_plain = type(parameter) in (nn.Parameter, DTensor)
        if not is_plain or weights.is_meta or not weights.is_floating_point() or weights.element_size() == 1:
            continue
        # One NaN or infinity makes the sum one; a sum may also overflow on its own, so all weights are checked then.
        if not torch.isfinite(full_tensor(weights.sum())) and not torch.isfinite(full_tensor(weights)).all():
            weights = full_tensor(weights)
            count = int((~torch.isfinite(weights)).sum())
            raise InputError(
                f"{path} of {name} has {count} NaN or infinite weights of {weights.numel()}",
                advice="The model is damaged or was cast to a dtype too small for it; load an intact copy",
                code="weights_not_finite",
            )
