"""Measure what an edit did: the framings in which its facts are said, and the other answers that changed.

A `Probe` stores the answers of the base model and compares them with those of the edited model. Its prompts are about
other relations of the subject, which the search did not see, and about the relation of the fact for other subjects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rebind.edit.facts.fact import Fact
from rebind.edit.facts.relations import OTHER_SUBJECTS
from rebind.edit.ledger.edit import JSON
from rebind.edit.targets.framings import framed_prompts
from rebind.edit.targets.kept import SubjectPrompts, first_choices
from rebind.models.language_model import LanguageModel

MAX_FACTS = 100  # of a larger edit, the first ones are probed
MAX_KEPT_FACTS = 10  # facts whose kept prompts are probed, too
TEXT = "We talked about many things that evening, and nobody was in a hurry. "  # a context that the search does not see


@dataclass(frozen=True)
class ChangedAnswer:
    """A prompt that no fact is about, and after which the model now has another first token."""

    about: str  # a key of `Outcome.asked`: subject, kept or neighbors
    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    """What an edit did, as shares between 0 and 1; None without prompts."""

    said: Mapping[str, float]  # by framing: the share of facts whose target tokens are all first choices
    subject: float | None  # the share of other relations of the subjects with the same first choice as before
    neighbors: float | None  # the same for other subjects
    # Number of prompts: "subject" and "neighbors" as above, "kept" for those whose answers the search tries to keep
    asked: Mapping[str, int] = field(default_factory=dict)
    changed: tuple[ChangedAnswer, ...] = ()  # the answers that are not the same as before

    @property
    def about_subject(self) -> float | None:
        """The share of all prompts about the subjects, held out or kept, that are answered as before.

        The two or three held-out prompts of one fact are too few to reject an edit.
        """
        count = self.asked.get("subject", 0) + self.asked.get("kept", 0)
        if not count:
            return self.subject
        return 1 - sum(answer.about in ("subject", "kept") for answer in self.changed) / count

    @property
    def framings(self) -> float:
        """The mean share over all framings."""
        return sum(self.said.values()) / len(self.said)

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


class Probe:
    """Prompts about facts and around them, with the answers of the base model."""

    def __init__(
        self,
        model: LanguageModel,
        facts: Sequence[Fact],
        subject_prompts: Sequence[SubjectPrompts],
        framings: Sequence[str],
    ) -> None:
        """Store the answers of the model, which must be the base model."""
        self.model, self.facts, self.framings = model, facts[:MAX_FACTS], framings
        pairs = list(zip(self.facts, subject_prompts[:MAX_FACTS], strict=True))
        prompts = {
            "subject": [text for _, about in pairs for text in about.held_out],
            "kept": [text for _, about in pairs[:MAX_KEPT_FACTS] for text in about.kept],
            "neighbors": [text for fact, about in pairs for text in neighbor_prompts(fact, about)],
        }
        self._prompts = [(kind, text) for kind, texts in prompts.items() for text in texts]
        self._before = self._first_choices()

    def measure(self) -> Outcome:
        """Compare the model as it is now with the base model."""
        said = {framing: share for framing in self.framings if (share := self._share_said(framing)) is not None}
        unchanged: dict[str, list[bool]] = {"subject": [], "kept": [], "neighbors": []}
        changed, decode = [], self.model.tokenizer.decode
        for (kind, prompt), before, after in zip(self._prompts, self._before, self._first_choices(), strict=True):
            unchanged[kind].append(before == after)
            if before != after:
                changed.append(ChangedAnswer(kind, prompt, str(decode(before)), str(decode(after))))
        counts = {kind: len(values) for kind, values in unchanged.items()}
        return Outcome(said, _mean(unchanged["subject"]), _mean(unchanged["neighbors"]), counts, tuple(changed))

    def _first_choices(self) -> list[list[int]]:
        return first_choices(self.model, [text for _, text in self._prompts], 1)

    def _share_said(self, framing: str) -> float | None:
        prompts = [prompt for fact in self.facts for prompt in framed_prompts(fact, framing)]
        context = TEXT if framing == "text" else ""
        encoded = self.model.encode(prompts, context=context, start=framing != "plain")
        return _mean([score.exact for score in self.model.score_encoded(encoded)])


def neighbor_prompts(fact: Fact, about: SubjectPrompts) -> Sequence[str]:
    """Return prompts about other subjects: the user's own, or the prompt of the fact with other names."""
    before, after = fact.parts
    others = [name for name in OTHER_SUBJECTS[about.kind] if name != fact.subject]
    return fact.neighbors or [f"{before}{name}{after}" for name in others]


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
