"""E[kkᵀ]: what the old keys of a site look like, computed once and kept.

One pass serves all the sites asked for and stops after the last of them. Products run in float32 (float64
for a float64 model), sums in float64. The sums are checkpointed every few seconds, so a killed run goes on
where it was, and the result is cached under a name made of everything that it depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rebind.edit.cache import cache_folder
from rebind.edit.moments.corpus import Corpus
from rebind.errors import InputError
from rebind.files import write_atomically
from rebind.models.trunk import Tokens, Trunk

VERSION = 3  # of this file's arithmetic: a change of it must not meet old files
WINDOW = 64  # tokens: short ones are sampled many at a time
UNSAID = {  # of a config: no key's matter
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Moment:
    """The second moment of one site's keys."""

    total: Tensor  # [d_k, d_k] float64: Σ kkᵀ
    tokens: int

    def mean(self) -> Tensor:
        return self.total / self.tokens

    def merge(self, other: Moment) -> Moment:
        """As if both texts had been read in one pass."""
        return Moment(self.total + other.total, self.tokens + other.tokens)


@dataclass(frozen=True)
class Recipe:
    """Everything a moment depends on besides its site."""

    model: str  # fingerprint
    corpus: Corpus
    tokens: int  # of text to read, ids that begin each window included
    width: int = WINDOW
    tokenizer: str = ""  # `tokenizer_digest`: what text becomes
    config: str = ""  # `config_digest`: what the weights do

    def key(self, site: str) -> str:
        described = {
            "version": VERSION,
            "model": self.model,
            "site": site,
            "corpus": self.corpus.digest,
            "tokens": self.tokens,
            "width": self.width,
            "tokenizer": self.tokenizer,
            "config": self.config,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]

    def path(self, site: str, folder: Path | None = None) -> Path:
        return (folder or cache_folder() / "moments") / f"{self.key(site)}.safetensors"


