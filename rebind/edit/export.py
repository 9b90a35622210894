"""Out of the editor: an edited checkpoint, the change alone, or a LoRA adapter for peft.

The edits of a site compose to one write, and what a write adds to a memory is exactly low-rank: one row of
the right factor for each fact. So an edit *is* a LoRA adapter, with B A = Δ and a scaling of 1, and nothing
is lost on the way but the rounding to float32.

Everything is written beside its place and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from rebind.edit.edits import Edit
from rebind.edit.sites import memory_of, module_at, write_memory
from rebind.errors import InputError, NumericalError, ShapeError, StorageError
from rebind.files import remove_stale, write_atomically, write_folder_atomically
from rebind.memory.checks import unknown_name
from rebind.memory.low_rank import LowRank
from rebind.memory.precision import solving_dtype
from rebind.memory.write import Write

GainAt: TypeAlias = Callable[[str], Callable[[Edit, Sequence[Edit]], Tensor]]

DELTA_FORMAT, DELTA_FILE = "rebind-delta-1", "delta.safetensors"
NO_EDITS = "write a fact first, or redo an edit that was undone"


# The change


def changes(
    base: Mapping[str, Tensor], edits: Sequence[Edit], edited: Mapping[str, Tensor], *, gain_at: GainAt | None = None
) -> dict[str, LowRank]:
    """What the edits add to each site: one row a fact, at most min(d_v, d_k), in float64.

    Args:
        base: the unedited memory [d_v, d_k] of each site.
        edits: those that are active, in order.
        edited: the memories as they are now. They must be what base and edits make, else nothing is returned.
        gain_at: what `fold` was given as `gain`, for each site, where gains depend on earlier edits.
    """
    sites = dict.fromkeys(site for edit in edits for site in edit.sites)
    if not sites:
        raise InputError(f"got {len(edits)} edits that touch no site, expected at least one that does: {NO_EDITS}")
    found = {}
    for site in sites:
        for what, memories in (("base", base), ("edited", edited)):
            if site not in memories:
                raise unknown_name(f"site of the {what} weights", site, memories)
        full = base[site].detach().to(solving_dtype(base[site]))
        composed = _compose(_writes(site, edits, full, gain_at and gain_at(site)))
        change = composed.delta(full)
        limit = min(full.shape)
        found[site] = change.truncate(limit) if change.rank > limit else change
        _require_same(site, base[site], edited[site], found[site])
    return found


def rounding_errors(
    base: Mapping[str, Tensor], edited: Mapping[str, Tensor], changes: Mapping[str, LowRank]
) -> dict[str, float]:
    """‖(edited − base) − Δ‖ / ‖Δ‖ for each site: how much of a change the weights' dtype rounded away."""
    errors = {}
    for site, change in changes.items():
        dense = change.dense()
        errors[site] = _relative(edited[site].to(dense) - base[site].to(dense), dense)
    return errors


def _writes(
    site: str, edits: Sequence[Edit], like: Tensor, gain: Callable[[Edit, Sequence[Edit]], Tensor] | None
) -> list[Write]:
    """The edits' writes at a site, first to last, as `fold` would apply them."""
    writes, earlier = [], list[Edit]()
    for edit in edits:
        if site not in edit.sites:
            continue
        write = edit.write(site)
        if gain is not None:
            write = replace(write, gain=gain(edit, tuple(earlier)))
        keys, values, gains = (tensor.to(like) for tensor in write.tensors())
        writes.append(Write(keys, values, gains))
        earlier.append(edit)
    return writes


def _compose(writes: list[Write]) -> Write:
    """One write that does them all.

    Neighbours first, then neighbours of those: composition is associative, and so a row is copied log n
    times instead of n.
    """
    while len(writes) > 1:
        pairs = [later @ earlier for earlier, later in zip(writes[::2], writes[1::2], strict=False)]
        writes = pairs if len(writes) % 2 == 0 else [*pairs, writes[-1]]
    return writes[0]


