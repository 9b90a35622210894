"""The guard: an edit that breaks the model, or that does not say the fact, is not committed.

Checked on the model with the edit in it, before the ledger hears of it:

- *finite*: what the model answers is numbers;
- *growth*: no edited matrix has moved further than a share of its own size;
- *drift*: on the canaries the next token is distributed much as before;
- *said*: the facts come out as the model's first choice.

Growth and drift are those of all active edits together: it is the model that must stay whole. And before any work:
a prompt that an active edit already gives another target is refused, and facts of one edit that share a key are named.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rebind.edit.drift import Drift
from rebind.edit.facts.fact import Fact, comparable, rivals
from rebind.edit.facts.scores import FactScore
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.log import JSON
from rebind.edit.methods import Method
from rebind.edit.wording import percent
from rebind.errors import FactWarning, GuardError, InputError, LedgerWarning


@dataclass(frozen=True)
class Failure:
    """A check that an edit did not pass."""

    check: str
    value: float
    bound: float
    says: str  # what was found, and what was allowed
    step: str  # what to try

    def __str__(self) -> str:
        return f"{self.check}: {self.says}: {self.step}"

    def to_json(self) -> dict[str, JSON]:
        return {"check": self.check, "value": self.value, "bound": self.bound, "says": self.says}


@dataclass(frozen=True)
class Guard:
    """What an edited model must keep to. The defaults let ordinary edits pass and stop broken models.

    They stand between what was measured on SmolLM2-135M, whose perplexity was 26.8 (CounterFact, one H200):

    | edit | drift | growth | said | perplexity |
    | --- | --- | --- | --- | --- |
    | rome, one fact | .003 | .21 | 1.00 | 26.8 |
    | memit, 100 facts | .03 | .30 | .99 | 27.4 |
    | memit, 1,000 facts | .18 | .69 | .55 | 29.3 |
    | alphaedit, 1,000 facts | .41 | 1.04 | .66 | 33.9 |
    | rome, 600 facts | .87 | 2.61 | .20 | 50.1 |
    | rome, 1,000 facts | 1.67 | 3.14 | .10 | 70.0 |
    | emmet, 600 facts | 4.15 | 4.93 | .06 | 282 |
    """

    drift: float = 1.0  # nats: most mean KL(base ‖ edited) on the canaries
    growth: float = 1.5  # most ‖W' − W‖ / ‖W‖ of a site
    said: float = 0.5  # least share of the facts whose whole target comes first; above 0, a lone fact must

    def check(self, scores: Sequence[FactScore], drift: Drift, method: Method | None = None) -> list[Failure]:
        """The checks that fail, worst news first. A model that answers NaN fails that one alone.

        What to try depends on the method: one that meets its facts exactly has no λ, and writes to one layer.
        """
        exact = method is not None and method.exact
        numbers = [drift.kl, drift.growth, *(score.nll for score in scores)]
        if wrong := [number for number in numbers if not math.isfinite(number)]:
            says = f"{len(wrong)} of {len(numbers)} of the edited model's answers are NaN or infinite, expected numbers"
            step = "load the model in float32, or write fewer facts at once"
            return [Failure("finite", float(len(wrong)), 0.0, says, step)]
        failures = []
        if drift.kl > self.drift:
            says = (
                f"the next token on unrelated prompts moved by {drift.kl:.2f} nats (most after {drift.prompt!r}), "
                f"allowed {self.drift:g}"
            )
            failures.append(Failure("drift", drift.kl, self.drift, says, _less(len(scores), exact, "undo an edit")))
        if drift.growth > self.growth:
            says = f"{drift.site} moved by {drift.growth:.2f} of its own size, allowed {self.growth:g}"
            step = _less(len(scores), exact, "choose another layer" if exact else "spread over more layers")
            failures.append(Failure("growth", drift.growth, self.growth, says, step))
        said = sum(score.exact for score in scores) / len(scores)
        least = 1.0 if len(scores) == 1 and self.said > 0 else self.said
        if said < least:
            failures.append(Failure("said", said, least, _unsaid(scores, least), _more(len(scores), method)))
        return failures


def _unsaid(scores: Sequence[FactScore], least: float) -> str:
    if len(scores) == 1:
        score = scores[0]
        instead = f"the model goes on with {score.says!r}" if score.rank > 1 else "only its beginning comes first"
        return (
            f"the target has rank {score.rank} and probability {percent(score.probability)} ({instead}), expected it "
            f"first"
        )
    said = sum(score.exact for score in scores)
    return f"{said} of {len(scores)} facts are said, expected {math.ceil(least * len(scores))}"


def _less(facts: int, exact: bool, last: str) -> str:
    """What to try where an edit does too much."""
    fewer = "write fewer facts at once" if facts > 1 else "lower the clamp"
    weigh = "use memit, which weighs them against what the model knew" if exact else "raise λ"
    return f"{fewer}, {weigh}, or {last}"


def _more(facts: int, method: Method | None) -> str:
    """What to try where it does too little."""
    exact = method is not None and method.exact
    if facts == 1:
        weigh = "choose another layer, use memit" if exact else "lower λ, choose other layers"
        return f"raise the steps, change the clamp, {weigh}, or word the prompt otherwise"
    another = "" if method is not None and method.name == "alphaedit" else " or use alphaedit"
    better = "use memit" if exact else f"lower λ{another}"
    return f"write fewer facts at once, raise the steps, or {better}"


def require_finite_targets(targets: Tensor) -> None:
    """Refuse what a search ended at, where it is no numbers: nothing can be written then, forced or not."""
    if wrong := int((~targets.isfinite()).any(-1).sum()):
        says = f"{wrong} of {len(targets)} targets that were found hold NaN or infinity, expected numbers"
        step = "load the model in float32, lower the rate, or word the prompt otherwise"
        enforce([Failure("finite", float(wrong), 0.0, says, step)], force=False)


def enforce(failures: Sequence[Failure], *, force: bool) -> None:
    """Raise for checks that failed, unless they may be overridden and are."""
    if failures and (not force or failures[0].check == "finite"):
        others = "".join(f"; also {one.check}: {one.says}" for one in failures[1:])
        override = "" if failures[0].check == "finite" else "; or force it (force=True, --force)"
        raise GuardError(f"not written, {failures[0]}{override}{others}", checks=tuple(one.check for one in failures))


# Facts that are in each other's way


def mention_rivals(facts: Sequence[Fact]) -> None:
    """Warn of facts of one edit that share a key and ask for different values."""
    found = rivals(facts)
    if not found:
        return
    first = facts[found[0].indices[0]]
    second = next(facts[index] for index in found[0].indices if facts[index].target != first.target)
    count = sum(len(group.indices) for group in found)
    others = f" (of {count} such facts)" if count > 2 else ""
    warnings.warn(
        f"{first.text!r} → {first.target!r} and {second.text!r} → {second.target!r}{others} are the same up to the end "
        f"of the subject, where facts are written: they share a key, and a compromise of the two will be written; keep "
        f"one of them, or word one so that other text comes before the subject",
        FactWarning,
        stacklevel=4,
    )


# What the ledger already holds


@dataclass(frozen=True)
class Earlier:
    """A fact to be written whose subject an active edit has written about."""

    edit: str  # that edit's id
    subject: str
    text: str  # the prompt of its fact
    target: str  # and what it says
    clashes: bool  # whether the prompt is the same and the target another


def find_earlier(facts: Sequence[Fact], active: Sequence[Edit]) -> list[Earlier]:
    """For each fact, the last active edit about its subject; one with the same prompt before others."""
    prompts: dict[str, tuple[Edit, Fact]] = {}
    subjects: dict[str, tuple[Edit, Fact]] = {}
    for edit in active:
        for fact in edit.facts:
            prompts[comparable(fact.text)] = subjects[comparable(fact.subject)] = (edit, fact)
    found = []
    for fact in facts:
        at_prompt = prompts.get(comparable(fact.text))
        known = at_prompt or subjects.get(comparable(fact.subject))
        if known is not None:
            edit, before = known
            clashes = at_prompt is not None and before.target != fact.target
            found.append(Earlier(edit.id, before.subject, before.text, before.target, clashes))
    return found


def admit(earlier: Sequence[Earlier], *, force: bool) -> None:
    """Refuse facts that contradict active edits, unless forced; mention those about the same subjects."""
    clashes = [one for one in earlier if one.clashes]
    if clashes and not force:
        first, more = clashes[0], len(clashes) - 1
        raise InputError(
            f"edit {first.edit} already makes {first.text!r} say {first.target!r}"
            + (f" (and so for {more} more of the prompts)" if more else "")
            + f", expected one target for one prompt: undo it first (editor.undo({first.edit!r}) or rebind ledger undo "
            f"{first.edit}), or write over it (force=True, --force)"
        )
    if earlier:
        first, more = earlier[0], len({one.subject for one in earlier}) - 1
        warnings.warn(
            f"{first.subject!r} was written before, by edit {first.edit} ({first.text} → {first.target})"
            + (f", and so were {more} more of the subjects" if more else "")
            + f": this edit comes on top of it; undo {first.edit} if it should not stay",
            LedgerWarning,
            stacklevel=4,
        )
