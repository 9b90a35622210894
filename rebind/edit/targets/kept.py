"""Prompts to keep: what the base model knows about a subject besides the fact that changes.

The kind of the subject is read off the model, the prompts come from a catalog of relations of that kind
(`rebind.edit.facts.relations`) and from the user (`Fact.keep`). A prompt that the base model answers with the old or
the new target is the changed relation in other words, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.relations import HELD_OUT, KIND_WORDS, RELATIONS
from rebind.edit.targets.framings import mark_subject, without_sink
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt

AT_ONCE = 512  # prompts whose next tokens are read together
RIVALS = 50  # a kept prompt must not have the old or the new target among this many first choices


@dataclass(frozen=True)
class SubjectPrompts:
    """Prompts about the subject of a fact that do not ask for the fact itself."""

    kind: str
    kept: tuple[str, ...]  # searched with
    held_out: tuple[str, ...]  # only asked afterwards


def subject_prompts(model: LanguageModel, facts: Sequence[Fact]) -> list[SubjectPrompts]:
    """Return what else to ask about each subject. The model must be the base model: it decides what applies."""
    kinds = subject_kinds(model, [fact.subject for fact in facts])
    listed = [
        [relation.format(fact.subject) for relation in RELATIONS[kind]] for fact, kind in zip(facts, kinds, strict=True)
    ]
    texts = [text for fact, own in zip(facts, listed, strict=True) for text in (fact.text, *own)]
    best = iter(first_choices(model, texts, RIVALS))
    new, old = (
        model.encode([fact.as_prompt(one) for fact, one in zip(facts, targets, strict=True)])
        for targets in ([fact.target for fact in facts], [fact.old or fact.target for fact in facts])
    )
    prompts = []
    for fact, kind, own, *targets in zip(facts, kinds, listed, new, old, strict=True):
        first = next(best)[0]
        avoid = {prompt.target[0] for prompt in targets} | (set() if fact.old else {first})
        choices = [(index, text) for index, text in enumerate(own) if not avoid & set(next(best))]
        held_out = [text for index, text in choices if index % HELD_OUT == HELD_OUT - 1]
        kept = [text for index, text in choices if index % HELD_OUT != HELD_OUT - 1]
        prompts.append(SubjectPrompts(kind, (*fact.keep, *kept), tuple(held_out)))
    return prompts


def encode_kept(
    model: LanguageModel, facts: Sequence[Fact], about: Sequence[SubjectPrompts]
) -> list[tuple[EncodedPrompt, ...]]:
    """Encode the prompts to keep, with the subject marked; those without a usable mention of it are left out."""
    marked = [
        [replace(prompt, target="") for text in one.kept if (prompt := mark_subject(text, fact)) is not None]
        for fact, one in zip(facts, about, strict=True)
    ]
    encoded = iter(model.encode([prompt for prompts in marked for prompt in prompts]))
    usable = [[without_sink(next(encoded)) for _ in prompts] for prompts in marked]
    return [tuple(prompt for prompt in prompts if prompt is not None) for prompts in usable]


def subject_kinds(model: LanguageModel, subjects: Sequence[str]) -> list[str]:
    """Return the kind of each subject, by what the model expects after "{subject} is a"."""
    words = {
        kind: torch.tensor([model.encode([Prompt("It is a", word)])[0].target[0] for word in listed])
        for kind, listed in KIND_WORDS.items()
    }
    kinds = []
    for begin in range(0, len(subjects), AT_ONCE):
        prompts = [f"{subject} is a" for subject in subjects[begin : begin + AT_ONCE]]
        probabilities = model.next_token_log_probs(prompts, truncate=True).exp().cpu()
        scores = {kind: probabilities[:, ids.unique()].sum(-1) for kind, ids in words.items()}
        kinds += [max(scores, key=lambda kind: float(scores[kind][row])) for row in range(len(prompts))]
    return kinds


def first_choices(model: LanguageModel, texts: Sequence[str], count: int) -> list[list[int]]:
    """Return the most likely next tokens after each text, the best first."""
    choices: list[Tensor] = []
    for begin in range(0, len(texts), AT_ONCE):
        log_probs = model.next_token_log_probs(texts[begin : begin + AT_ONCE], truncate=True)
        choices.append(log_probs.topk(count, dim=-1).indices)
    return torch.cat(choices).tolist() if choices else []
