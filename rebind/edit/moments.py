"""Second moments E[kkᵀ] of old keys, which tell a closed form what the model already uses its memories for.

They are computed once per model and text, then read from the cache. The text is a corpus: samples from the model
itself, or documents. One pass over it serves all sites and stops after the last of them. Products run in float32
(float64 for a float64 model), sums in float64. The sums are saved every few seconds, so a killed run resumes where it
stopped. A result is cached under a digest of everything that it depends on.

A dense memory is keyed by hidden states instead: the name of a block stands for the states behind it. A constant 1 is
appended to each state, so that the second moment also holds their mean and their number (`OldStates`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from rebind.edit.ledger.edit import JSON
from rebind.edit.progress import Progress
from rebind.errors import InputError
from rebind.memory.closed_form import NullSpace
from rebind.memory.solve import Cholesky, factor
from rebind.models.experts import RoutedKeys
from rebind.models.language_model import LanguageModel
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens
from rebind.storage import cache_dir, open_tensors, path_inside, seal_tensors, write_file

VERSION = 3  # of the computation: increase it when results change, so that old files are not used
WINDOW = 64  # tokens: many short windows can be sampled at once
# These do not change activations.
IGNORED_CONFIG_FIELDS = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
IGNORED_CONFIG_FIELDS |= {"bos_token_id", "eos_token_id", "pad_token_id"}
EXPERT_PRIOR = 0.01  # of the mean use of a direction
NULL_SPACE_SHARE = 0.9  # of all directions, those that old keys use least
PRONOUNS = ("It", "He", "She", "They", "We", "I", "You", "This", "That", "There")
FIRST_WORDS = ("The", "A", "In", *PRONOUNS, "When", "What", "How")  # a text may begin with them
STATES_KEPT = 2048  # of the states behind a block, as a sample of ordinary text


class Corpus(Protocol):
    """Windows of token ids: the same ones in the same order every time."""

    @property
    def digest(self) -> str:
        """A name that changes when the text changes."""

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        """Yield batches of ids [rows, width], each row beginning with the start tokens, from batch `skip` on."""


@dataclass(frozen=True)
class OwnSamples:
    """Text that the model writes by itself: needs no data, and has the model's own distribution of keys."""

    seed: int = 0
    rows: int = 64  # sampled side by side

    @property
    def digest(self) -> str:
        return f"own-samples-{self.seed}-{self.rows}"

    @classmethod
    def from_digest(cls, digest: str) -> OwnSamples | None:
        """Return the samples with this digest; None if it belongs to another kind of corpus.

        >>> OwnSamples.from_digest("own-samples-0-1024")
        OwnSamples(seed=0, rows=1024)
        """
        match = re.fullmatch(r"own-samples-(-?\d+)-(\d+)", digest)
        return None if match is None else cls(seed=int(match[1]), rows=int(match[2]))

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        first_tokens = _first_tokens(model)
        start = torch.tensor(model.start, dtype=torch.long, device=model.device).expand(self.rows, -1)
        for batch in itertools.count(skip):
            seed = self.seed * 1_000_003 + batch
            chosen = torch.randint(len(first_tokens), (self.rows,), generator=torch.Generator().manual_seed(seed))
            first = first_tokens[chosen].unsqueeze(-1).to(model.device)
            yield torch.cat([start, model.sample(first, width - len(model.start), seed=seed)], dim=-1)


def _first_tokens(model: LanguageModel) -> Tensor:
    rows = [model.tokenizer(word, add_special_tokens=False).input_ids for word in FIRST_WORDS]
    vocabulary = model.model.get_input_embeddings().weight.shape[0]
    return torch.tensor(sorted({row[0] for row in rows if row and row[0] < vocabulary}) or [0])


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(
            f"{path} cannot be read ({problem})", expected="a plain text file in UTF-8", code="unreadable_corpus"
        ) from None


@dataclass(frozen=True)
class Texts:
    """Documents, packed one after another into windows."""

    documents: Sequence[str]
    name: str
    rows: int = 8

    @classmethod
    def from_file(cls, path: str | Path) -> Texts:
        """Read a text file; blank lines separate its documents."""
        return cls._of(read_text(path).split("\n\n"), Path(path).name)

    @classmethod
    def from_dataset(
        cls, dataset: Iterable[Mapping[str, str]], column: str = "text", *, name: str = "dataset"
    ) -> Texts:
        """Read one column of a Hugging Face dataset, or of any rows; each row is a document."""
        return cls._of([row[column] for row in dataset], name)

    @classmethod
    def _of(cls, parts: Iterable[str], name: str) -> Texts:
        documents = [document for part in parts if (document := part.strip())]
        if not documents:
            raise InputError(f"Corpus {name} holds no text", expected="some thousands of words", code="empty_corpus")
        return cls(documents, name)

    @property
    def digest(self) -> str:
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(document.encode())
            whole.update(b"\0")
        return f"text-{whole.hexdigest()[:32]}-{self.rows}"

    def windows(self, model: LanguageModel, width: int, skip: int) -> Iterator[Tensor]:
        rows = self._rows(model, width)
        batches = iter(lambda: list(itertools.islice(rows, self.rows)), [])
        for batch in itertools.islice(batches, skip, None):
            yield torch.tensor(batch, device=model.device)

    def _rows(self, model: LanguageModel, width: int) -> Iterator[list[int]]:
        start, body = model.start, width - len(model.start)
        pending: list[int] = []
        is_short = True  # all documents together fill no window
        for document in self.documents:
            pending += [*start, *model.tokenizer(document, add_special_tokens=False).input_ids]
            while len(pending) >= body:
                yield [*start, *pending[:body]]
                pending, is_short = pending[body:], False
        if is_short and len(pending) > len(start):
            yield [*start, *pending]


