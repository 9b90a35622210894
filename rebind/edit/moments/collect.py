"""Second moments E[kkᵀ] of old keys, which tell a closed form how the model already uses its memories.

They are computed once per model and text, then read from the cache. The text is a corpus: samples from the model
itself, or documents. One pass over it serves all sites and stops after the last of them. Products run in float32
(float64 for a float64 model), sums in float64. The sums are saved every few seconds, so a killed run resumes where it
stopped. A result is cached under a digest of everything that it depends on.

The keys of a dense memory are hidden states: the name of a block stands for the states after it. A constant 1 is
appended to each state, so that the second moment includes their mean and their number (`OldStates`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rebind.edit.ledger.edit import JSON
from rebind.edit.moments.corpus import Corpus
from rebind.edit.moments.old_keys import OldStates, SecondMoment
from rebind.edit.moments.sums import SAMPLE, SAMPLE_SIZE, TOTAL, PartialSums, Sums, sample_names
from rebind.edit.progress import Progress
from rebind.errors import InputError
from rebind.models.experts import RoutedKeys
from rebind.models.language_model import LanguageModel
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens
from rebind.parallel import from_writer, gather, is_writer, ranks
from rebind.storage import cache_dir, path_inside

VERSION = 3  # of the computation: increase it when results change, so that old files are not used
STALE_SECONDS = 24 * 3600  # partial sums this old, of results that are stored, belong to a process that was killed
WINDOW = 64  # tokens: many short windows can be sampled at once
# These do not change activations.
IGNORED_CONFIG_FIELDS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
IGNORED_CONFIG_FIELDS |= {"bos_token_id", "eos_token_id", "pad_token_id"}


class Moments:
    """Compute and cache the second moments of a model's sites, on the model as it is at that time.

    It reads `tokens` tokens of the corpus, including start tokens, in windows of `width` tokens, and stores results in
    `folder`, by default in the user's cache. Partial sums are saved every `checkpoint_seconds`.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        tokens: int,
        *,
        width: int = WINDOW,
        folder: Path | None = None,
        checkpoint_seconds: float = 5.0,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.corpus, self.tokens = model, corpus, tokens
        self.width = min(width, model.context_length or width)
        self.checkpoint_seconds = checkpoint_seconds
        self.progress = progress or Progress()
        self._folder = folder

    @property
    def source(self) -> dict[str, JSON]:
        """What the moments are computed from, as recorded in an edit."""
        return {"corpus": self.corpus.digest, "tokens": self.tokens}

    @property
    def folder(self) -> Path:
        return self._folder or path_inside(cache_dir(), "moments/sums").parent

    def path(self, site: str) -> Path:
        """Return the file of a site's moment; its name is a digest of everything that the moment depends on."""
        return self.folder / f"{self._key(site)}.safetensors"

    def collect(self, sites: Sequence[str]) -> dict[str, SecondMoment]:
        """Return the moment of each site: from the cache, or computed and then cached."""
        return {site: SecondMoment(sums.totals[TOTAL], sums.keys) for site, sums in self._sums(sites, [TOTAL]).items()}

    def collect_states(self, block: str) -> OldStates:
        """Return the statistics of the states after a block: from the cache, or computed and then cached."""
        totals = self._sums([block], [TOTAL, SAMPLE])[block].totals
        return OldStates.of(totals[TOTAL], totals[SAMPLE])

    def _sums(self, sites: Sequence[str], parts: Sequence[str]) -> dict[str, Sums]:
        loaded = {site: Sums.load(self.path(site), parts) for site in sites}
        cached = {site: sums for site, sums in loaded.items() if sums is not None}
        missing_by_process = gather([site for site in sites if site not in cached], "missing moments")
        missing = [site for site in sites if any(site in names for names in missing_by_process)]
        if not missing:
            PartialSums(self.folder, self._key(""), sites).remove(older_than=STALE_SECONDS)
        results = {**cached, **(self._compute(missing) if missing else {})}
        return {site: results[site] for site in sites}

    def _key(self, site: str) -> str:
        inputs = {
            "version": VERSION,
            "model": self.model.fingerprint,
            "site": site,
            "corpus": self.corpus.digest,
            "tokens": self.tokens,
            "width": self.width,
            "tokenizer": tokenizer_digest(self.model.tokenizer, self.model.start),
            "config": config_digest(self.model.model.config),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]

    def _compute(self, sites: Sequence[str]) -> dict[str, Sums]:
        """Sum over the corpus, of which every process reads a share, and store the result."""
        blocks = self._blocks(sites)
        names = [*sites, *(name for block in blocks for name in sample_names(block))]
        partial = PartialSums(self.folder, self._key(""), names)  # one file for all sites, so that none is left behind
        loaded = partial.load() if is_writer() else Sums()
        finished = set(from_writer(lambda: sorted(loaded.batches), "moments read before"))
        sums = self._read(sites, loaded, finished, partial).over_processes()
        if not sums.keys:
            raise InputError("The corpus has no tokens", expected="some thousands", code="empty_corpus")
        if broken := [site for site, total in sums.totals.items() if not torch.isfinite(total).all()]:
            partial.remove()
            raise InputError(
                f"Keys of {broken[0]} hold NaN or infinity",
                expected="finite numbers",
                advice="Check the weights of the model, or load it in float32 or bfloat16",
                code="keys_not_finite",
            )
        results = {}
        for site in sites:
            totals = {TOTAL: sums.totals[site].cpu()}
            if site in blocks:
                totals[SAMPLE] = sums.totals[sample_names(site)[0]].cpu()
            results[site] = replace(sums, totals=totals)
            if is_writer():
                results[site].save(self.path(site))
        partial.remove()
        gather(None, "moments stored")
        return results

    def _read(self, sites: Sequence[str], sums: Sums, finished: set[int], partial: PartialSums) -> Sums:
        """Add this process's share of the unfinished batches to the sums."""
        process, size = ranks(), self.corpus.rows * self.width
        remaining = (batch for batch in range(-(-self.tokens // size)) if batch not in finished)
        batches, copies = itertools.tee(itertools.islice(remaining, process.rank, None, process.count))
        saved_at, read_before = time.monotonic(), sums.tokens_read
        try:
            for batch, ids in zip(batches, self.corpus.windows(self.model, self.width, copies), strict=False):
                ids = ids[: -(-(self.tokens - batch * size) // ids.shape[-1])]
                sums.add(batch, *self._moments(sites, ids), ids.numel())
                read = read_before + (sums.tokens_read - read_before) * process.count  # an estimate
                self.progress.moments(min(read, self.tokens), self.tokens)
                if time.monotonic() - saved_at > self.checkpoint_seconds:
                    partial.save(sums)
                    saved_at = time.monotonic()
        except BaseException:  # Ctrl-C included
            if sums.batches:
                with contextlib.suppress(OSError):  # the first error matters more
                    partial.save(sums)
            raise
        if process.count > 1 and sums.batches:
            partial.save(sums)  # another process may be killed before the end
        return sums

    def _blocks(self, names: Sequence[str]) -> dict[str, int]:
        """Return the names that are blocks, with their layers."""
        return {site.block: site.layer for site in self.model.sites if site.block in names}

    def _moments(self, sites: Sequence[str], ids: Tensor) -> tuple[dict[str, Tensor], int]:
        """Return Σ kkᵀ of a batch of windows at each site, a sample of each block's states, and the number of keys.

        Start tokens are left out, because their keys are outliers, and so is the state of the first token.
        """
        mask = torch.ones_like(ids)
        tokens, trunk, start = Tokens(ids, mask, mask.cumsum(-1) - 1), self.model.trunk, self.model.start
        is_text = ~torch.isin(ids, torch.tensor(start, dtype=ids.dtype, device=ids.device))
        is_text[:, : len(start)] = False
        blocks = self._blocks(sites)
        inner = [site for site in sites if site not in blocks]
        inputs = trunk.inputs([module_at(self.model.model, site) for site in inner], tokens) if inner else []
        moments = {site: _second_moment(keys, is_text) for site, keys in zip(inner, inputs, strict=True)}
        for block, layer in blocks.items():
            states = trunk.after(layer, tokens)
            states = states[:, 1:][is_text[:, 1:].to(states.device)]
            moments[sample_names(block)[0]] = states[:SAMPLE_SIZE]
            wide = torch.nn.functional.pad(states.to(torch.promote_types(states.dtype, torch.float32)), (0, 1), value=1)
            moments[block] = (wide.mT @ wide).double()
        return moments, int(is_text.sum())


def _second_moment(keys: Tensor | RoutedKeys, is_text: Tensor) -> Tensor:
    if isinstance(keys, RoutedKeys):
        return keys.second_moment(is_text.to(keys.parts.device))
    rows = keys[is_text.to(keys.device)]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide.mT @ wide).double()


def tokenizer_digest(tokenizer: Any, start: Sequence[int]) -> str:
    """Return a digest that changes when the tokens of a text change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{list(start)} {content}".encode()).hexdigest()[:32]


def config_digest(config: PreTrainedConfig) -> str:
    """Return a digest of the config fields that affect activations, such as the epsilon of norms."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in IGNORED_CONFIG_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]