def _require_same(site: str, base: Tensor, edited: Tensor, change: LowRank) -> None:
    """The model holds base + change, cast once. Against the cast: in bf16 its rounding may outweigh the change."""
    full, dense = base.to(change.left), change.dense()
    gap = torch.linalg.vector_norm(edited.to(dense) - (full + dense).to(edited.dtype).to(dense))
    norm = torch.linalg.vector_norm(dense)
    allowed = 1e-3 * norm + 1e3 * torch.finfo(dense.dtype).eps * torch.linalg.vector_norm(full)
    if not gap <= allowed:  # NaN too
        raise NumericalError(
            f"the weights of {site} are {float(gap / norm):.1e} of the change away from base and edits together, "
            f"expected less than 1e-3: something else wrote to the model, so refresh the editor and export again"
        )


def _relative(got: Tensor, expected: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(expected))
    gap = float(torch.linalg.vector_norm(got - expected))
    return gap / norm if norm else gap


def _require_changes(changes: Mapping[str, LowRank]) -> None:
    if not any(change.rank for change in changes.values()):
        raise InputError(f"got no changes to write, expected those of at least one edit: {NO_EDITS}")


def _require_fitting(model: nn.Module, changes: Mapping[str, LowRank]) -> None:
    for site, change in changes.items():
        holds = list(memory_of(module_at(model, site)).shape)
        got = [change.left.shape[-2], change.right.shape[-1]]
        if got != holds:
            raise ShapeError(
                f"the change of {site} is {got}, the model holds {holds} there (as [d_v, d_k]): "
                f"take the model that was edited, or its base"
            )


# A checkpoint


def save_model(model: Any, tokenizer: Any, folder: str | Path, card: str, *, overwrite: bool = False) -> Path:
    """The model as it stands, with its tokenizer and `card` as README.md, in its own format.

    `overwrite` replaces a model that lies there, with everything in its folder; never the one it was loaded from.
    """
    folder = Path(folder).expanduser()
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    if origin and Path(origin).is_dir() and Path(origin).resolve() == folder.resolve():
        raise InputError(
            f"{folder} holds the base model, expected another folder: without its base no edit can be taken back, "
            f"so save beside it"
        )

    def fill(target: Path) -> None:
        with _no_bars():
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

    return _write_folder(folder, fill, "config.json", overwrite)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    logs: Any = transformers_logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logs.enable_progress_bar()


def _write_folder(path: Path, fill: Callable[[Path], None], mark: str, overwrite: bool) -> Path:
    """Fill a folder beside `path`, then put it in its place; until then what is there stays as it is."""
    path = path.resolve()
    _require_free(path, mark, overwrite)
    remove_stale(path.parent, f".{path.name}.*.new", f"..{path.name}.*.new.*.tmp")
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        write_folder_atomically(staged, fill)
        _require_free(path, mark, overwrite)  # saving takes minutes: somebody may have come first
        _swap(staged, path)
    except (OSError, SafetensorError) as problem:
        number = getattr(problem, "errno", None)
        error = StorageError(
            f"cannot write {path} ({os.strerror(number) if number else problem}), expected a folder with room and "
            f"write access: free some space, or choose another folder"
        )
        error.errno = number
        raise error from problem
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return path


