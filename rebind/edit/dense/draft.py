"""From facts to the rows of an edit: keys at the subjects, one value per subject, a threshold per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rebind.edit.dense.rows import EditRows
from rebind.edit.dense.subjects import SubjectGroup, group_by_subject, kept_together
from rebind.edit.dense.thresholds import (
    choose_thresholds,
    keys_by_owner,
    merge_keys,
    namesake_prompts,
    nearest_strangers,
    overlaps_by_owner,
    own_spread,
)
from rebind.edit.drafts import Draft, DraftTools
from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.ledger.edit import JSON, ROWS, Edit
from rebind.edit.solve import SubjectStates
from rebind.edit.targets.kept import SubjectPrompts, encode_kept, subject_prompts
from rebind.edit.targets.objective import FactPrompts
from rebind.models.prompts import EncodedPrompt


def draft_rows(
    tools: DraftTools, facts: Sequence[Fact], about: Sequence[SubjectPrompts], active: Sequence[Edit]
) -> Draft:
    """Search one value per subject, at every mention of it, and key it in every framing."""
    layer = tools.settings.layers[0]
    tools.phase("contexts")
    groups = group_by_subject(facts, about, active)
    prompts = joined_prompts(tools, groups)
    tools.phase("moments")
    tools.edited.dense.load(layer)
    targets = tools.find_targets(prompts)
    joints = tuple(joint for index, group in enumerate(groups) if (joint := group.joint(index)))
    carrying = [joint.group for joint in joints if joint.carries]
    subject_of = torch.tensor([*range(len(groups)), *carrying])  # the group of each variant
    subjects = SubjectStates(tools.model.trunk, prompts, several_keys=True)
    states, thresholds, owner = _keyed(tools, layer, subjects, subject_of, facts)
    rows = EditRows(
        layer,
        states,
        thresholds,
        owner,
        (targets.states - targets.initial).float(),
        tuple(dict.fromkeys(comparable(fact.subject) for fact in facts)),
        joints,
    )
    settings: dict[str, JSON] = {
        "lam": None,
        ROWS: {"joint": [joint.to_json() for joint in joints], "count": len(owner)},
    }
    return Draft(settings, (), {"targets": targets.states.float().cpu(), **rows.tensors()}, targets)


def joined_prompts(tools: DraftTools, groups: Sequence[SubjectGroup]) -> list[FactPrompts]:
    """Return the prompts of every variant: those of the groups, then those of groups that carry earlier facts."""
    carrying = [group for group in groups if group.carried]
    carried = [fact for group in carrying for fact in group.carried]
    in_chat, keeps = "chat" in tools.framings, tools.settings.targets.keep > 0
    if carried and keeps:
        carried_about = iter(subject_prompts(tools.model, carried, chat=in_chat))
    else:
        carried_about = iter([SubjectPrompts()] * len(carried))
    variants = [(group.facts, group.about) for group in groups]
    variants += [
        ([*group.facts, *group.carried], [*group.about, *(next(carried_about) for _ in group.carried)])
        for group in carrying
    ]
    everything = [pair for facts, about in variants for pair in zip(facts, about, strict=True)]
    framed = iter(tools.encode([fact for fact, _ in everything], [one for _, one in everything], keep=False))
    kept: list[tuple[EncodedPrompt, ...]] = [()] * len(variants)
    if keeps:
        together = [kept_together(facts, about) for facts, about in variants]
        kept = encode_kept(tools.model, [facts[0] for facts, _ in variants], together)
    prompts = []
    for (facts, _), own in zip(variants, kept, strict=True):
        parts = [next(framed) for _ in facts]
        joined = tuple(prompt for part in parts for prompt in part.prompts)
        framings = tuple(name for part in parts for name in part.framings)
        prompts.append(FactPrompts(joined, own, all(part.ends_word for part in parts), framings))
    return prompts


def _keyed(
    tools: DraftTools, layer: int, subjects: SubjectStates, subject_of: Tensor, facts: Sequence[Fact]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states of rows [m, d], their thresholds [m] and the variant of each [m]."""
    dense = tools.edited.dense
    whiten = dense.whitening(layer)
    states = subjects.states_after(layer).float()
    every_key, owner = whiten(states), subjects.owner.to(states.device)
    table = keys_by_owner(owner, len(subject_of))
    overlaps = overlaps_by_owner(every_key, table)
    row = merge_keys(table, overlaps)
    count = int(row.max()) + 1
    merged = states.new_zeros(count, states.shape[-1]).index_add(0, row, states)
    merged = merged / torch.bincount(row, minlength=count).to(states).unsqueeze(-1)
    owner = torch.empty(count, dtype=torch.long, device=states.device).scatter(0, row, owner)
    namesakes = tools.model.encode([prompt for fact in facts for prompt in namesake_prompts(fact)])
    strangers = [whiten(dense.old_states[layer].sample.to(states))]
    if namesakes:
        others = SubjectStates(tools.model.trunk, [FactPrompts((prompt,)) for prompt in namesakes], several_keys=True)
        strangers.append(whiten(others.states_after(layer).float()))
    nearest = nearest_strangers(whiten(merged), subject_of.to(owner.device)[owner], strangers)
    return merged, choose_thresholds(own_spread(overlaps)[owner], nearest), owner