def tokenizer_digest(tokenizer: Any, start: Sequence[int]) -> str:
    """Changes when the same text would become other ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{list(start)} {described}".encode()).hexdigest()[:32]


def config_digest(config: PreTrainedConfig) -> str:
    """Changes when the same weights would answer otherwise: another eps, other positions."""
    told = {name: value for name, value in config.to_diff_dict().items() if name not in UNSAID}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:32]


def collect(
    trunk: Trunk,
    tokenizer: Any,
    start: Sequence[int],
    sites: Sequence[tuple[str, nn.Module]],
    recipe: Recipe,
    *,
    folder: Path | None = None,
    on_tokens: Callable[[int, int], None] | None = None,
) -> dict[str, Moment]:
    """The moment of each site (name, module), from the cache where it is there.

    `on_tokens(done, wanted)` is told of progress.
    """
    folder = folder or cache_folder() / "moments"
    found = {name: moment for name, _ in sites if (moment := _read(recipe.path(name, folder))) is not None}
    missing = [(name, module) for name, module in sites if name not in found]
    if missing:
        found |= _accumulate(trunk, tokenizer, start, missing, recipe, folder, on_tokens)
    return {name: found[name] for name, _ in sites}


@dataclass
class _Sums:
    """What has been read so far; one whole batch is added at a time, so it can be saved whenever."""

    totals: dict[str, Tensor] = field(default_factory=dict)
    keys: int = 0  # summed
    read: int = 0  # tokens
    batches: int = 0

    def add(self, keys: dict[str, Tensor], read: int) -> None:
        totals = {}
        for name, rows in keys.items():
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
            product = (wide.mT @ wide).double()
            totals[name] = product + self.totals[name].to(product.device) if name in self.totals else product
        count = len(next(iter(keys.values())))
        self.totals, self.keys, self.read, self.batches = totals, self.keys + count, self.read + read, self.batches + 1

    def save(self, path: Path) -> None:
        totals = {name: total.cpu().contiguous() for name, total in self.totals.items()}
        counts = {"keys": self.keys, "read": self.read, "batches": self.batches}
        described = {name: str(count) for name, count in counts.items()}
        write_atomically(path, save(totals, metadata={**described, "digest": _digest(totals, described)}))

    @classmethod
    def load(cls, path: Path, names: Sequence[str]) -> _Sums | None:
        """None when there is no such file, or a damaged one: it is worth less than computing it again."""
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                described = dict(file.metadata() or {})
                totals = {name: file.get_tensor(name) for name in names}
                if described.pop("digest") == _digest(totals, described):
                    return cls(totals, int(described["keys"]), int(described["read"]), int(described["batches"]))
        except (SafetensorError, KeyError, ValueError, OSError):
            pass
        with contextlib.suppress(OSError):  # a read-only cache keeps it; it is passed over all the same
            path.unlink()
        return None


def _accumulate(
    trunk: Trunk,
    tokenizer: Any,
    start: Sequence[int],
    sites: Sequence[tuple[str, nn.Module]],
    recipe: Recipe,
    folder: Path,
    on_tokens: Callable[[int, int], None] | None,
) -> dict[str, Moment]:
    names, modules = [name for name, _ in sites], [module for _, module in sites]
    whole = hashlib.sha256("|".join(recipe.key(name) for name in names).encode()).hexdigest()
    partial = folder / f"{whole[:32]}.partial"
    sums = _Sums.load(partial, names) or _Sums()
    windows = recipe.corpus.windows(trunk.model, tokenizer, start, recipe.width, sums.batches)
    with _checkpointed(sums, partial) as checkpoint:
        while sums.read < recipe.tokens and (ids := next(windows, None)) is not None:
            ids = ids[: -(-(recipe.tokens - sums.read) // ids.shape[-1])]
            everywhere = torch.ones_like(ids)
            seen = trunk.inputs(modules, Tokens(ids, everywhere, everywhere.cumsum(-1) - 1))
            # What begins a window or a text is left out: its key is an outlier, the same each time.
            told = ~torch.isin(ids, torch.tensor(start, dtype=ids.dtype, device=ids.device))
            told[:, : len(start)] = False
            keys = {name: found[told.to(found.device)] for name, found in zip(names, seen, strict=True)}
            sums.add(keys, ids.numel())
            if on_tokens is not None:
                on_tokens(min(sums.read, recipe.tokens), recipe.tokens)
            checkpoint()
    if not sums.keys:
        raise InputError("the corpus gave no tokens, expected some thousands: pass a longer text")
    for name, total in sums.totals.items():
        if not torch.isfinite(total).all():
            partial.unlink(missing_ok=True)
            raise InputError(
                f"keys of {name} hold NaN or infinity, expected finite numbers: check the model's weights, or load it "
                f"in float32 or bfloat16"
            )
    for name, total in sums.totals.items():
        _Sums({"total": total}, sums.keys, sums.read, sums.batches).save(recipe.path(name, folder))
    partial.unlink(missing_ok=True)
    return {name: Moment(total.cpu(), sums.keys) for name, total in sums.totals.items()}


@contextlib.contextmanager
def _checkpointed(sums: _Sums, path: Path) -> Iterator[Callable[[], None]]:
    """Save the sums every few seconds, and when something is raised, Ctrl-C included."""
    saved = time.monotonic()

    def checkpoint() -> None:
        nonlocal saved
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            sums.save(path)
            saved = time.monotonic()

    try:
        yield checkpoint
    except BaseException:
        if sums.batches:
            with contextlib.suppress(OSError):  # what was raised matters more
                sums.save(path)
        raise


def _digest(totals: dict[str, Tensor], described: dict[str, str]) -> str:
    whole = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(totals):
        whole.update(name.encode())
        whole.update(totals[name].numpy().data)
    return whole.hexdigest()


def _read(path: Path) -> Moment | None:
    sums = _Sums.load(path, ["total"])
    return None if sums is None else Moment(sums.totals["total"], sums.keys)