def _require_free(path: Path, mark: str, overwrite: bool) -> None:
    """`mark` is the file that shows what lies there to be of the kind that would replace it."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / mark).is_file():
        kind = "holds other things" if path.is_dir() else "is a file"
        raise InputError(f"{path} {kind} and is not replaced, expected a new or empty folder: choose another name")
    if not overwrite:
        raise InputError(f"{path} is not empty, expected a new or empty folder: choose another, or pass overwrite=True")


def _swap(staged: Path, path: Path) -> None:
    if not path.exists():
        staged.rename(path)
        return
    retired = staged.with_suffix(".old")
    path.rename(retired)
    try:
        staged.rename(path)
    except BaseException:
        retired.rename(path)
        raise
    shutil.rmtree(retired, ignore_errors=True)


# The change alone


def save_delta(
    changes: Mapping[str, LowRank],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """The changes as one safetensors file of `{site}/left` and `{site}/right`, in the dtype they have.

    `path` is a file name that ends in .safetensors, or a folder to put delta.safetensors in. A "fingerprint" in
    the metadata names the base model; `load_delta` can ask for it.
    """
    _require_changes(changes)
    told = {**(metadata or {}), "format": DELTA_FORMAT}
    for name, value in told.items():
        if not isinstance(value, str):
            raise InputError(
                f"metadata {name!r} is a {type(value).__name__}, expected a text: safetensors keeps only texts there, "
                f"so convert it, with json.dumps for instance"
            )
    file = _delta_file(path)
    if file.exists() and not overwrite:
        raise InputError(f"{file} is there already, expected a new name: choose another, or pass overwrite=True")
    tensors = {
        f"{site}/{part}": _kept(tensor)
        for site, change in changes.items()
        for part, tensor in (("left", change.left), ("right", change.right))
    }
    write_atomically(file, save(tensors, told))
    return file


def load_delta(path: str | Path, fingerprint: str | None = None) -> dict[str, LowRank]:
    """The changes that `save_delta` wrote; with a fingerprint, only if they were made for that base model."""
    file = _delta_file(path)
    told = delta_metadata(file)
    if fingerprint is not None and told.get("fingerprint", fingerprint) != fingerprint:
        raise InputError(
            f"{file} was made for model {told['fingerprint'][:12]}…, this one is {fingerprint[:12]}…: "
            f"load the model it was made for"
        )
    with _readable(file), safe_open(str(file), framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in tuple(stored.keys())}
    sites = dict.fromkeys(name.rpartition("/")[0] for name in tensors)
    try:
        return {site: LowRank(tensors[f"{site}/left"], tensors[f"{site}/right"]) for site in sites}
    except KeyError as problem:
        raise InputError(
            f"{file} has no tensor {problem}, expected left and right of each site: save it anew"
        ) from None


def delta_metadata(path: str | Path) -> dict[str, str]:
    """What `save_delta` was told about the changes."""
    file = _delta_file(path)
    with _readable(file), safe_open(str(file), framework="pt") as stored:
        told = dict(stored.metadata() or {})
    if told.get("format") != DELTA_FORMAT:
        raise InputError(
            f"{file} has format {told.get('format')!r}, expected {DELTA_FORMAT!r}: pass a file that save_delta wrote"
        )
    return told


def apply_delta(model: nn.Module, delta: Mapping[str, LowRank]) -> None:
    """Add the changes to the model's weights, to all of them or to none; summed in float64, cast once."""
    _require_fitting(model, delta)
    changed = {}
    for site, change in delta.items():
        memory = memory_of(module_at(model, site))
        full = memory.to(solving_dtype(memory))
        changed[site] = (full + LowRank(change.left.to(full), change.right.to(full)).dense()).to(memory.dtype)
        if not torch.isfinite(changed[site]).all():
            raise NumericalError(
                f"the change makes {site} infinite in {memory.dtype}, expected finite weights: "
                f"load the model in a wider dtype"
            )
    for site, memory in changed.items():
        write_memory(module_at(model, site), memory)


def _kept(tensor: Tensor) -> Tensor:
    """As safetensors wants it: on the CPU, in order, sharing storage with nothing."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _delta_file(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / DELTA_FILE


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{file} cannot be read ({problem}), expected a file that save_delta wrote") from problem


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
        folder: a new or empty one; `overwrite` replaces an adapter that lies there.
        rank: keep this many directions of each change at most. None keeps all.
        base_name: what the adapter's config calls the base model: a Hub id or a path.
        card: README.md, where one is wanted.
        overwrite: replace an adapter, with everything in its folder.
    """
    _require_changes(changes)
    if rank is not None and rank < 1:
        raise InputError(f"rank is {rank}, expected 1 or more: leave it out to keep the whole change")
    _require_fitting(model, changes)
    ranks, errors, tensors = {}, {}, {}
    for site, change in changes.items():
        if not change.rank:
            continue
        cut = change.truncate(change.rank if rank is None else rank)  # never of more rows than the matrix can need
        B, A = cut.left.float(), cut.right.float()
        ranks[site] = cut.rank
        errors[site] = _relative(LowRank(B.to(change.left), A.to(change.right)).dense(), change.dense())
        tensors[f"base_model.model.{site}.lora_A.weight"] = _kept(A)
        tensors[f"base_model.model.{site}.lora_B.weight"] = _kept(B)
    config = _adapter_config(ranks, base_name, all(isinstance(module_at(model, site), Conv1D) for site in ranks))

    def fill(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (target / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        if card is not None:
            (target / "README.md").write_text(card, encoding="utf-8")

    return Exported(_write_folder(Path(folder).expanduser(), fill, "adapter_config.json", overwrite), ranks, errors)


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
