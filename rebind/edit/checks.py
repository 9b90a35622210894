"""Score a model before and after an edit, and run the checks of the guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from rebind.edit.edited_model import EditedModel
from rebind.edit.facts.fact import Fact
from rebind.edit.guard import Guard, require_passed
from rebind.edit.ledger.edit import JSON, Edit
from rebind.edit.outcome import Probe
from rebind.edit.settings import EditSettings
from rebind.edit.targets.kept import SubjectPrompts
from rebind.edit.targets.optimize import TargetStates


class EditCheck:
    """Score facts on the base model, then check the edited model. Without a guard, only the facts are scored."""

    def __init__(
        self,
        edited: EditedModel,
        guard: Guard | None,
        facts: Sequence[Fact],
        subject_prompts: Sequence[SubjectPrompts],
        framings: Sequence[str],
    ) -> None:
        """Score the base model."""
        self.edited, self.guard, self.facts = edited, guard, facts
        self.scores: dict[str, JSON] = {"before": [score.to_json() for score in self._score()]}
        self.probe = None if guard is None else Probe(edited.model, facts, subject_prompts, framings)

    def run(
        self, edit: Edit, settings: EditSettings, search: TargetStates, phase: Callable[[str], None], *, force: bool
    ) -> bool:
        """Check the edited model, add the results to `scores`, and return whether `force` overrode a failed check."""
        after = self._score()
        self.scores["after"] = [score.to_json() for score in after]
        if self.guard is None or self.probe is None:
            return False
        phase("checks")
        drift, outcome = self.edited.drift(), self.probe.measure()
        if edit.has_rows:
            self.scores["memory"] = {"rows": self.edited.dense.rows(), "fires": self.edited.dense.fires()}
        lam: Any = edit.settings["lam"]
        failures = self.guard.check(self.facts, after, drift, outcome, replace(settings, lam=lam), search)
        require_passed(failures, force=force)
        self.scores["drift"], self.scores["outcome"] = asdict(drift), outcome.to_json()
        self.scores["guard"] = {"bounds": asdict(self.guard), "failed": [failure.to_json() for failure in failures]}
        return bool(failures)

    def _score(self) -> list[Any]:
        return self.edited.model.score([fact.as_prompt() for fact in self.facts])
