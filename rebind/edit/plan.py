"""What an edit would cost, before any of it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts import Conflict
from rebind.edit.guard import EarlierEdit
from rebind.edit.moments import Moments
from rebind.edit.settings import EditSettings
from rebind.edit.targets import TargetSettings
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt

CPU_RATE = 6e10  # multiply-adds per second: low guesses, for an estimate that is right within a small factor
GPU_RATE = 5e13
CONTEXT_TOKENS = 10  # before a prompt: contexts and chat templates, on average


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
    seconds: float  # roughly, from the size of the model
    conflicts: tuple[Conflict, ...]  # between the facts themselves
    targets: TargetSettings
    source: str  # where the layers come from
    published_lam: float | None  # λ of published runs on this model
    earlier: tuple[EarlierEdit, ...]  # active edits about the same subjects


def estimate(
    model: LanguageModel,
    prompts: Sequence[EncodedPrompt],
    settings: EditSettings,
    rows: int,  # prompts per fact
    moments: Moments,
    conflicts: Sequence[Conflict],
    earlier: Sequence[EarlierEdit],
) -> Plan:
    """Estimate tokens, bytes and seconds from the lengths of the prompts and the size of the model."""
    sites = [model.sites[layer] for layer in settings.layers]
    dense = settings.method.dense
    moments_cached = all(moments.path(site.block if dense else site.name).exists() for site in sites)
    tokens = rows * sum(len(prompt.ids) + len(prompt.target) + CONTEXT_TOKENS for prompt in prompts)
    suffix = rows * sum(len(prompt.ids) - prompt.subject_last + len(prompt.target) for prompt in prompts)
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    work = 2 * parameters * (3 * tokens + 2 * settings.targets.steps * suffix)
    work += 0 if moments_cached else 2.6 * parameters * moments.tokens
    keys = rows if settings.method.several_keys else 1
    moment, width = max(site.d_k**2 // site.experts for site in sites), sites[0].d_v
    numbers = keys * sum(2 * site.d_k + site.d_v for site in sites)  # that the ledger stores per fact
    if dense:
        moment, numbers = width**2, (keys + 2) * width
    return Plan(
        method=settings.method.name,
        layers=settings.layers,
        lam=settings.lam,
        facts=len(prompts),
        prompt_tokens=tokens,
        moments_cached=moments_cached,
        moment_tokens=moments.tokens,
        bytes_on_disk=4 * len(prompts) * numbers,
        bytes_in_memory=8 * 4 * moment + 4 * suffix * len(model.sites) * width * 12,
        seconds=work / (CPU_RATE if model.device.type == "cpu" else GPU_RATE),
        conflicts=tuple(conflicts),
        targets=settings.targets,
        source=settings.source,
        published_lam=settings.published_lam,
        earlier=tuple(earlier),
    )