@dataclass(frozen=True, eq=False)
class SecondMoment:
    """The second moment of one site's keys."""

    total: Tensor  # [d_k, d_k] float64: Σ kkᵀ; [E, inner, inner] for routed experts, whose keys are E·inner wide
    tokens: int

    def mean(self) -> Tensor:
        return self.total / self.tokens


@dataclass(frozen=True, eq=False)
class OldStates:
    """The hidden states behind a block on ordinary text."""

    mean: Tensor  # [d] float64
    covariance: Tensor  # [d, d] float64
    sample: Tensor  # [s, d]: some of the states

    @classmethod
    def of(cls, total: Tensor, sample: Tensor) -> OldStates:
        """Return the statistics in Σ [h, 1] [h, 1]ᵀ, [d + 1, d + 1] float64."""
        mean = total[:-1, -1] / total[-1, -1]
        return cls(mean, total[:-1, :-1] / total[-1, -1] - torch.outer(mean, mean), sample)


@dataclass(eq=False)
class OldKeys:
    """What the closed forms need to know about a site's old keys. Factors are computed on first use and kept."""

    moment: Tensor  # E[kkᵀ] as in `SecondMoment`, float64

    @cached_property
    def factored(self) -> Cholesky | BlockFactor:
        return factor(self.moment, "moment") if self.moment.ndim == 2 else BlockFactor.of(self.moment)

    @cached_property
    def null_space(self) -> NullSpace:
        return NullSpace.smallest(self.moment, NULL_SPACE_SHARE)

    @cached_property
    def block_projectors(self) -> Tensor:
        """The projector on the null space of every block, [E, inner, inner]."""
        bases = [NullSpace.smallest(block, NULL_SPACE_SHARE).basis for block in self.moment]
        return torch.stack([basis @ basis.mT for basis in bases])


@dataclass(frozen=True, eq=False)
class BlockFactor:
    """A factor of a second moment with one block per expert.

    Keys are whitened block by block, K L⁻ᵀ. For whitened keys the moment is the identity, and the gain of the keys is
    that of the whitened ones times L⁻¹.
    """

    lower: Tensor  # [E, inner, inner]

    @classmethod
    def of(cls, moment: Tensor) -> BlockFactor:
        """Factor a moment [E, inner, inner]. Experts that few tokens reached are taken to use all directions a bit."""
        mean = moment.diagonal(dim1=-2, dim2=-1).mean()
        eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
        return cls(factor(moment + EXPERT_PRIOR * mean * eye, "moment").lower)

    def whiten(self, keys: Tensor) -> Tensor:
        """Return L⁻¹Kᵀ [d_k, n] of keys [n, d_k]."""
        blocks = keys.to(self.lower.dtype).unflatten(-1, (len(self.lower), -1)).permute(1, 2, 0)
        return torch.linalg.solve_triangular(self.lower, blocks, upper=False).flatten(0, 1)

    def unwhiten(self, columns: Tensor) -> Tensor:
        """Return L⁻ᵀ columns."""
        blocks = columns.unflatten(0, (len(self.lower), -1))
        return torch.linalg.solve_triangular(self.lower.mT, blocks, upper=True).flatten(0, 1)


