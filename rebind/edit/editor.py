"""`Editor`: a language model, a ledger of what was changed in it, and the verbs to change it.

The weights of a site are always the fold of the ledger's active edits over the base weights. Targets and
keys are found on the base model, so an edit is the same whatever else the ledger holds, and undoing any of
them is folding again without it: no optimisation, and the same bytes as if it had never been made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rebind.analysis.layer_search import chosen_layers
from rebind.edit.drift import Drift, measure, next_tokens
from rebind.edit.export import checkpoint as export
from rebind.edit.export.delta import save_delta
from rebind.edit.export.low_rank_change import changes
from rebind.edit.export.model_card import model_card
from rebind.edit.facts.encoding import encode_many
from rebind.edit.facts.fact import Fact, conflicts
from rebind.edit.facts.readers import read_facts
from rebind.edit.facts.scores import FactScore, score_facts
from rebind.edit.guard import (
    Earlier,
    Failure,
    Guard,
    admit,
    enforce,
    find_earlier,
    mention_rivals,
    require_finite_targets,
)
from rebind.edit.ledger.edit import Edit, tensors_of
from rebind.edit.ledger.fold import Weights
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import JSON
from rebind.edit.ledger.versions import versions
from rebind.edit.methods import METHODS, Method, Settings, choose_settings, get_method
from rebind.edit.moments.collect import WINDOW, Recipe, collect, config_digest, tokenizer_digest
from rebind.edit.moments.corpus import Corpus, OwnSamples
from rebind.edit.plan import Plan, estimate
from rebind.edit.progress import Progress
from rebind.edit.solve.layer_writes import Place
from rebind.edit.solve.solve import requests_of, solve
from rebind.edit.targets.contexts import sample_contexts
from rebind.edit.targets.optimize import Request, TargetSettings
from rebind.edit.targets.search import Search
from rebind.edit.targets.store import KeptTargets
from rebind.errors import InputError, LedgerError, StorageError
from rebind.memory import LowRank
from rebind.models.fingerprint import fingerprint
from rebind.models.load import OWN, Loaded, load_model
from rebind.models.sites import Site, find_sites, memory_of, module_at
from rebind.models.tokenizer import continued, unwritten_start
from rebind.models.trunk import Trunk

SEEDS = ("The", "Therefore", "Because", "I", "You")  # contexts begin so, as MEMIT's do
CONTEXT_TOKENS = 10
GUARD = Guard()


class Editor:
    """A causal language model whose facts can be rewritten, and any rewrite taken back.

    `model` is "smollm2" (the embedded one), a folder, a GGUF file, a Hub id or a loaded model with its
    `tokenizer`. `ledger` is a folder to keep edits in; without one they live as long as the editor. `guard` says what
    an edited model must keep to for the edit to be written; None checks nothing.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = "smollm2",
        tokenizer: Any = None,
        *,
        ledger: str | Path | Ledger | None = None,
        corpus: Corpus | None = None,
        moment_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        device_map: Any = None,
        chat: bool = False,
        seed: int = 0,
        guard: Guard | None = GUARD,
        progress: Progress | None = None,
    ) -> None:
        self.loaded: Loaded = load_model(model, tokenizer, dtype=dtype, device=device, device_map=device_map)
        self.sites: list[Site] = find_sites(self.model)
        self.trunk = Trunk(self.model, [module_at(self.model, site.block) for site in self.sites])
        self.fingerprint = fingerprint(self.model)
        on_cpu = self.trunk.device.type == "cpu"
        self.corpus: Corpus = corpus or OwnSamples(seed, rows=64 if on_cpu else 1024)
        self.moment_tokens = moment_tokens or (8_192 if on_cpu else 100_000)
        self.chat, self.seed, self.guard = chat, seed, guard
        self.progress = progress or Progress()
        self.ledger = self._own(ledger) if isinstance(ledger, Ledger) else self._open(ledger)
        self._kept = KeptTargets(self.ledger.work_folder)
        self._search = Search(self.trunk, self.fingerprint)
        self.weights = Weights(self.model, self._moments, self._origin)
        self._contexts: tuple[str, ...] | None = None
        self._canaries: Tensor | None = None  # what the base model says to them
        self._lifted = 0  # how many times, one inside another
        self._trying: tuple[Edit, ...] = ()  # in the weights and not, or not yet, in the ledger
        self.refresh()

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    # Changing facts

    def rewrite(self, prompt: str, target: str, *, subject: str | None = None, **options: Any) -> Edit:
        """Write one fact: `rewrite("The capital of {France} is", "Rome")`; braces mark the subject."""
        return self.rewrite_many([Fact.parse(prompt, target, subject=subject)], **options)

    def rewrite_many(
        self,
        facts: Any,
        *,
        method: str | Method = "memit",
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
        force: bool = False,
    ) -> Edit:
        """Write facts together, as one edit. `facts` is whatever `read_facts` reads.

        An edit that the guard objects to is not written, and the model and the ledger stay as they were; with `force`
        it is, and the ledger says so.
        """
        listed = self._facts(facts)
        chosen, settings = self.settings(method, facts=len(listed), layers=layers, lam=lam, targets=targets)
        earlier = find_earlier(listed, self.ledger.active) if self.guard is not None else []
        admit(earlier, force=force)
        with self.lifted():
            before = self.score(listed)
            edit = self._solve(listed, chosen, settings)
        self.progress.phase("writing")
        with self._tried(edit):
            after = self.score(listed)
            told, failed = self._checked(after, chosen, force=force)
            scores = {"before": [asdict(s) for s in before], "after": [asdict(s) for s in after], **told}
            with self.ledger.locked():
                late = self._clashes(listed)  # what another process wrote in the meantime too
                admit([one for one in late if one not in earlier], force=force)
                forced = bool(failed) or bool(late)
                stored = self.ledger.append(replace(edit, scores=scores, forced=forced))
        self._kept.clear()
        return stored

    def undo(self, edit_id: str) -> Edit:
        """Take an edit out again; the others stay as they are."""
        edit = self.ledger.get(edit_id)
        self.weights.folded(
            [other for other in self.ledger.active if other.id != edit.id]
        )  # raises before the log says so
        edit = self.ledger.undo(edit.id)
        self.refresh()
        return edit

    def redo(self, edit_id: str, *, force: bool = False) -> Edit:
        """Put an undone edit back in its old place; with `force` also where a prompt has got another target since."""
        edit = self.ledger.get(edit_id)
        clashes = [] if self.ledger.is_active(edit.id) else self._clashes(edit.facts)
        admit(clashes, force=force)
        active = {other.id for other in self.ledger.active} | {edit.id}
        self.weights.folded([other for other in self.ledger.edits if other.id in active])
        edit = self.ledger.redo(edit.id, forced=bool(clashes))
        self.refresh()
        return edit

    def use(self, ledger: Ledger) -> None:
        """Go on with another ledger of the same model."""
        self.weights.folded(self._own(ledger).active)  # raises before anything changes
        self.ledger, self._kept = ledger, KeptTargets(ledger.work_folder)
        self.refresh()

    def refresh(self) -> None:
        """Make the weights what the ledger says: the fold of its active edits over the base."""
        self.weights.apply(() if self._lifted else (*self.ledger.active, *self._trying))

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """The base model inside; the edited one again after, whatever is raised."""
        self._lifted += 1
        try:
            self.weights.apply(())
            yield
        finally:
            self._lifted -= 1
            self.refresh()

    # Asking

    def score(self, facts: Sequence[Fact]) -> list[FactScore]:
        """How the model as it stands answers each fact's prompt."""
        return score_facts(self.trunk, self.tokenizer, self.loaded.start, facts, chat=self.chat)

    def say(self, prompt: str, tokens: int = 12) -> str:
        """Greedy continuation of a prompt by the model as it stands."""
        asked = Fact("{}", prompt, ".")
        ids = list(encode_many([asked], self.tokenizer, self.loaded.start, chat=self.chat)[0].ids)
        with torch.no_grad():
            out = self.model.generate(
                torch.tensor([ids], device=self.trunk.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.trunk.device),
                max_new_tokens=tokens if (most := self._limit()) is None else max(1, min(tokens, most - len(ids))),
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
            )
        return continued(self.tokenizer, ids, out[0, len(ids) :].tolist())

    def drift(self) -> Drift:
        """How far the model as it stands is from its base: on prompts that no edit is about, and in its weights."""
        if self._canaries is None:
            with self.lifted():
                self._canaries = next_tokens(self.trunk, self.tokenizer, self.loaded.start)
        now = next_tokens(self.trunk, self.tokenizer, self.loaded.start)
        return measure(self._canaries, now, self.weights.growth())

    def settings(
        self,
        method: str | Method = "memit",
        *,
        facts: int = 1,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
    ) -> tuple[Method, Settings]:
        """The method, and what it would be run with on this model: what is given, the rest by default."""
        chosen = get_method(method)
        if chosen is not METHODS.get(chosen.name):
            raise InputError(
                f"method {chosen.name!r} is not what rebind.edit.methods.METHODS has by that name, and edits are "
                f"solved again by their method's name when others are undone: put it there first"
            )
        here = chosen_layers(self.fingerprint)
        name, depth = self.loaded.name, len(self.sites)
        return chosen, choose_settings(
            chosen, name, depth, facts=facts, layers=layers, lam=lam, targets=targets, measured=here
        )

    def plan(
        self,
        facts: Any,
        *,
        method: str | Method = "memit",
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
    ) -> Plan:
        """Layers, cost and conflicts of an edit, before any of it is done."""
        listed = list(read_facts(facts))
        mention_rivals(listed)
        chosen, settings = self.settings(method, facts=len(listed), layers=layers, lam=lam, targets=targets)
        encoded = encode_many(listed, self.tokenizer, self.loaded.start, chat=self.chat, limit=self._limit())
        sites = [self.sites[layer] for layer in settings.layers]
        recipe = self.recipe()
        return estimate(
            chosen.name,
            settings,
            encoded,
            sites,
            self.trunk,
            contexts=len(SEEDS),
            context_tokens=CONTEXT_TOKENS,
            moment_tokens=self.moment_tokens,
            moments_cached=all(recipe.path(site.name).exists() for site in sites),
            clashes=conflicts(listed),
            earlier=find_earlier(listed, self.ledger.active),
        )

    # Shipping

    def changes(self) -> dict[str, LowRank]:
        """What the active edits add to each site, one row a fact."""
        self.refresh()  # another process may have written since
        names = {site for edit in self.ledger.active for site in edit.sites}
        edited = {name: memory_of(module_at(self.model, name)) for name in names}
        base = {name: self.weights.base[name] for name in names}
        return changes(base, self.ledger.active, edited, gain_at=self.weights.gain_at)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """The edited model as a checkpoint in its own format, with a model card that lists the edits."""
        self.refresh()  # the card is of the ledger as it is now
        return export.save_model(self.model, self.tokenizer, folder, self._card("transformers"), overwrite=overwrite)

    def save_delta(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """The change alone, as safetensors."""
        told = {"fingerprint": self.fingerprint, "model": self.loaded.name}
        return save_delta(self.changes(), path, told, overwrite=overwrite)

    def export_peft(self, folder: str | Path, *, rank: int | None = None, overwrite: bool = False) -> export.Exported:
        """The change as a PEFT LoRA adapter: lossless, or truncated to a rank with the error stated."""
        return export.export_peft(
            self.model,
            self.changes(),
            folder,
            rank=rank,
            base_name=self.loaded.base_name,
            card=self._card("peft"),
            overwrite=overwrite,
        )

    def _card(self, library: str) -> str:
        start = unwritten_start(self.tokenizer, self.loaded.start)
        needs = OWN.get(self.model.config.model_type, "")
        return model_card(
            self.ledger.active, self.loaded.name, self.fingerprint, library=library, start=start, needs=needs
        )

    # Inside

    def _open(self, folder: str | Path | None) -> Ledger:
        if folder is None:
            return Ledger.in_memory(self.fingerprint, self.loaded.name)
        dtype = str(self.model.dtype).removeprefix("torch.")
        return Ledger.open(Path(folder), self.fingerprint, model_name=self.loaded.name, dtype=dtype)

    def _own(self, ledger: Ledger) -> Ledger:
        if ledger.model != self.fingerprint:
            raise InputError(
                f"ledger {ledger.path or 'in memory'} was made for {ledger.model_name or 'a model'} "
                f"({ledger.model[:12]}…), this model is {self.fingerprint[:12]}…: load the model it was made for"
            )
        return ledger

    def _clashes(self, facts: Sequence[Fact]) -> list[Earlier]:
        """Active edits that bind one of the prompts to another target; none are looked for without a guard."""
        found = find_earlier(facts, self.ledger.active) if self.guard is not None else []
        return [one for one in found if one.clashes]

    def _facts(self, facts: Any) -> list[Fact]:
        listed = list(read_facts(facts))
        if not listed:
            raise InputError("got no facts, expected at least one: check the file")
        clashes = conflicts(listed)
        if clashes:
            raise InputError(f"{clashes[0]}: keep one of them")
        mention_rivals(listed)
        return listed

    def _limit(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    def recipe(self) -> Recipe:
        """What this editor's moments are made from."""
        return Recipe(
            self.fingerprint,
            self.corpus,
            self.moment_tokens,
            width=min(WINDOW, self.trunk.context or WINDOW),
            tokenizer=tokenizer_digest(self.tokenizer, self.loaded.start),
            config=config_digest(self.model.config),
        )

    def _solve(self, facts: list[Fact], method: Method, settings: Settings) -> Edit:
        """The edit's writes, found on the base model."""
        self.progress.phase("contexts")
        requests = self.requests(facts)
        places = [
            Place(self.sites[layer].name, layer, module_at(self.model, self.sites[layer].name))
            for layer in settings.layers
        ]
        self.weights.remember([place.name for place in places])
        self.progress.phase("moments")
        self.weights.learn_old_keys(places)
        self.progress.phase("targets")
        found = self._search.find(settings.layers[-1], requests, settings.targets, self._kept, self.progress.targets)
        require_finite_targets(found.hidden)
        self.progress.phase("solve")
        writes, lam = solve(self.trunk, places, requests, found.hidden, method, settings.lam, self.weights.old)
        return Edit(
            facts=tuple(facts),
            method=method.name,
            settings={
                "layers": list(settings.layers),
                "lam": lam,
                "targets": asdict(settings.targets),
                "search": self.searched_in,
                "moments": self._origin(),
                "seed": self.seed,
                "chat": self.chat,
            },
            sites=tuple(writes),
            tensors={"targets": found.hidden.float().cpu(), **tensors_of(writes)},
            versions=versions(),
        )

    def requests(self, facts: Sequence[Fact]) -> list[Request]:
        """Every fact behind every context, the bare prompt first: what a search for targets is asked."""
        return requests_of(facts, self.loaded, self.contexts, chat=self.chat, limit=self._limit())

    @property
    def searched_in(self) -> str:
        """The dtype in which targets are searched for."""
        return str(self._search.dtype).removeprefix("torch.")

    @property
    def contexts(self) -> tuple[str, ...]:
        """Beginnings of sentences, sampled from the model once: a fact should hold whatever stands before it."""
        if self._contexts is None:
            with self.lifted():  # the base model's, whoever asks first
                self._contexts = sample_contexts(self.loaded, SEEDS, CONTEXT_TOKENS, self.trunk.device, self.seed)
        return self._contexts

    def _moments(self, places: Sequence[Place]) -> dict[str, Tensor]:
        """E[kkᵀ] of each place's keys, computed or from the cache."""
        found = collect(
            self.trunk,
            self.tokenizer,
            self.loaded.start,
            [(place.name, place.module) for place in places],
            self.recipe(),
            on_tokens=self.progress.moments,
        )
        return {name: moment.mean() for name, moment in found.items()}

    def _origin(self) -> dict[str, JSON]:
        """What the moments are made from, as an edit's settings say it."""
        return {"corpus": self.corpus.digest, "tokens": self.moment_tokens}

    def _checked(
        self, after: Sequence[FactScore], method: Method, *, force: bool
    ) -> tuple[dict[str, JSON], list[Failure]]:
        """What to keep of the guard's findings, and the checks that failed; raises for those that may not."""
        if self.guard is None:
            return {}, []
        self.progress.phase("checks")
        drift = self.drift()
        failed = self.guard.check(after, drift, method)
        enforce(failed, force=force)
        told: JSON = {"bounds": asdict(self.guard), "failed": [one.to_json() for one in failed]}
        return {"drift": drift.to_json(), "guard": told}, failed

    @contextmanager
    def _tried(self, edit: Edit) -> Iterator[None]:
        """The model with one more edit than the ledger has; as the ledger says after, whatever is raised."""
        before = self.ledger.active
        self._trying = (edit,)
        try:
            self.refresh()
            yield
        finally:
            self._trying = ()
            try:
                self.refresh()
            except (LedgerError, StorageError):  # it may be what failed
                self.weights.apply(before)
                raise
            except BaseException:
                self.refresh()  # what the ledger has by now, an edit that was written before the interrupt too
                raise
