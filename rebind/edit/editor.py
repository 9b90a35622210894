"""`Editor`: a language model, the ledger of its edits, and the verbs to edit it.

The weights of a site are always the fold of the ledger's active edits over the base weights. Targets and keys are
computed on the base model, so an edit does not depend on what else is in the ledger, and undoing one means folding
again without it: no optimization, and the same bytes as if the edit had never been made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rebind.edit import DEFAULT_METHOD, export
from rebind.edit.checks import EditCheck
from rebind.edit.dense.consolidate import Consolidation, consolidate
from rebind.edit.dense.draft import draft_rows
from rebind.edit.dense.files import HEADER, StoredMemory, save_memory
from rebind.edit.dense.rows import unrelated
from rebind.edit.dense.subjects import current_facts
from rebind.edit.drafts import DraftTools, draft_writes
from rebind.edit.edited_model import EditedModel
from rebind.edit.facts import Fact, conflicts, read_facts
from rebind.edit.guard import (
    Drift,
    EarlierEdit,
    Guard,
    check_earlier_edits,
    find_earlier_edits,
    warn_of_shared_keys,
)
from rebind.edit.learning import Lesson, facts_in_text
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.methods import Method, get_method
from rebind.edit.moments import Corpus, Moments, OwnSamples
from rebind.edit.outcome import MAX_FACTS
from rebind.edit.outline import ModelOutline
from rebind.edit.plan import Plan, PromptSize, estimate, prompts_per_fact
from rebind.edit.progress import Progress
from rebind.edit.settings import EditSettings, choose_settings, measured_layers
from rebind.edit.targets import ContextSettings, FactPrompts, TargetSearch, TargetSettings, TargetStates, TargetStore
from rebind.edit.targets.framings import (
    applicable_framings,
    encode_framings,
    sample_contexts,
    warn_of_sinks,
    warn_of_unused_paraphrases,
)
from rebind.edit.targets.kept import (
    SubjectPrompts,
    encode_kept,
    encode_protected,
    subject_prompts,
    warn_of_unused_keep,
)
from rebind.errors import InputError, LedgerWarning
from rebind.limits import MAX_SEED
from rebind.memory import LowRank
from rebind.memory.checks import require_number, require_type
from rebind.models.language_model import LanguageModel
from rebind.models.load import OWN_MODEL_TYPES
from rebind.models.prompts import EncodedPrompt, ends_with_word
from rebind.models.scoring import FactScore
from rebind.models.sites import is_quantized, memory_of, module_at
from rebind.models.weights.placement import is_sharded
from rebind.parallel import from_writer, gather, is_writer, ranks, share, unite

# Facts, dictionaries or (prompt, target) pairs; or the path of a JSONL, JSON or CSV file (see `read_facts`)
FactSource: TypeAlias = str | Path | Fact | Mapping[str, object] | Iterable[Fact | Mapping[str, object] | Sequence[str]]


def open_ledger(folder: str | Path, model: str, *, model_name: str = "", dtype: str = "") -> Ledger:
    """Open or create a ledger. Of several processes, the writer opens it first, so that only it creates files."""
    ledgers: list[Ledger] = []

    def open_here() -> None:
        ledgers.append(Ledger.open(folder, model, model_name=model_name, dtype=dtype))

    gather(None, "before a ledger is opened")  # wait until every process has checked whether it exists
    from_writer(open_here, "open ledger")
    if not ledgers:
        open_here()
    return ledgers[0]


def _require_consistent(facts: list[Fact]) -> list[Fact]:
    """Return the facts, or raise if there are none or two of them contradict each other."""
    if not facts:
        raise InputError("There are no facts to write", expected="at least one", code="no_facts")
    if conflicting := conflicts(facts):
        problem = f"Facts have different targets after the same prompt: {conflicting[0]}"
        raise InputError(problem, advice="Keep one of them", code="conflicting_facts")
    return facts


def _warn_of_unread_memory(model: PreTrainedModel) -> None:
    """Warn if the folder of a model has a dense memory beside the weights: an editor starts without one."""
    memory = Path(model.config._name_or_path or "/") / export.MEMORY_FOLDER
    if (memory / HEADER).is_file():
        warnings.warn(
            f"{memory} has facts that this model does not know, because an editor does not read an exported memory. "
            f"Use the base model with the ledger of the edits, or attach the memory in a program of your own.",
            LedgerWarning,
            stacklevel=3,
        )


class Editor:
    """A causal language model in which facts can be rewritten, and every rewrite undone.

    Args:
        model: "smollm2" (the embedded model), a folder, a GGUF file, a Hub id, or a loaded model.
        tokenizer: the model's tokenizer; required with a loaded model.
        ledger: the folder that stores the edits. By default they are lost with the editor.
        corpus: the text that old keys are computed from; by default samples from the model itself.
        moment_tokens: the number of tokens of the corpus to read.
        dtype: the dtype of the weights; by default that of the stored weights.
        device: the device of the model; by default the CPU.
        device_map: a map of modules to devices, as in transformers.
        seed: the random seed for sampled contexts and sampled text.
        guard: the bounds that an edited model must satisfy; None turns the checks off.
        progress: functions that receive progress reports.
        contexts: how the contexts of prompts are sampled.
        framings: the ways in which facts will be asked (see `rebind.edit.targets.framings`); by default all that apply.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel = "smollm2",
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        ledger: str | Path | Ledger | None = None,
        corpus: Corpus | None = None,
        moment_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        device_map: str | dict[str, int | str] | None = None,
        framings: Sequence[str] | None = None,
        seed: int = 0,
        guard: Guard | None = Guard(),  # noqa: B008 - frozen
        progress: Progress | None = None,
        contexts: ContextSettings = ContextSettings(),  # noqa: B008 - frozen
    ) -> None:
        require_number("seed", seed, most=MAX_SEED, whole=True, code="invalid_seed")
        require_type("contexts", contexts, ContextSettings, "ContextSettings, such as ContextSettings.of(5)")
        self.language_model = LanguageModel.load(model, tokenizer, dtype=dtype, device=device, device_map=device_map)
        self.model, self.tokenizer = self.language_model.model, self.language_model.tokenizer
        if ranks().count > 1 and is_sharded(self.model):
            problem = "The processes share the weights of the model, so they cannot also share facts"
            advice = "Do not call rebind.parallel.join_processes, and edit in all processes alike"
            raise InputError(problem, advice=advice, code="sharded_model")
        _warn_of_unread_memory(self.model)
        self.sites = self.language_model.sites
        self.fingerprint = self.language_model.fingerprint  # computed before any edit
        self.seed, self.guard, self.context_settings = seed, guard, contexts
        on_cpu = self.language_model.device.type == "cpu"
        self.moments = Moments(
            self.language_model,
            corpus or OwnSamples(seed, rows=64 if on_cpu else 1024),
            moment_tokens or (8_192 if on_cpu else 100_000),
            progress=progress,
        )
        self.edited = EditedModel(self.language_model, self.moments, self._open_ledger(ledger))
        self.weights = self.edited.weights
        self.framings = applicable_framings(self.language_model, framings)
        word_parts = self.language_model.word_parts
        self.target_search = TargetSearch(self.language_model.trunk, self.fingerprint, word_parts)
        self._target_store = TargetStore(self.ledger.work_folder)
        self._contexts: tuple[str, ...] | None = None
        self.refresh()

    @property
    def ledger(self) -> Ledger:
        return self.edited.ledger

    @property
    def progress(self) -> Progress:
        return self.moments.progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self.moments.progress = progress

    # Edit

    def rewrite(
        self,
        prompt: str,
        target: str,
        *,
        subject: str | None = None,
        method: str | Method = DEFAULT_METHOD,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
        force: bool = False,
    ) -> Edit:
        """Write one fact: `rewrite("The capital of {France} is", "Rome")`. Braces, or `subject`, mark the subject."""
        fact = Fact.parse(prompt, target, subject=subject)
        return self.rewrite_many([fact], method=method, layers=layers, lam=lam, targets=targets, force=force)

    def rewrite_many(
        self,
        facts: FactSource,
        *,
        method: str | Method = DEFAULT_METHOD,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
        force: bool = False,
    ) -> Edit:
        """Write facts together, as one edit.

        If the edited model fails a check of the guard, GuardError is raised and the model and the ledger stay as they
        were; `force` writes the edit anyway, and the ledger records that. The same holds for an interrupt at any
        moment: the weights always equal the ledger, and the next attempt reuses the targets of this one.
        """
        new_facts = _require_consistent(list(read_facts(facts)))
        settings = self.settings(method, facts=len(new_facts), layers=layers, lam=lam, targets=targets)
        if not settings.method.dense:
            warn_of_shared_keys(new_facts)
        warn_of_sinks(self.language_model, new_facts, self.framings)
        warn_of_unused_paraphrases(new_facts, self.framings)
        warn_of_unused_keep(new_facts, settings.targets.keep)
        earlier = self._earlier_edits(new_facts, settings.method)
        check_earlier_edits(earlier, force=force)
        with self.base_model():
            prompts = self._subject_prompts(new_facts, settings)
            check = EditCheck(self.edited, self.guard, new_facts, prompts, self.framings) if is_writer() else None
            tools = self._draft_tools(settings)
            if settings.method.dense:
                draft = draft_rows(tools, new_facts, prompts, self.ledger.active)
            else:
                draft = draft_writes(tools, new_facts, prompts)
            edit = tools.make_edit(new_facts, draft)

        def write() -> str:
            assert check is not None
            forced = check.run(edit, settings, draft.search, self.progress.phase, force=force)
            with self.ledger.locked():
                # Another process may have added an edit in the meantime.
                clashes = self._clashes(edit)
                check_earlier_edits([other for other in clashes if other not in earlier], force=force)
                return self.ledger.append(replace(edit, scores=check.scores, forced=forced or bool(clashes))).id

        self.progress.phase("writing")
        with self.edited.trial(edit):
            stored = self._stored_edit(from_writer(write, "edit"), edit)
        self._target_store.clear()
        return stored

    def learn(
        self,
        text: str,
        *,
        method: str | Method = DEFAULT_METHOD,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
        force: bool = False,
    ) -> Lesson:
        """Write the facts that a text states and the model does not say, as one edit.

        The result lists the facts that were written, those that the model already says, those that the text
        contradicts (which are not written), and the sentences that were not understood. `facts_in_text` in
        `rebind.edit.learning` does the same without writing.
        """
        facts = facts_in_text(self.language_model, text)
        new = [statement.fact for statement in facts.new]
        options = {"method": method, "layers": layers, "lam": lam, "targets": targets, "force": force}
        return Lesson(facts, self.rewrite_many(new, **options) if new else None)  # type: ignore[arg-type]

    def consolidate(
        self,
        budget: int | None = None,
        *,
        batch: int = 100,
        method: str | Method = "recursive",
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
    ) -> Consolidation:
        """Move facts from the dense memory into the weights: the oldest first, at most `budget`, as far as they fit.

        Facts are tried in batches of `batch` subjects, until the guard rejects the drift or the growth. A fact moves
        if the edited weights say it wherever the dense memory said it. The result is one edit, and undoing it returns
        the facts to the dense memory.
        """
        for name, value in (("budget", 1 if budget is None else budget), ("batch", batch)):
            require_number(name, value, least=1, whole=True)
        active = self.ledger.active
        facts = len(current_facts(active))
        count = max(1, facts if budget is None else min(budget, facts))
        settings = self.settings(method, facts=count, layers=layers, lam=lam, targets=targets)
        if settings.method.dense:
            raise InputError("Method dense changes no weights", expected="another method", code="dense_consolidation")
        result = consolidate(self._draft_tools(settings), active, self.guard, budget=budget, batch=batch)
        self._target_store.clear()
        return result

    def undo(self, edit_id: str) -> Edit:
        """Undo an edit; the others stay as they are."""
        edit = self.ledger.get(edit_id)
        self.edited.fold(self.ledger.active.without(edit.id))  # raises before anything changes
        edit = self.ledger.undo(edit.id)
        self.refresh()
        return edit

    def redo(self, edit_id: str, *, force: bool = False) -> Edit:
        """Restore an undone edit at its old position; `force` does so even if one of its prompts has a new target."""
        edit = self.ledger.get(edit_id)
        clashes = [] if self.ledger.is_active(edit.id) else self._clashes(edit)
        check_earlier_edits(clashes, force=force)
        self.edited.fold(self.ledger.active.including(edit.id))
        edit = self.ledger.redo(edit.id, forced=bool(clashes))
        self.refresh()
        return edit

    def use_ledger(self, ledger: Ledger) -> None:
        """Continue with another ledger of the same model."""
        ledger.require_model(self.fingerprint, self.language_model.name)
        self.edited.fold(ledger.active)  # raises before anything changes
        self.edited.ledger, self._target_store = ledger, TargetStore(ledger.work_folder)
        self.refresh()

    def refresh(self) -> None:
        """Bring the model to the fold of the ledger's active edits, including those of other processes."""
        self.edited.refresh()

    def base_model(self) -> AbstractContextManager[None]:
        """Run a block on the base model; afterwards the edits are restored, even after an exception."""
        return self.edited.base_model()

    # Ask

    def say(self, prompt: str, tokens: int = 12) -> str:
        """Return the model's greedy continuation of a prompt."""
        return self.language_model.generate([prompt], tokens)[0]

    def score(self, facts: Sequence[Fact]) -> list[FactScore]:
        """Score how strongly the model believes each fact."""
        return self.language_model.score([fact.as_prompt() for fact in facts])

    def drift(self) -> Drift:
        """Measure how far the model is from its base model, on canary prompts and in its weights."""
        return self.edited.drift()

    def settings(
        self,
        method: str | Method = DEFAULT_METHOD,
        *,
        facts: int = 1,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
    ) -> EditSettings:
        """Return the settings that an edit of this many facts would run with."""
        name, depth, measured = self.language_model.name, len(self.sites), measured_layers(self.fingerprint)
        return choose_settings(
            get_method(method), name, depth, facts=facts, layers=layers, lam=lam, targets=targets, measured=measured
        )

    def plan(
        self,
        facts: FactSource,
        *,
        method: str | Method = DEFAULT_METHOD,
        layers: Sequence[int] | None = None,
        lam: float | None = None,
        targets: TargetSettings | None = None,
    ) -> Plan:
        """Return the layers, the cost and the conflicts of an edit, without running it."""
        new_facts = list(read_facts(facts))
        settings = self.settings(method, facts=len(new_facts), layers=layers, lam=lam, targets=targets)
        if not settings.method.dense:
            warn_of_shared_keys(new_facts)
        prompts = self.language_model.encode([fact.as_prompt() for fact in new_facts])
        sites = [self.sites[layer] for layer in settings.layers]
        modules = [site.block if settings.method.dense else site.name for site in sites]
        on_cpu = self.language_model.device.type == "cpu"
        return estimate(
            ModelOutline.of(self.model, self.language_model.name, sites=self.sites, on_cpu=on_cpu),
            [PromptSize.of(prompt) for prompt in prompts],
            settings,
            prompts_per_fact(settings, self.framings, self.context_settings),
            moment_tokens=self.moments.tokens,
            moments_cached=all(self.moments.path(module).exists() for module in modules),
            clashes=conflicts(new_facts),
            earlier=self._earlier_edits(new_facts, settings.method),
        )

    # Export

    def changes(self) -> dict[str, LowRank]:
        """Return the low-rank change of each site by the active edits, without the facts in the dense memory."""
        self.refresh()
        export.require_changed_weights(self.ledger.active)
        export.warn_of_dense_facts(self.ledger.active)
        names = {site for kind in self.ledger.active.kinds() for site in kind.sites}
        edited = {name: memory_of(module_at(self.model, name)) for name in names}
        return export.compute_changes(self.weights.base, self.ledger.active, edited, writes_at=self.weights.writes_at)

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None, overwrite: bool = False) -> Path:
        """Save the edited model as a checkpoint in its own format, with a model card that lists the edits.

        `dtype` is the dtype of the saved weights; by default `checkpoint_dtype()`.
        """
        self.refresh()
        if any(is_quantized(module_at(self.model, name)) for name in self.weights.base):
            problem = "The model is quantized, and edits are stored beside its weights, so a checkpoint would lack them"
            raise InputError(problem, advice="Export the change as an adapter", code="quantized_checkpoint")
        dtype, card = dtype or self.checkpoint_dtype(), self._card("transformers")
        memory = self.memory() if self.edited.dense.memories else None
        return export.save_model(
            self.model, self.tokenizer, folder, card, dtype=dtype, memory=memory, overwrite=overwrite
        )

    def memory(self) -> StoredMemory:
        """Return the dense memory of the active edits, for `save_memory` or `rebind.attach`."""
        self.refresh()
        export.require_dense_facts(self.ledger.active)
        memories = self.edited.dense.memories
        with self.base_model():
            return self.edited.dense.stored(memories, current_facts(self.ledger.active))

    def save_memory(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Save the dense memory; `rebind.attach(model, folder)` puts it onto a plain model, in any process."""
        return save_memory(self.memory(), folder, overwrite=overwrite)

    def checkpoint_dtype(self) -> torch.dtype:
        """Return the dtype that `save` writes: that of the model, or 16 bits if it was converted from a GGUF file."""
        model = LanguageModel(self.model, self.tokenizer, start=self.language_model.start)
        return export.choose_dtype(self.model, lambda: export.count_said(model, self.ledger.active))

    def save_delta(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save the change alone, as safetensors."""
        metadata = {"fingerprint": self.fingerprint, "model": self.language_model.name}
        return export.save_delta(self.changes(), path, metadata, overwrite=overwrite)

    def export_peft(
        self, folder: str | Path, *, rank: int | None = None, overwrite: bool = False
    ) -> export.AdapterExport:
        """Save the change as a PEFT LoRA adapter, exactly or truncated to `rank`; the result has the error."""
        changes, name, card = self.changes(), self.language_model.base_name, self._card("peft")
        return export.export_peft(
            self.model, changes, folder, rank=rank, base_name=name, card=card, overwrite=overwrite
        )

    def export_gguf(
        self, file: str | Path, *, rank: int | None = None, overwrite: bool = False
    ) -> export.AdapterExport:
        """Save the change as a LoRA adapter for llama.cpp, a GGUF file, with the rank of `export_peft`."""
        name = self.language_model.name
        return export.export_gguf(self.model, self.changes(), file, rank=rank, base_name=name, overwrite=overwrite)

    def _card(self, library: str) -> str:
        start = self.language_model.start_text
        needs = "rebind.nn" if self.model.config.model_type in OWN_MODEL_TYPES else ""
        name = self.language_model.name
        return export.model_card(self.ledger.active, name, self.fingerprint, library=library, start=start, needs=needs)

    # Steps of an edit

    def _subject_prompts(self, facts: Sequence[Fact], settings: EditSettings) -> list[SubjectPrompts]:
        """Return what the base model says about each subject; the facts are divided between processes.

        Where the search keeps nothing, the model is asked only about the facts that the guard will probe: thousands of
        facts would otherwise take longer to ask about than to write.
        """
        keeps = settings.targets.keep > 0
        asked = facts if keeps else facts[:MAX_FACTS]
        share_of_prompts = subject_prompts(self.language_model, share(asked), chat=keeps and "chat" in self.framings)
        about = [
            SubjectPrompts(**{**fields, "kept": tuple(fields["kept"]), "held_out": tuple(fields["held_out"])})
            for fields in unite([asdict(prompts) for prompts in share_of_prompts])
        ]
        return about + [SubjectPrompts()] * (len(facts) - len(asked))

    def _stored_edit(self, edit_id: str, edit: Edit) -> Edit:
        """Return the edit that the writer appended. Each process appends it to a ledger in memory itself."""
        if self.ledger.path is None and not is_writer():
            return self.ledger.append(edit)
        return self.ledger.get(edit_id)

    @property
    def contexts(self) -> tuple[str, ...]:
        """The contexts that facts are edited in, sampled once from the base model."""
        if self._contexts is None:
            with self.base_model():
                self._contexts = sample_contexts(self.language_model, self.context_settings, self.seed)
        return self._contexts

    @property
    def search_dtype(self) -> str:
        """The dtype that target search runs in, such as "bfloat16"."""
        return str(self.target_search.dtype).removeprefix("torch.")

    def fact_prompts(
        self, facts: Sequence[Fact], other_prompts: Sequence[SubjectPrompts] | None = None, *, keep: bool = True
    ) -> list[FactPrompts]:
        """Return the prompts of every fact in every framing, and the kept prompts about its subject.

        `other_prompts` are those about each subject; with `keep=False`, none of their answers have to stay.
        """
        model = self.language_model
        leads = None if other_prompts is None else [prompts.leads for prompts in other_prompts]
        framed = encode_framings(model, facts, self.framings, self.contexts, leads)
        kept: list[tuple[EncodedPrompt, ...]] = [()] * len(facts)
        protected = kept
        if other_prompts is not None and keep:
            kept = encode_kept(model, facts, other_prompts)
            protected = encode_protected(model, facts, other_prompts)
        fact_prompts = []
        for fact, rows, kept_prompts, protected_prompts in zip(facts, framed, kept, protected, strict=True):
            names, prompts = zip(*rows, strict=True)
            ends_word = ends_with_word(fact.target)
            fact_prompts.append(FactPrompts(prompts, kept_prompts, ends_word, names, protected_prompts))
        return fact_prompts

    def _draft_tools(self, settings: EditSettings) -> DraftTools:
        store, on_step, phase = self._target_store, self.progress.targets, self.progress.phase
        store.begin()

        def search(prompts: Sequence[FactPrompts]) -> TargetStates:
            return self.target_search.find(settings.layers[-1], prompts, settings.targets, store, on_step)

        return DraftTools(
            self.language_model,
            self.edited,
            settings,
            self.framings,
            encode=self.fact_prompts,
            search=search,
            phase=phase,
            seed=self.seed,
            search_dtype=self.search_dtype,
        )

    def _earlier_edits(self, facts: Sequence[Fact], method: Method) -> list[EarlierEdit]:
        """Return active edits about the same subjects; a dense edit replaces earlier dense facts without a conflict."""
        if self.guard is None:
            return []
        active = self.ledger.active.where(lambda kind: not (method.dense and kind.has_rows))
        return find_earlier_edits(facts, active.with_facts_like(facts))

    def _clashes(self, edit: Edit) -> list[EarlierEdit]:
        """Return the active edits that contradict an edit and that it does not know of."""
        if self.guard is None:
            return []
        others = unrelated(edit, self.ledger.active.with_facts_like(edit.facts))
        return [earlier for earlier in find_earlier_edits(edit.facts, others) if earlier.clashes]

    def _open_ledger(self, ledger: str | Path | Ledger | None) -> Ledger:
        name = self.language_model.name
        if ledger is None:
            return Ledger.in_memory(self.fingerprint, name)
        dtype = str(self.language_model.dtype).removeprefix("torch.")
        if isinstance(ledger, Ledger):
            ledger.require_model(self.fingerprint, name, dtype)
            return ledger
        return open_ledger(ledger, self.fingerprint, model_name=name, dtype=dtype)
