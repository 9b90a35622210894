"""Consolidation: facts move from the dense memory into the weights, as far as they fit.

The facts are searched again for the weights, batch by batch and all facts about one subject together, and written by
the recursive ridge rule: sequential writes with an accumulating moment equal one write of all of them (docs/algebra.md,
law 5), so the result is stored as one edit. After every batch the model is asked without the rows of these facts. What
the dense memory said and the weights do not say stays in the dense memory, and so does what neither says. A batch to
which the guard objects, or for which others in the dense memory would be lost, is tried again in halves, down to single
subjects. Facts that come after the last batch that was tried are not searched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

import torch

from rebind.edit.dense.draft import joined_prompts
from rebind.edit.dense.subjects import SubjectGroup, groups_in_memory
from rebind.edit.drafts import DraftTools, draft_of_prompts
from rebind.edit.facts.fact import Fact, comparable
from rebind.edit.guard import Guard
from rebind.edit.ledger.edit import CONSOLIDATES, JSON, Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.outcome import TEXT
from rebind.edit.targets import FactPrompts, TargetStates
from rebind.edit.targets.framings import framed_prompts
from rebind.edit.targets.kept import SubjectPrompts, subject_prompts
from rebind.errors import LedgerError
from rebind.models.language_model import LanguageModel

WITNESSES = 100  # facts in the dense memory that are asked again, at most
LOST = 0.02  # the share of them that may be lost
PATIENCE = 3  # subjects in a row that do not fit, after which the others are not tried


@dataclass(frozen=True)
class Consolidation:
    """What moved into the weights, and what stayed in the dense memory."""

    edit: Edit | None  # None if nothing moved
    moved: tuple[Fact, ...]
    stayed: tuple[Fact, ...]  # of those that the budget covers
    reason: str  # what spoke against some of those that stayed; empty if the weights just do not say them


def said_by_fact(model: LanguageModel, facts: Sequence[Fact], framings: Iterable[str]) -> list[list[bool]]:
    """Return, for every fact, whether the model says it after each of its prompts in each of the framings."""
    said: list[list[bool]] = [[] for _ in facts]
    for framing in framings:
        prompts = [(index, prompt) for index, fact in enumerate(facts) for prompt in framed_prompts(fact, framing)]
        context = TEXT if framing == "text" else ""
        encoded = model.encode([prompt for _, prompt in prompts], context=context, start=framing != "plain")
        for (index, _), score in zip(prompts, model.score_encoded(encoded), strict=True):
            said[index].append(score.exact)
    return said


def consolidate(
    tools: DraftTools, active: Sequence[Edit], guard: Guard | None, *, budget: int | None = None, batch: int = 100
) -> Consolidation:
    """Move facts of the active edits from the dense memory into the weights, as one edit in the ledger."""
    groups = groups_in_memory(active)
    if not groups:
        return Consolidation(None, (), (), "the dense memory is empty")
    first = groups[0].facts
    groups, others = _split(groups, budget)
    if not groups:
        reason = f"the {len(first)} facts about {first[0].subject} move together, and the budget is {budget}"
        return Consolidation(None, (), (), reason)
    everything = [fact for group in groups for fact in group.facts]
    sources = tuple(edit.id for edit in active if edit.has_rows)
    work = _Consolidator(tools, groups, others[:WITNESSES], sources, guard)
    chosen, reason = work.add_batches(batch)
    while chosen:
        edit = work.edit_of(chosen)
        with tools.edited.trial(edit):
            objection = work.objection(chosen)
            fitting = [] if objection else work.fitting(chosen)
            reason = objection or reason
            if fitting == chosen:
                tools.phase("writing")
                edit = replace(edit, scores=work.scores(edit))
                with tools.edited.ledger.locked():
                    _require_same_memory(active, tools.edited.ledger.active)
                    stored = tools.edited.ledger.append(edit)
                moved = {id(fact) for index in chosen for fact in groups[index].facts}
                stayed = tuple(fact for fact in everything if id(fact) not in moved)
                return Consolidation(stored, stored.facts, stayed, reason)
        chosen = fitting  # the facts compete: without some of them, others may be lost as well
    return Consolidation(None, (), tuple(everything), reason or "the weights say none of the facts as well")


def _require_same_memory(before: Sequence[Edit], now: Sequence[Edit]) -> None:
    """Raise if facts that were to move have left the dense memory in the meantime: they would be in the weights twice,
    or although they were undone.
    """
    earlier, later = EditSequence.of(before), EditSequence.of(now)
    undone = set(earlier.where(lambda kind: kind.has_rows).ids) - set(later.ids)
    moving = set(later.where(lambda kind: kind.consolidates).ids) - set(earlier.ids)
    if changes := [f"{id} was undone" for id in sorted(undone)] + [f"{id} moved facts" for id in sorted(moving)]:
        raise LedgerError(
            f"Another process changed the dense memory during the consolidation: {', '.join(changes)}",
            advice="Consolidate again",
            code="memory_changed",
        )


def _split(groups: Sequence[SubjectGroup], budget: int | None) -> tuple[list[SubjectGroup], list[Fact]]:
    """Return as many groups as a budget of facts allows, and the facts of the others."""
    ends = list(accumulate(len(group.facts) for group in groups))
    count = len(groups) if budget is None else bisect_right(ends, budget)
    return list(groups[:count]), [fact for group in groups[count:] for fact in group.facts]


Said = Sequence[Sequence[bool]]  # of each of some facts, after each of its prompts


def _still_said(before: Said, now: Said) -> bool:
    return all(
        new or not old for one, other in zip(before, now, strict=True) for old, new in zip(one, other, strict=True)
    )


class _Consolidator:
    """Groups of facts about one subject each, on their way into the weights; `others` are facts that do not move."""

    def __init__(
        self,
        tools: DraftTools,
        groups: Sequence[SubjectGroup],
        others: Sequence[Fact],
        sources: tuple[str, ...],
        guard: Guard | None,
    ) -> None:
        self.tools, self.groups, self.others, self.sources, self.guard = tools, groups, others, sources, guard
        self.others_before = said_by_fact(tools.model, others, tools.framings)
        self.said_before: list[Said] = []  # of the first groups, and so are the following
        self.scores_before: dict[int, JSON] = {}
        self.prompts: list[FactPrompts] = []
        self.targets: list[TargetStates] = []

    def prepare(self, end: int) -> None:
        """Ask the model as it was about the groups before `end` and the next witnesses, and search their targets."""
        tools, begin = self.tools, len(self.prompts)
        asked = range(len(self.said_before), min(end + WITNESSES, len(self.groups)))
        self.said_before += self._said(asked)
        groups = self.groups[begin:end]
        if not groups:
            return
        with tools.edited.base_model():
            tools.phase("contexts")
            facts = [fact for group in groups for fact in group.facts]
            self.scores_before |= zip(map(id, facts), self._scores(facts), strict=True)
            keeps = tools.settings.targets.keep > 0
            about = subject_prompts(tools.model, facts, chat="chat" in tools.framings) if keeps else []
            each = iter(about or [SubjectPrompts()] * len(facts))
            for group in groups:
                group.about = [next(each) for _ in group.facts]
            prompts = joined_prompts(tools, groups)
            tools.load_old_keys()
            self.targets.append(tools.find_targets(prompts))
            self.prompts += prompts

    def add_batches(self, size: int) -> tuple[list[int], str]:
        """Return the groups that the weights hold, and the last objection to a group that they do not.

        A batch that meets an objection is tried again in halves. A group that meets one alone stays where it is,
        and after PATIENCE such groups in a row the weights are full.
        """
        chosen, objection = list[int](), ""
        begin = refused = 0
        while begin < len(self.groups):
            end = min(begin + size, len(self.groups))
            self.prepare(end)
            tried = [*chosen, *range(begin, end)]
            with self.tools.edited.trial(self.edit_of(tried)):
                reason = self.objection(tried)
                fitting = chosen if reason else self.fitting(tried)
            if reason and size > 1:
                size //= 2
                continue
            chosen, begin, objection = fitting, end, reason or objection
            refused = refused + 1 if reason else 0
            if refused == PATIENCE:
                break
        return chosen, objection

    def edit_of(self, chosen: Sequence[int]) -> Edit:
        """Return the edit that writes some of the groups, and takes their rows out of the dense memory."""
        facts = [fact for index in chosen for fact in self.groups[index].facts]
        targets = TargetStates.concatenate(self.targets)
        rows = torch.tensor(list(chosen), device=targets.states.device)
        with self.tools.edited.base_model():
            self.tools.phase("solve")
            prompts = [self.prompts[index] for index in chosen]
            draft = draft_of_prompts(self.tools, prompts, targets.select(rows), len(facts))
        subjects = [comparable(self.groups[index].facts[0].subject) for index in chosen]
        moved = {CONSOLIDATES: {"edits": list(self.sources), "subjects": subjects}}
        return self.tools.make_edit(facts, replace(draft, settings={**draft.settings, **moved}))

    def objection(self, chosen: Sequence[int]) -> str:
        """Return what speaks against the model as it stands: drift, growth, or facts lost from the dense memory."""
        self.tools.phase("checks")
        drift = self.tools.edited.drift()
        if self.guard is not None and (failures := self.guard.check_drift(drift, "", {})):
            return "; ".join(failure.problem for failure in failures)
        waiting = [index for index in range(len(self.groups)) if index not in chosen][:WITNESSES]
        others = said_by_fact(self.tools.model, self.others, self.tools.framings)
        said = [*self._said(waiting), *([one] for one in others)]
        before = [*(self.said_before[index] for index in waiting), *([one] for one in self.others_before)]
        lost = sum(not _still_said(old, new) for old, new in zip(before, said, strict=True))
        if lost > LOST * len(before):
            return f"{lost} of {len(before)} facts that are still in the dense memory would be lost"
        return ""

    def fitting(self, chosen: Sequence[int]) -> list[int]:
        """Return those of the groups of which the model says every fact, wherever it did with the dense memory."""
        return [
            index
            for index, said in zip(chosen, self._said(chosen), strict=True)
            if all(map(any, said)) and _still_said(self.said_before[index], said)
        ]

    def scores(self, edit: Edit) -> dict[str, JSON]:
        """Return what the ledger records about the edit, which the model has on trial."""
        before = [self.scores_before[id(fact)] for fact in edit.facts]
        drift = asdict(self.tools.edited.drift())
        return {"before": before, "after": self._scores(edit.facts), "drift": drift}

    def _scores(self, facts: Sequence[Fact]) -> list[JSON]:
        return [score.to_json() for score in self.tools.model.score([fact.as_prompt() for fact in facts])]

    def _said(self, chosen: Sequence[int]) -> list[Said]:
        self.tools.phase("checks")
        facts = [fact for index in chosen for fact in self.groups[index].facts]
        said = iter(said_by_fact(self.tools.model, facts, self.tools.framings))
        return [[next(said) for _ in self.groups[index].facts] for index in chosen]
