"""The guard: it rejects an edit that breaks the model or does not make it say the fact.

The checks run on the model with the edit in place, before the edit is added to the ledger:

- *finite*: everything the model computes is a finite number;
- *drift*: on canary prompts, which no edit is about, the next token has nearly the same distribution as before;
- *growth*: no edited matrix has changed by more than a fraction of its norm;
- *said*: the model says the facts, that is, every token of the target is its first choice;
- *framings*: it says them in most framings (`rebind.edit.targets.framings`);
- *subject*: it answers other questions about the same subjects as before.

Drift and growth are measured for all active edits together, because the whole model must stay intact. A model can drift
without growing much, and grow before it drifts; together they reveal most broken models. Before any work, a prompt that
has another target in an active edit is rejected, and facts that share a key are reported.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rebind.edit.facts import Fact, shared_keys
from rebind.edit.facts.fact import comparable
from rebind.edit.facts.questions import questions_of
from rebind.edit.ledger.edit import JSON, Edit
from rebind.edit.outcome import Outcome
from rebind.edit.settings import EditSettings
from rebind.edit.targets.optimize import TargetStates
from rebind.edit.wording import percent
from rebind.errors import FactWarning, GuardError, InputError, LedgerWarning
from rebind.memory.checks import require_number
from rebind.models.scoring import FactScore

USE_FLOAT32 = "Load the model in float32, or write fewer facts at once"
UNFINISHED_LOSS = 1.0  # nats: a search that ended above it did not reach its targets
MANY_FACTS = 400  # from here on, alphaedit gets more facts said than memit
LOW_SHARE = 0.5  # of facts that are said in a framing

# Many topics and kinds of continuation: a certain word, an open end, a number, code, other languages.
CANARY_PROMPTS = (
    "Water boils when it is heated, and it freezes when it gets",
    "She put the kettle on, took two cups from the shelf and",
    "The train to the coast leaves at half past six in the",
    "If you add seven and five, you get",
    "Monday, Tuesday, Wednesday, Thursday,",
    "Bread is made of flour, water, yeast and a little",
    "A triangle has three sides, a square has",
    "The doctor listened to his heart and said that everything was",
    "In winter the days are short and the nights are",
    "He could not open the door because he had lost his",
    "Bees collect nectar from flowers and turn it into",
    "The committee will meet again next week to discuss the",
    "My grandmother taught me how to knit when I was a",
    "The price of oil rose sharply last year because",
    "Once upon a time, in a village at the edge of a forest, there lived",
    "Thank you for your letter. I am sorry that it took me so long to",
    "To reset the device, press and hold the button for ten",
    "The two teams were level at half time, but in the second half",
    "Light travels faster than sound, which is why we see the lightning before we hear the",
    "Violins, cellos and double basses all have",
    "def add(a, b):\n    return a +",
    "for (int i = 0; i < n; i++) { sum +=",
    "Guten Morgen! Wie geht es",
    "Il était une fois une petite fille qui",
)


@dataclass(frozen=True)
class Drift:
    """How far a model is from its base model."""

    kl: float  # nats: the mean over the canary prompts
    largest: float  # nats: the largest of them
    prompt: str  # the canary prompt with the largest one
    growth: float  # ‖W' − W‖ / ‖W‖: the largest of all sites
    site: str  # the site with the largest growth; empty if nothing was edited


def measure_drift(
    base: Tensor,  # [n, vocabulary]: log-probabilities of the next token after each prompt
    edited: Tensor,
    growth: Mapping[str, float],
    prompts: Sequence[str] = CANARY_PROMPTS,
) -> Drift:
    """Compare the next tokens of a base model and an edited model, by KL(base ‖ edited) in float64."""
    gap = base.exp() * (base - edited.to(base.device))
    kl = gap.masked_fill(base == -torch.inf, 0.0).sum(-1, dtype=torch.float64).clamp_min(0.0)  # [n]
    worst = int(kl.nan_to_num(torch.inf).argmax())
    site = max(growth, key=lambda name: growth[name], default="")
    return Drift(float(kl.mean()), float(kl[worst]), prompts[worst], growth.get(site, 0.0), site)


@dataclass(frozen=True)
class Failure:
    """A check that an edit did not pass."""

    check: str
    value: float
    bound: float
    problem: str
    advice: str
    settings: Mapping[str, object] = field(default_factory=dict)  # the settings that the advice names

    def to_json(self) -> dict[str, JSON]:
        """Return what the ledger stores."""
        return {"check": self.check, "value": self.value, "bound": self.bound, "says": self.problem}


@dataclass(frozen=True)
class Guard:
    """Bounds for an edited model. The defaults accept ordinary edits and reject those that break the model.

    They lie between the measurements for one fact and for many (docs/editing.md): one fact drifts by .003 nats and
    changes a matrix by .21 of its norm; 1,000 facts by ROME drift by 1.67 and triple the perplexity.
    """

    drift: float = 1.0  # largest mean KL(base ‖ edited) on the canary prompts, in nats
    growth: float = 1.5  # largest ‖W' − W‖ / ‖W‖ of a site
    said: float = 0.5  # smallest share of facts that the model must say; above 0, a single fact must be said
    framings: float = 0.5  # smallest share of framings in which a fact is said, on average over the facts
    subject: float = 0.2  # smallest share of other questions about the subjects with the same answer as before

    def __post_init__(self) -> None:
        for name in ("drift", "growth"):
            require_number(name, getattr(self, name), most=math.inf, code="invalid_guard")  # infinity: no bound
        for name in ("said", "framings", "subject"):
            require_number(name, getattr(self, name), most=1.0, code="invalid_guard")

    def check(
        self,
        facts: Sequence[Fact],
        scores: Sequence[FactScore],
        drift: Drift,
        outcome: Outcome,
        settings: EditSettings,
        search: TargetStates | None = None,
    ) -> list[Failure]:
        """Return the failed checks, the most serious first. A model that computes NaN fails only the check *finite*.

        `settings` and `search` are those of the edit; the advice depends on them.
        """
        numbers = [drift.kl, drift.growth, *(score.nll for score in scores)]
        if broken := sum(not math.isfinite(number) for number in numbers):
            problem = f"{broken} of {len(numbers)} measurements of the edited model are NaN or infinite"
            return [Failure("finite", float(broken), 0.0, problem, USE_FLOAT32)]
        failures = self.check_drift(drift, *_advise_weaker(facts, settings))
        said = sum(score.exact for score in scores) / len(scores)
        required = 1.0 if len(scores) == 1 and self.said > 0 else self.said
        if said < required:
            problem = _describe_answers(facts, scores, required)
            failures.append(Failure("said", said, required, problem, *_advise_stronger(facts, settings, search)))
        elif outcome.framings < self.framings:
            by_framing = ", ".join(f"{name} {share:.0%}" for name, share in outcome.said.items())
            problem = f"the facts are said in {outcome.framings:.0%} of their framings ({by_framing})"
            advice = _advise_framings(facts, settings, search, outcome)
            failures.append(Failure("framings", outcome.framings, self.framings, problem, *advice))
        if (unchanged := outcome.about_subject) is not None and unchanged < self.subject:
            problem = f"{unchanged:.0%} of other questions about the same subjects are answered as before"
            advice = "Try {targets.keep}", {"targets.keep": 4 * settings.targets.keep or 4.0}
            failures.append(Failure("subject", unchanged, self.subject, problem, *advice))
        return failures

    def check_drift(self, drift: Drift, advice: str, settings: Mapping[str, object]) -> list[Failure]:
        """Return the failed checks among drift and growth."""
        failures = []
        if drift.kl > self.drift:
            problem = f"the next token on unrelated prompts drifts by {drift.kl:.2f} nats; {self.drift:g} is allowed"
            failures.append(Failure("drift", drift.kl, self.drift, problem, advice, settings))
        if drift.growth > self.growth:
            problem = f"{drift.site} changed by {drift.growth:.2f} of its norm; {self.growth:g} is allowed"
            failures.append(Failure("growth", drift.growth, self.growth, problem, advice, settings))
        return failures


def _describe_answers(facts: Sequence[Fact], scores: Sequence[FactScore], required: float) -> str:
    if len(scores) > 1:
        said = sum(score.exact for score in scores)
        return f"the model says {said} of {len(scores)} facts, and {math.ceil(required * len(scores))} are required"
    score, answer = scores[0], scores[0].says.strip()
    target = f'"{facts[0].target}" has probability {percent(score.probability)}'
    if score.rank == 1:
        return f'the model begins the answer ("{answer}") but does not finish it ({target})'
    return f'the model answers "{answer}" ({target} and rank {score.rank})'


Advice = tuple[str, dict[str, object]]  # one next step, and the setting that it names


def _advise_weaker(facts: Sequence[Fact], settings: EditSettings) -> Advice:
    """Return the setting that is most likely to make an edit disturb the model less."""
    if not settings.method.exact:
        return "Try {lam}", {"lam": _scaled(settings.lam, 10)}
    if len(facts) > 1 and not settings.method.dense:
        return "Try {method}", {"method": "memit"}  # exact methods have no λ to raise
    return "Try {targets.clamp}", {"targets.clamp": _scaled(settings.targets.clamp, 0.5)}


def _advise_stronger(facts: Sequence[Fact], settings: EditSettings, search: TargetStates | None) -> Advice:
    """Return the setting that is most likely to make the model say the facts.

    If the search did not reach its targets, the clamp or the number of steps limits it. If it did, the write realizes
    too little of them; a dense memory adds them as they are, so there the search is what can be better.
    """
    targets = settings.targets
    if search is None or settings.method.dense or float(search.loss.median()) > UNFINISHED_LOSS:
        if search is not None and _is_at_bound(search, targets.clamp):
            return "Try {targets.clamp}", {"targets.clamp": _scaled(targets.clamp, 2)}
        return "Try {targets.steps}", {"targets.steps": max(60, 2 * targets.steps)}
    if settings.method.exact:
        return "Try {method}", {"method": "memit"}  # it has a key for every framing
    if len(facts) >= MANY_FACTS and settings.method.name != "alphaedit":
        return "Try {method}", {"method": "alphaedit"}
    return "Try {lam}", {"lam": _scaled(settings.lam, 0.1)}


def _advise_framings(
    facts: Sequence[Fact], settings: EditSettings, search: TargetStates | None, outcome: Outcome
) -> Advice:
    """Return the next step for facts that are said after their prompts but not in other framings."""
    without_question = [fact for fact in facts if not questions_of(fact)]
    if outcome.said.get("chat", 1.0) < LOW_SHARE and 2 * len(without_question) > len(facts):
        return "Add the question that people ask, with {questions}", {"questions": None}
    return _advise_stronger(facts, settings, search)


def _is_at_bound(search: TargetStates, clamp: float) -> bool:
    """Return whether most target states are as far from their initial states as the clamp allows."""
    moved = torch.linalg.vector_norm(search.states - search.initial, dim=-1)
    allowed = clamp * torch.linalg.vector_norm(search.initial, dim=-1)
    return bool((moved / allowed).median() > 0.99)


def _scaled(value: float | None, factor: float) -> float | None:
    return value and float(f"{value * factor:.3g}")


def require_passed(failures: Sequence[Failure], *, force: bool) -> None:
    """Raise GuardError if checks failed, unless `force` overrides them. A model that computes NaN is never accepted."""
    if not failures or (force and failures[0].check != "finite"):
        return
    first = failures[0]
    override = "" if first.check == "finite" else ". Use {force} to write it anyway"
    error = GuardError(
        f"Edit not written: {'; also, '.join(failure.problem for failure in failures)}",
        advice=first.advice + override,
        settings={**first.settings, "force": True},
    )
    error.checks = tuple(failure.check for failure in failures)
    raise error


def require_finite_targets(targets: Tensor) -> None:
    """Raise GuardError if target states are NaN or infinite; they cannot be written even with `force`."""
    if broken := int((~targets.isfinite()).any(-1).sum()):
        problem = f"{broken} of {len(targets)} target states hold NaN or infinity"
        require_passed([Failure("finite", float(broken), 0.0, problem, USE_FLOAT32)], force=False)


# Conflicts between facts and edits


def warn_of_shared_keys(facts: Sequence[Fact]) -> None:
    """Warn of facts that share a key but have different targets."""
    groups = shared_keys(facts)
    if not groups:
        return
    first = facts[groups[0].indices[0]]
    second = next(facts[index] for index in groups[0].indices if facts[index].target != first.target)
    count = sum(len(group.indices) for group in groups)
    warnings.warn(
        f"{count} facts share a key with a fact that has another target, because they read the same up to the end of "
        f"the subject: {first.text!r} → {first.target!r} and {second.text!r} → {second.target!r}. A compromise will be "
        f"written. Keep one of them, or rephrase one so that other text comes before the subject.",
        FactWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class EarlierEdit:
    """An active edit about the subject of a new fact."""

    edit: str  # its id
    subject: str
    text: str  # the prompt of its fact
    target: str
    clashes: bool  # whether the prompt is the same and the target is not


def find_earlier_edits(facts: Sequence[Fact], active: Sequence[Edit]) -> list[EarlierEdit]:
    """Return the last active edit about each fact's subject; one with the same prompt takes precedence."""
    by_prompt: dict[str, tuple[Edit, Fact]] = {}
    by_subject: dict[str, tuple[Edit, Fact]] = {}
    for edit in active:
        for fact in edit.facts:
            by_prompt[comparable(fact.text)] = by_subject[comparable(fact.subject)] = (edit, fact)
    earlier = []
    for fact in facts:
        same_prompt = by_prompt.get(comparable(fact.text))
        match = same_prompt or by_subject.get(comparable(fact.subject))
        if match is not None:
            edit, old = match
            clashes = same_prompt is not None and old.target != fact.target
            earlier.append(EarlierEdit(edit.id, old.subject, old.text, old.target, clashes))
    return earlier


def check_earlier_edits(earlier: Sequence[EarlierEdit], *, force: bool) -> None:
    """Raise if facts contradict active edits, unless forced; warn of active edits about the same subjects."""
    clashes = [edit for edit in earlier if edit.clashes]
    if clashes and not force:
        first = clashes[0]
        raise InputError(
            f"Edit {first.edit} already makes the model answer {first.text!r} with {first.target!r}",
            expected="one target per prompt",
            advice=f"Undo edit {first.edit} first, or use {{force}} to write over it",
            settings={"force": True},
            code="conflicting_edit",
        )
    if earlier:
        first, subjects = earlier[0], len({edit.subject for edit in earlier})
        others = f" (and other edits about {subjects - 1} more subjects)" if subjects > 1 else ""
        warnings.warn(
            f"Edit {first.edit} is already about {first.subject!r} ({first.text} → {first.target}){others}. The new "
            f"edit is added to it; undo {first.edit} if you want to replace it.",
            LedgerWarning,
            stacklevel=3,
        )
