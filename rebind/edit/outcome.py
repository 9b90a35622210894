"""What an edit did: in which framings the facts are said, and what else the model knows stayed.

A `Probe` is prepared on the base model and asked again on the edited one. The subject is asked about relations that the
search did not see, and well-known other subjects are asked the question of the fact.
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
from rebind.models.scoring import score_prompts

PROBED = 100  # facts, at most: those of a large edit are sampled from its beginning
KEPT = 10  # facts, at most, for which the prompts to keep are asked, too
TEXT = "We talked about many things that evening, and nobody was in a hurry. "  # a context that the search does not see


@dataclass(frozen=True)
class ChangedAnswer:
    """A prompt that no fact is about, and to which the model now gives another first token."""

    about: str  # as in `Outcome.asked`
    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    """Shares between 0 and 1; None where nothing was asked."""

    said: Mapping[str, float]  # by framing: the share of facts of which every target token is the first choice
    subject: float | None  # the share of other relations of the subjects with the same first choice as before
    neighbors: float | None  # the same for other subjects
    # The number of prompts: "subject" and "neighbors" as above, "kept" of those that the search itself tries to keep
    asked: Mapping[str, int] = field(default_factory=dict)
    changed: tuple[ChangedAnswer, ...] = ()  # those among them that are answered differently

    @property
    def about_subject(self) -> float | None:
        """The share of all questions about the subjects that are answered as before, held out or searched with.

        One fact has two or three held-out questions, which are too few to refuse it by.
        """
        asked = self.asked.get("subject", 0) + self.asked.get("kept", 0)
        if not asked:
            return self.subject
        return 1 - sum(one.about in ("subject", "kept") for one in self.changed) / asked

    @property
    def framings(self) -> float:
        """The mean of all framings."""
        return sum(self.said.values()) / len(self.said)

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


class Probe:
    """The questions about some facts, with the answers of the base model."""

    def __init__(
        self, model: LanguageModel, facts: Sequence[Fact], about: Sequence[SubjectPrompts], framings: Sequence[str]
    ) -> None:
        """Ask the base model."""
        self.model, self.facts, self.framings = model, facts[:PROBED], framings
        asked = list(zip(self.facts, about[:PROBED], strict=True))
        prompts = {
            "subject": [text for _, one in asked for text in one.held_out],
            "kept": [text for _, one in asked[:KEPT] for text in one.kept],
            "neighbors": [text for fact, one in asked for text in neighbor_prompts(fact, one)],
        }
        self._prompts = [(kind, text) for kind, texts in prompts.items() for text in texts]
        self._before = self._first_choices()

    def measure(self) -> Outcome:
        """Ask the model as it stands now."""
        said = {framing: share for framing in self.framings if (share := self._share_said(framing)) is not None}
        same: dict[str, list[bool]] = {"subject": [], "kept": [], "neighbors": []}
        changed, decode = [], self.model.tokenizer.decode
        for (kind, prompt), before, after in zip(self._prompts, self._before, self._first_choices(), strict=True):
            same[kind].append(before == after)
            if before != after:
                changed.append(ChangedAnswer(kind, prompt, str(decode(before)), str(decode(after))))
        asked = {kind: len(values) for kind, values in same.items()}
        return Outcome(said, _mean(same["subject"]), _mean(same["neighbors"]), asked, tuple(changed))

    def _first_choices(self) -> list[list[int]]:
        return first_choices(self.model, [text for _, text in self._prompts], 1)

    def _share_said(self, framing: str) -> float | None:
        prompts = [prompt for fact in self.facts for prompt in framed_prompts(fact, framing)]
        context = TEXT if framing == "text" else ""
        encoded = self.model.encode(prompts, context=context, start=framing != "plain")
        return _mean([score.exact for score in score_prompts(self.model.trunk, self.model.tokenizer, encoded)])


def neighbor_prompts(fact: Fact, about: SubjectPrompts) -> Sequence[str]:
    """Return prompts about other subjects: the user's, or the prompt of the fact with other names in it."""
    before, after = fact.parts
    others = [name for name in OTHER_SUBJECTS[about.kind] if name != fact.subject]
    return fact.neighbors or [f"{before}{name}{after}" for name in others]


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
