"""`Editor`: a language model, a ledger of what was changed in it, and the verbs to change it.

The weights of a site are always the fold of the ledger's active edits over the base weights. Targets and
keys are found on the base model, so an edit is the same whatever else the ledger holds, and undoing any of
them is folding again without it: no optimisation, and the same bytes as if it had never been made.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from rebind.edit import export
from rebind.edit.card import model_card
from rebind.edit.corpus import Corpus, OwnSamples
from rebind.edit.edits import Edit, fold
from rebind.edit.encoding import encode_many
from rebind.edit.facts import Fact, conflicts
from rebind.edit.kept import KeptTargets, resume_targets
from rebind.edit.ledger import Ledger
from rebind.edit.methods import Method, Old, Settings, default_settings, get_method, with_changes
from rebind.edit.models import Loaded, fingerprint, load_model
from rebind.edit.moments import Recipe, collect, tokenizer_digest
from rebind.edit.plan import Plan, estimate
from rebind.edit.reading import read_facts
from rebind.edit.sampling import sample
from rebind.edit.scores import FactScore, score_facts
from rebind.edit.sites import Site, find_sites, memory_of, module_at, write_memory
from rebind.edit.spread import Place, spread, suitable_lambda, unchanged
from rebind.edit.targets import Found, Prompt, Request, TargetSettings
from rebind.edit.trunk import Trunk
from rebind.errors import InputError
from rebind.memory import LowRank

SEEDS = ("The", "Therefore", "Because", "I", "You")  # contexts begin so, as MEMIT's do
CONTEXT_TOKENS = 10


@dataclass(frozen=True)
class Progress:
    """What an editor tells of its work; each may be replaced by something that draws a bar."""

    phase: Callable[[str], None] = lambda name: None
    moments: Callable[[int, int], None] = lambda done, wanted: None  # tokens
    targets: Callable[[int, int, float], None] = lambda step, done, loss: None  # step, facts done, mean loss


class Editor:
    """A causal language model whose facts can be rewritten, and any rewrite taken back.

    `model` is "smollm2" (the embedded one), a folder, a GGUF file, a Hub id or a loaded model with its
    `tokenizer`. `ledger` is a folder to keep edits in; without one they live as long as the editor.
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
        progress: Progress | None = None,
    ) -> None:
        self.loaded: Loaded = load_model(model, tokenizer, dtype=dtype, device=device, device_map=device_map)
        self.sites: list[Site] = find_sites(self.model)
        self.trunk = Trunk(self.model, [module_at(self.model, site.block) for site in self.sites])
        self.fingerprint = fingerprint(self.model)
        on_cpu = self.trunk.device.type == "cpu"
        self.corpus: Corpus = corpus or OwnSamples(seed, rows=64 if on_cpu else 1024)
        self.moment_tokens = moment_tokens or (8_192 if on_cpu else 100_000)
        self.chat, self.seed = chat, seed
        self.progress = progress or Progress()
        self.ledger = ledger if isinstance(ledger, Ledger) else self._open(ledger)
        self._kept = KeptTargets(self.ledger.work_folder)
        self._base: dict[str, Tensor] = {}  # what each touched site's weights were, as [d_v, d_k]
        self._old: dict[str, Old] = {}
        self._contexts: tuple[str, ...] | None = None
        self._lifted = 0  # how many times, one inside another
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
    ) -> Edit:
        """Write facts together, as one edit. `facts` is whatever `read_facts` reads."""
        chosen, settings = self._settings(method, layers, lam, targets)
        listed = self._facts(facts)
        with self.lifted():
            before = self.score(listed)
            edit = self._solve(listed, chosen, settings)
        self.progress.phase("writing")
        with self._tried(edit):
            after = self.score(listed)
        scores = {"before": [asdict(s) for s in before], "after": [asdict(s) for s in after]}
        stored = self.ledger.append(replace(edit, scores=scores))
        self._kept.clear()
        self.refresh()
        return stored

    def undo(self, edit_id: str) -> Edit:
        """Take an edit out again; the others stay as they are."""
        edit = self.ledger.get(edit_id)
        self._check_fold([other for other in self.ledger.active if other.id != edit.id])
        edit = self.ledger.undo(edit.id)
        self.refresh()
        return edit

    def redo(self, edit_id: str) -> Edit:
        """Put an undone edit back in its old place."""
        edit = self.ledger.get(edit_id)
        active = {other.id for other in self.ledger.active} | {edit.id}
        self._check_fold([other for other in self.ledger.edits if other.id in active])
        edit = self.ledger.redo(edit.id)
        self.refresh()
        return edit

    def use(self, ledger: Ledger) -> None:
        """Go on with another ledger of the same model."""
        self.ledger, self._kept = ledger, KeptTargets(ledger.work_folder)
        self.refresh()

    def refresh(self) -> None:
        """Make the weights what the ledger says: the fold of its active edits over the base."""
        self._apply(() if self._lifted else self.ledger.active)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """The base model inside; the edited one again after, whatever is raised."""
        self._lifted += 1
        try:
            self._apply(())
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
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
            )
        return str(self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

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
        chosen, settings = self._settings(method, layers, lam, targets)
        listed = list(read_facts(facts))
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
            clashes=conflicts([*listed, *self._written()]),
        )

    # Shipping

    def changes(self) -> dict[str, LowRank]:
        """What the active edits add to each site, one row a fact."""
        names = {site for edit in self.ledger.active for site in edit.sites}
        edited = {name: memory_of(module_at(self.model, name)) for name in names}
        base = {name: self._base[name] for name in names}
        return export.changes(base, self.ledger.active, edited, gain_at=self._gain_at)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """The edited model as a checkpoint in its own format, with a model card that lists the edits."""
        return export.save_model(self.model, self.tokenizer, folder, self._card("transformers"), overwrite=overwrite)

    def save_delta(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """The change alone, as safetensors."""
        told = {"fingerprint": self.fingerprint, "model": self.loaded.name}
        return export.save_delta(self.changes(), path, told, overwrite=overwrite)

    def export_peft(self, folder: str | Path, *, rank: int | None = None, overwrite: bool = False) -> export.Exported:
        """The change as a PEFT LoRA adapter: lossless, or truncated to a rank with the error stated."""
        return export.export_peft(
            self.model,
            self.changes(),
            folder,
            rank=rank,
            base_name=self._base_name(),
            card=self._card("peft"),
            overwrite=overwrite,
        )

    def _base_name(self) -> str:
        """What peft can load the base by: a Hub id, or the folder it came from."""
        home = Path(str(getattr(self.model.config, "_name_or_path", "")))
        local = "/" not in self.loaded.name and home.is_dir() and str(home) != "."
        return str(home.resolve()) if local else self.loaded.name

    def _card(self, library: str) -> str:
        return model_card(self.ledger.active, self.loaded.name, self.fingerprint, library=library)

    # Inside

    def _open(self, folder: str | Path | None) -> Ledger:
        if folder is None:
            return Ledger.in_memory(self.fingerprint, self.loaded.name)
        return Ledger.open(Path(folder), self.fingerprint, model_name=self.loaded.name)

    def _settings(
        self,
        method: str | Method,
        layers: Sequence[int] | None,
        lam: float | None,
        targets: TargetSettings | None,
    ) -> tuple[Method, Settings]:
        chosen = get_method(method)
        settings = default_settings(chosen, self.loaded.name, len(self.sites))
        picked = None if layers is None else tuple(sorted(set(layers)))
        settings = with_changes(settings, layers=picked, lam=lam, targets=targets)
        outside = [layer for layer in settings.layers if not 0 <= layer < len(self.sites) - 1]
        if outside or not settings.layers:
            raise InputError(
                f"layers are {list(settings.layers)}, expected some of 0 to {len(self.sites) - 2}: at least one block "
                f"must lie above the last edited one"
            )
        return chosen, settings

    def _facts(self, facts: Any) -> list[Fact]:
        listed = list(read_facts(facts))
        if not listed:
            raise InputError("got no facts, expected at least one: check the file")
        clashes = conflicts(listed)
        if clashes:
            raise InputError(f"{clashes[0]}: keep one of them")
        return listed

    def _written(self) -> list[Fact]:
        return [fact for edit in self.ledger.active for fact in edit.facts]

    def _limit(self) -> int | None:
        return getattr(self.model.config, "max_position_embeddings", None)

    def recipe(self) -> Recipe:
        """What this editor's moments are made from."""
        made_of = tokenizer_digest(self.tokenizer, self.loaded.start)
        return Recipe(self.fingerprint, self.corpus, self.moment_tokens, tokenizer=made_of)

    def _solve(self, facts: list[Fact], method: Method, settings: Settings) -> Edit:
        """The edit's writes, found on the base model."""
        self.progress.phase("contexts")
        requests = self._requests(facts)
        places = [
            Place(self.sites[layer].name, layer, module_at(self.model, self.sites[layer].name))
            for layer in settings.layers
        ]
        self._remember(places)
        self.progress.phase("moments")
        self._learn_old_keys(places)
        self.progress.phase("targets")
        found = self._targets(requests, settings)
        self.progress.phase("solve")
        lam = settings.lam

        def gain(place: Place, keys: Tensor) -> Tensor:
            nonlocal lam
            if lam is None:  # the first layer's keys decide for all
                lam = suitable_lambda(keys, self._old[place.name].factored)
            # As if nothing had been written before: later layers' keys depend on this gain, and they are stored.
            # What earlier edits change comes in when the ledger is folded.
            return method.gain(keys, self._old[place.name], lam, _keys_of((), place.name, keys))

        writes = spread(self.trunk, places, requests, found.hidden, gain)
        tensors = {"targets": found.hidden.float().cpu()}
        for name, write in writes.items():
            for part, tensor in zip(("keys", "values", "gain"), write.tensors(), strict=True):
                tensors[f"{name}/{part}"] = tensor.cpu()
        return Edit(
            facts=tuple(facts),
            method=method.name,
            settings={
                "layers": list(settings.layers),
                "lam": lam,
                "targets": asdict(settings.targets),
                "moments": {"corpus": self.corpus.digest, "tokens": self.moment_tokens},
                "seed": self.seed,
                "chat": self.chat,
            },
            sites=tuple(writes),
            tensors=tensors,
            versions=_versions(),
        )

    def _targets(self, requests: Sequence[Request], settings: Settings) -> Found:
        with _quick_products():
            return resume_targets(
                self.trunk,
                settings.layers[-1],
                requests,
                settings.targets,
                self.fingerprint,
                self._kept,
                on_step=self.progress.targets,
            )

    def _requests(self, facts: Sequence[Fact]) -> list[Request]:
        """Every fact behind every context, the bare prompt first."""
        encode = partial(encode_many, facts, self.tokenizer, self.loaded.start, chat=self.chat, limit=self._limit())
        bare = encode()
        targets = [one.target for one in bare]
        encoded = [bare, *(encode(context=context, targets=targets) for context in self.contexts)]
        return [
            Request(tuple(Prompt(one.ids, one.subject_last) for one in rows), rows[0].target)
            for rows in zip(*encoded, strict=True)
        ]

    @property
    def contexts(self) -> tuple[str, ...]:
        """Beginnings of sentences, sampled from the model once: a fact should hold whatever stands before it."""
        if self._contexts is None:
            rows = []
            for index, seed in enumerate(SEEDS):
                first = torch.tensor([self.tokenizer(seed, add_special_tokens=False).input_ids])
                text = sample(
                    self.model,
                    self.loaded.start,
                    first.to(self.trunk.device),
                    max(CONTEXT_TOKENS, first.shape[-1]),
                    seed=self.seed + index,
                    top_k=5,
                )
                rows.append(str(self.tokenizer.decode(text[0], skip_special_tokens=True)).strip() + ". ")
            self._contexts = tuple(rows)
        return self._contexts

    def _learn_old_keys(self, places: Sequence[Place]) -> None:
        missing = [place for place in places if place.name not in self._old]
        if not missing:
            return
        moments = collect(
            self.trunk,
            self.tokenizer,
            self.loaded.start,
            [(place.name, place.module) for place in missing],
            self.recipe(),
            on_tokens=self.progress.moments,
        )
        for place in missing:
            device = memory_of(place.module).device
            self._old[place.name] = Old(moments[place.name].mean().to(device))

    def _remember(self, places: Sequence[Place]) -> None:
        for place in places:
            if place.name not in self._base:
                self._base[place.name] = memory_of(place.module).detach().clone()

    def _apply(self, edits: Sequence[Edit]) -> None:
        """Write the fold of these edits into the model, or nothing at all."""
        for name, weights in self._folded(edits).items():
            write_memory(module_at(self.model, name), weights)

    def _check_fold(self, edits: Sequence[Edit]) -> None:
        """Raise what folding these edits would raise, before the ledger says that they are in the weights."""
        self._folded(edits)

    def _folded(self, edits: Sequence[Edit]) -> dict[str, Tensor]:
        """The weights of every touched site."""
        names = {site for edit in edits for site in edit.sites}
        for name in names - self._base.keys():
            self._base[name] = memory_of(module_at(self.model, name)).detach().clone()
        self._learn_for(edits)
        return {name: fold(base, name, edits, self._gain_at(name)) for name, base in self._base.items()}

    def _learn_for(self, edits: Sequence[Edit]) -> None:
        """Moments that the gains of these edits need, of the base model whatever is written in it now."""
        mine = {"corpus": self.corpus.digest, "tokens": self.moment_tokens}
        sites = dict[str, None]()
        for edit in edits:
            if get_method(edit.method).remembers:
                if edit.settings["moments"] != mine:
                    raise InputError(
                        f"edit {edit.id or '(new)'} was solved with moments of {edit.settings['moments']}, this editor "
                        f"has {mine}: open it with that corpus and moment_tokens"
                    )
                sites |= dict.fromkeys(edit.sites)
        missing = [Place(name, 0, module_at(self.model, name)) for name in sites if name not in self._old]
        if missing:
            with unchanged([module_at(self.model, name) for name in self._base]):
                for name, base in self._base.items():
                    write_memory(module_at(self.model, name), base)
                self._learn_old_keys(missing)

    def _gain_at(self, site: str) -> Callable[[Edit, Sequence[Edit]], Tensor]:
        """An edit's gain at a site: as stored, or found again where it depends on the edits before it."""

        def gain(edit: Edit, earlier: Sequence[Edit]) -> Tensor:
            stored = edit.write(site)
            method = get_method(edit.method)
            if not method.remembers:
                return stored.gain
            keys = stored.keys.double().to(self._old[site].moment.device)
            lam = float(edit.settings["lam"])  # type: ignore[arg-type]
            return method.gain(keys, self._old[site], lam, _keys_of(earlier, site, keys)).float()

        return gain

    @contextmanager
    def _tried(self, edit: Edit) -> Iterator[None]:
        """The model with one more edit than the ledger has; as the ledger says again after."""
        try:
            self._apply((*self.ledger.active, edit))
            yield
        finally:
            self.refresh()


def _keys_of(edits: Sequence[Edit], site: str, like: Tensor) -> Tensor:
    """The keys that edits wrote at a site, [m, d_k]."""
    rows = [edit.write(site).keys.to(like) for edit in edits if site in edit.sites]
    return torch.cat(rows) if rows else like.new_zeros(0, like.shape[-1])


@contextmanager
def _quick_products() -> Iterator[None]:
    """TensorFloat-32 on GPUs that have it: a target is where a search ended, not a number with eight digits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _versions() -> dict[str, str]:
    return {
        "rebind": _version_of("rebind"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
