"""Draft an edit: compute on the base model what the edit stores. `rebind.edit.dense.draft` drafts dense edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from rebind.edit.edited_model import EditedModel
from rebind.edit.facts.fact import Fact
from rebind.edit.guard import require_finite_targets
from rebind.edit.ledger.edit import JSON, Edit, library_versions, pack_writes
from rebind.edit.settings import EditSettings
from rebind.edit.solve import SubjectStates, choose_lambda, protected_states, solve_writes
from rebind.edit.targets.kept import SubjectPrompts
from rebind.edit.targets.objective import FactPrompts
from rebind.edit.targets.optimize import TargetStates
from rebind.models.language_model import LanguageModel


@dataclass(frozen=True, eq=False)
class Draft:
    """The part of an edit that depends on its method, and the target search it came from."""

    settings: Mapping[str, JSON]
    sites: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    search: TargetStates


@dataclass(frozen=True, eq=False)
class DraftTools:
    """What a draft is computed with: a model, the settings, and the steps that drafts have in common."""

    model: LanguageModel
    edited: EditedModel
    settings: EditSettings
    framings: Sequence[str]
    encode: Callable[..., list[FactPrompts]]  # `Editor.fact_prompts`
    search: Callable[[Sequence[FactPrompts]], TargetStates]
    phase: Callable[[str], None]
    seed: int
    search_dtype: str

    def load_old_keys(self) -> None:
        """Load or compute the old keys of the sites that the settings edit."""
        self.phase("moments")
        names = [self.model.sites[layer].name for layer in self.settings.layers]
        self.edited.weights.remember_base(names)
        self.edited.weights.load_old_keys(names)

    def make_edit(self, facts: Sequence[Fact], draft: Draft) -> Edit:
        """Return a draft as an edit, with everything that is needed to repeat it."""
        settings: dict[str, JSON] = {
            "layers": list(self.settings.layers),
            "targets": asdict(self.settings.targets),
            "search": self.search_dtype,
            "moments": self.edited.moments.source,
            "seed": self.seed,
            "framings": list(self.framings),
        }
        return Edit(
            facts=tuple(facts),
            method=self.settings.method.name,
            settings={**settings, **draft.settings},
            sites=draft.sites,
            tensors=draft.tensors,
            versions=library_versions(),
        )

    def find_targets(self, prompts: Sequence[FactPrompts]) -> TargetStates:
        """Search the target states of facts, or of groups of facts, at the last layer of the settings."""
        self.phase("targets")
        targets = self.search(prompts)
        require_finite_targets(targets.states)
        self.phase("solve")
        return targets


def draft_writes(tools: DraftTools, facts: Sequence[Fact], subject_prompts: Sequence[SubjectPrompts]) -> Draft:
    """Find the targets of facts and one write per site."""
    tools.phase("contexts")
    prompts = tools.encode(facts, subject_prompts, keep=tools.settings.targets.keep > 0)
    tools.load_old_keys()
    return draft_of_prompts(tools, prompts, tools.find_targets(prompts), len(facts))


def draft_of_prompts(tools: DraftTools, prompts: Sequence[FactPrompts], targets: TargetStates, facts: int) -> Draft:
    """Find one write per site that moves the subjects of prompts to their targets."""
    settings, weights = tools.settings, tools.edited.weights
    sites = [tools.model.sites[layer] for layer in settings.layers]
    subjects = SubjectStates(tools.model.trunk, prompts, several_keys=settings.method.several_keys)
    lam = settings.lam
    if lam is None:
        lam = choose_lambda(subjects.keys(sites[0]), weights.old_keys[sites[0].name], facts)
    delta = targets.states - targets.initial
    protected = protected_states(tools.model.trunk, prompts, settings.method)
    writes = solve_writes(subjects, sites, delta, settings.method, weights.old_keys, lam, protected)
    tensors = {"targets": targets.states.float().cpu(), **pack_writes(writes)}
    return Draft({"lam": lam}, tuple(writes), tensors, targets)
