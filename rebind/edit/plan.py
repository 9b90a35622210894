"""What an edit would cost, before any of it is done: of a loaded model, or of one that is given by its config alone.

The rates of a GPU are fitted to edits on an H200, of 135 million to 8 billion parameters. `python -m benchmarks.plan`
fits them, and predicts every size from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rebind.edit import DEFAULT_METHOD
from rebind.edit.facts import Conflict, Fact, conflicts
from rebind.edit.guard import EarlierEdit
from rebind.edit.methods import Method, get_method
from rebind.edit.outline import ModelOutline, tokenizer_beside
from rebind.edit.settings import EditSettings, choose_settings
from rebind.edit.targets import ContextSettings, TargetSettings
from rebind.models.prompts import EncodedPrompt, encode_prompts, start_tokens

CPU_RATE = 6e10  # operations per second: a low guess, for an estimate that is right within a small factor
CONTEXT_TOKENS = 10  # before a prompt: contexts and chat templates, on average
TOKEN_CHARACTERS = 4  # of English, where there is no tokenizer
KEPT = 9  # prompts about a subject that are kept, on average
GIB = 2**30
DEVICES = (80, 141)  # GiB of an H100 and of an H200
USABLE = 0.9  # of the memory of a device


@dataclass(frozen=True)
class Rates:
    """What the cost of an edit on a GPU is proportional to."""

    operations: float  # per second
    block_seconds: float  # to launch the kernels of a block, forward and backward
    search_bytes: float  # per token of the search, block and channel: activations for the backward pass


H200 = Rates(operations=1.68e14, block_seconds=1.33e-3, search_bytes=81)


@dataclass(frozen=True)
class Plan:
    """The cost of an edit, and what speaks against it."""

    method: str
    layers: tuple[int, ...]
    lam: float | None  # None: it will be chosen from the keys
    facts: int
    prompt_tokens: int  # of all prompts of all facts, with targets
    moments_cached: bool
    moment_tokens: int
    bytes_on_disk: int  # how much the ledger will grow
    bytes_in_memory: int  # working memory, roughly
    bytes_per_site: int  # the part of it that the device of an edited layer needs for that layer
    seconds: float  # roughly, from the size of the model
    conflicts: tuple[Conflict, ...]  # between the facts themselves
    targets: TargetSettings
    source: str  # where the layers come from
    published_lam: float | None  # λ of published runs on this model
    earlier: tuple[EarlierEdit, ...]  # active edits about the same subjects
    parameters: int = 0
    weight_bytes: int = 0
    devices: dict[int, int] = field(default_factory=dict)  # GiB of a device → how many hold the weights and the work


@dataclass(frozen=True)
class PromptSize:
    """The tokens of a fact's prompt."""

    prompt: int
    after_subject: int
    target: int

    @classmethod
    def of(cls, prompt: EncodedPrompt) -> PromptSize:
        return cls(len(prompt.ids), len(prompt.ids) - prompt.subject_last, len(prompt.target))

    @classmethod
    def guess(cls, fact: Fact) -> PromptSize:
        """Return the sizes of a fact without a tokenizer, from the number of its characters."""
        after = fact.text.partition(fact.subject)[2]
        counts = (len(fact.text), len(after), len(fact.target))
        return cls(*(1 + count // TOKEN_CHARACTERS for count in counts))


def prompts_per_fact(settings: EditSettings, framings: Sequence[str], contexts: ContextSettings) -> int:
    """Return how many prompts of a fact are searched with."""
    return len(framings) + len(contexts.first_words) + (KEPT if settings.targets.keep else 0)


def plan_from_config(
    path: Path,
    facts: Sequence[Fact],
    method: str | Method = DEFAULT_METHOD,
    *,
    layers: Sequence[int] | None = None,
    lam: float | None = None,
    targets: TargetSettings | None = None,
    framings: Sequence[str] = ("start", "plain", "text", "paraphrase"),
    contexts: ContextSettings = ContextSettings(),  # noqa: B008 - frozen
    moment_tokens: int = 100_000,
    dtype: torch.dtype | None = None,
    rates: Rates = H200,
) -> Plan:
    """Return what an edit would cost on GPUs, for a model that is given by its config alone."""
    outline, tokenizer = ModelOutline.from_config(path, dtype), tokenizer_beside(path)
    chosen = choose_settings(
        get_method(method), outline.name, len(outline.sites), facts=len(facts), layers=layers, lam=lam, targets=targets
    )
    if tokenizer is None:
        sizes = [PromptSize.guess(fact) for fact in facts]
    else:
        encoded = encode_prompts([fact.as_prompt() for fact in facts], tokenizer, start_tokens(tokenizer))
        sizes = [PromptSize.of(prompt) for prompt in encoded]
    rows = prompts_per_fact(chosen, framings, contexts)
    return estimate(
        outline,
        sizes,
        chosen,
        rows,
        moment_tokens=moment_tokens,
        moments_cached=False,
        clashes=conflicts(facts),
        rates=rates,
    )


def estimate(
    model: ModelOutline,
    prompts: Sequence[PromptSize],
    settings: EditSettings,
    rows: int,  # prompts per fact
    *,
    moment_tokens: int,
    moments_cached: bool,
    clashes: Sequence[Conflict] = (),
    earlier: Sequence[EarlierEdit] = (),
    rates: Rates = H200,
) -> Plan:
    """Estimate tokens, bytes and seconds from the lengths of the prompts and the size of the model."""
    sites = [model.sites[layer] for layer in settings.layers]
    tokens = rows * sum(one.prompt + one.target + CONTEXT_TOKENS for one in prompts)
    suffix = rows * sum(one.after_subject + one.target for one in prompts)
    keys = rows if settings.method.several_keys else 1
    numbers = keys * sum(2 * site.d_k + site.d_v for site in sites)  # that the ledger stores per fact
    moment = max(site.d_k**2 // site.experts for site in sites)
    if settings.method.dense:
        moment, numbers = model.width**2, (keys + 2) * model.width
    itemsize = model.weight_bytes / max(model.parameters, 1)
    # A moment and its factor in float64; the base weights of a site, and copies of them in float64 while it is solved.
    per_site = 2 * 8 * moment + round(itemsize * sites[0].d_k * sites[0].d_v)
    memory = len(sites) * per_site + 3 * 8 * sites[0].d_k * sites[0].d_v
    memory += round(rates.search_bytes * suffix * len(model.sites) * model.width)
    work = 2 * model.active_parameters * (3 * tokens + 2 * settings.targets.steps * suffix)
    work += 0 if moments_cached else round(2.6 * model.active_parameters * moment_tokens)
    launches = len(model.sites) * settings.targets.steps  # blocks run one after another
    seconds = work / CPU_RATE if model.on_cpu else work / rates.operations + rates.block_seconds * launches
    return Plan(
        method=settings.method.name,
        layers=settings.layers,
        lam=settings.lam,
        facts=len(prompts),
        prompt_tokens=tokens,
        moments_cached=moments_cached,
        moment_tokens=moment_tokens,
        bytes_on_disk=4 * len(prompts) * numbers,
        bytes_in_memory=memory,
        bytes_per_site=per_site,
        seconds=seconds,
        conflicts=tuple(clashes),
        targets=settings.targets,
        source=settings.source,
        published_lam=settings.published_lam,
        earlier=tuple(earlier),
        parameters=model.parameters,
        weight_bytes=model.weight_bytes,
        devices={size: math.ceil((model.weight_bytes + memory) / (USABLE * size * GIB)) for size in DEVICES},
    )
