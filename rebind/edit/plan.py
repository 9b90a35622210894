"""What an edit would take, before any of it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rebind.edit.facts.encoding import Encoded
from rebind.edit.facts.fact import Conflict
from rebind.edit.guard import Earlier
from rebind.edit.methods import Settings
from rebind.edit.targets.optimize import TargetSettings
from rebind.models.sites import Site
from rebind.models.trunk import Trunk

CPU_RATE = 6e10  # multiply-adds a second: modest guesses, for an estimate that is right within a few times
GPU_RATE = 5e13


@dataclass(frozen=True)
class Plan:
    """The cost of an edit, and what speaks against it."""

    method: str
    layers: tuple[int, ...]
    lam: float | None  # None: found from the keys when editing
    facts: int
    prompt_tokens: int  # all prompts of all facts, targets included
    moments_cached: bool
    moment_tokens: int
    bytes_on_disk: int  # what the ledger will grow by
    bytes_in_memory: int  # of working memory, roughly
    seconds: float  # roughly, from the model's size
    conflicts: tuple[Conflict, ...]  # among the facts themselves
    targets: TargetSettings  # how targets will be searched for
    source: str  # where the layers come from
    published_lam: float | None  # λ of published runs on this model
    earlier: tuple[Earlier, ...]  # active edits about the same subjects


def estimate(
    method: str,
    settings: Settings,
    encoded: Sequence[Encoded],
    sites: Sequence[Site],
    trunk: Trunk,
    *,
    contexts: int,
    context_tokens: int,
    moment_tokens: int,
    moments_cached: bool,
    clashes: Sequence[Conflict],
    earlier: Sequence[Earlier],
) -> Plan:
    """Tokens, bytes and seconds, from the facts' lengths and the model's size."""
    prompts = 1 + contexts
    tokens = prompts * sum(len(fact.ids) + len(fact.target) + context_tokens for fact in encoded)
    suffix = prompts * sum(len(fact.ids) - fact.subject_last + len(fact.target) for fact in encoded)
    parameters = sum(parameter.numel() for parameter in trunk.model.parameters())
    work = 2 * parameters * (3 * tokens + 2 * settings.targets.steps * suffix)
    work += 0 if moments_cached else 2.6 * parameters * moment_tokens
    widest, width = max(site.d_k for site in sites), sites[0].d_v
    return Plan(
        method=method,
        layers=settings.layers,
        lam=settings.lam,
        facts=len(encoded),
        prompt_tokens=tokens,
        moments_cached=moments_cached,
        moment_tokens=moment_tokens,
        bytes_on_disk=4 * len(encoded) * sum(2 * site.d_k + site.d_v for site in sites),
        bytes_in_memory=8 * 4 * widest * widest + 4 * suffix * len(trunk.blocks) * width * 12,
        seconds=work / (CPU_RATE if trunk.device.type == "cpu" else GPU_RATE),
        conflicts=tuple(clashes),
        targets=settings.targets,
        source=settings.source,
        published_lam=settings.published_lam,
        earlier=tuple(earlier),
    )