class Moments:
    """Provides the second moments of a model's sites, as the model stands when they are computed.

    It reads `tokens` tokens of the corpus, start tokens included, in windows of `width` tokens, and stores results in
    `folder`, by default in the user's cache. While it reads, it saves its sums every `checkpoint_seconds`.
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
        """What the moments are computed from, as an edit records it."""
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
        """Return the statistics of the states behind a block: from the cache, or computed and then cached."""
        totals = self._sums([block], [TOTAL, SAMPLE])[block].totals
        return OldStates.of(totals[TOTAL], totals[SAMPLE])

    def _sums(self, sites: Sequence[str], parts: Sequence[str]) -> dict[str, _Sums]:
        stored = {site: _Sums.load(self.path(site), parts) for site in sites}
        missing = [site for site, sums in stored.items() if sums is None]
        computed = self._compute(missing) if missing else {}
        return {site: sums or computed[site] for site, sums in stored.items()}

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

    def _compute(self, sites: Sequence[str]) -> dict[str, _Sums]:
        partial = self.folder / f"{self._key('')}.partial"  # one for all sites, so that none is left for ever
        blocks = self._blocks(sites)
        sums = _Sums.load(partial, [*sites, *map(_sample_of, blocks)]) or _Sums({})
        windows = self.corpus.windows(self.model, self.width, sums.batches)
        saved = time.monotonic()
        try:
            while sums.read < self.tokens and (ids := next(windows, None)) is not None:
                ids = ids[: -(-(self.tokens - sums.read) // ids.shape[-1])]
                sums.add(*self._moments(sites, ids), ids.numel())
                self.progress.moments(min(sums.read, self.tokens), self.tokens)
                if time.monotonic() - saved > self.checkpoint_seconds:
                    sums.save(partial)
                    saved = time.monotonic()
        except BaseException:  # Ctrl-C included
            if sums.batches:
                with contextlib.suppress(OSError):  # the first error matters more
                    sums.save(partial)
            raise
        if not sums.keys:
            raise InputError("The corpus holds no tokens", expected="some thousands", code="empty_corpus")
        if broken := [site for site, total in sums.totals.items() if not torch.isfinite(total).all()]:
            partial.unlink(missing_ok=True)
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
                totals[SAMPLE] = sums.totals[_sample_of(site)].cpu()
            results[site] = _Sums(totals, sums.keys, sums.read, sums.batches)
            results[site].save(self.path(site))
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return results

    def _blocks(self, names: Sequence[str]) -> dict[str, int]:
        """Return those of the names that are blocks, with their layers."""
        return {site.block: site.layer for site in self.model.sites if site.block in names}

    def _moments(self, sites: Sequence[str], ids: Tensor) -> tuple[dict[str, Tensor], int]:
        """Return Σ kkᵀ of a batch of windows at each site, some states of each block, and the number of keys.

        Start tokens are left out: their keys are outliers. So is the state of any other first token.
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
            moments[_sample_of(block)] = states[:STATES_KEPT]
            wide = torch.nn.functional.pad(states.to(torch.promote_types(states.dtype, torch.float32)), (0, 1), value=1)
            moments[block] = (wide.mT @ wide).double()
        return moments, int(is_text.sum())


TOTAL, SAMPLE = "total", "sample"  # the tensors in a file of results


def _sample_of(block: str) -> str:
    return f"{block}/{SAMPLE}"


def _second_moment(keys: Tensor | RoutedKeys, is_text: Tensor) -> Tensor:
    if isinstance(keys, RoutedKeys):
        return keys.second_moment(is_text.to(keys.parts.device))
    rows = keys[is_text.to(keys.device)]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    return (wide.mT @ wide).double()


def tokenizer_digest(tokenizer: Any, start: Sequence[int]) -> str:
    """Return a digest that changes when the same text becomes other tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{list(start)} {content}".encode()).hexdigest()[:32]


def config_digest(config: PreTrainedConfig) -> str:
    """Return a digest that changes when the same weights compute something else, as with another epsilon."""
    fields = {name: value for name, value in config.to_diff_dict().items() if name not in IGNORED_CONFIG_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass
class _Sums:
    """The sums so far. Whole batches are added, so they can be saved at any time."""

    totals: dict[str, Tensor]
    keys: int = 0
    read: int = 0  # tokens, start tokens included
    batches: int = 0

    def add(self, moments: dict[str, Tensor], keys: int, read: int) -> None:
        totals = {}
        for name, moment in moments.items():
            total = self.totals.get(name)
            if total is not None and name.endswith(SAMPLE):
                moment = torch.cat([total.to(moment.device), moment])[:STATES_KEPT]
            elif total is not None:
                moment = moment + total.to(moment.device)
            totals[name] = moment
        self.totals, self.keys, self.read, self.batches = totals, self.keys + keys, self.read + read, self.batches + 1

    def save(self, path: Path) -> None:
        totals = {name: total.cpu().contiguous() for name, total in self.totals.items()}
        counts = {"keys": str(self.keys), "read": str(self.read), "batches": str(self.batches), "name": path.name}
        write_file(path, seal_tensors(save(totals, metadata=counts)))

    @classmethod
    def load(cls, path: Path, names: Sequence[str]) -> _Sums | None:
        """Return the sums in a file; None if there is none, or a damaged one, which will be replaced."""
        try:
            with open_tensors(path) as (file, metadata):
                if metadata.pop("name", "") != path.name:
                    return None  # of another site
                counts = {name: int(count) for name, count in metadata.items()}
                return cls({name: file.get_tensor(name) for name in names}, **counts)
        except (SafetensorError, TypeError, ValueError, OSError):
            return None
