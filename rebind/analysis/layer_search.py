"""Find the layers to edit by measurement: a short trace proposes windows of layers, and trial edits decide.

Tracing shows where a model recalls a fact, but edits do not always work best there (Hase et al., 2023, "Does
localization inform editing?"). So facts that the model knows are rewritten at each candidate window of layers, with
an in-memory ledger, and the results are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

import torch
from torch import Tensor

from rebind.analysis.traces import TraceSettings
from rebind.analysis.tracing import Tracer
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.progress import Progress
from rebind.edit.settings import layers_file, layers_from_json, save_measured_layers
from rebind.errors import InputError
from rebind.memory.checks import require_number
from rebind.models.prompts import Prompt
from rebind.parallel import alone, is_writer, ranks, share, unite
from rebind.storage import read_sealed_json

Report = Callable[[str, int, int], None]  # (phase, done, total)

MIN_FACTS = 3  # known facts; fewer give no meaningful result


@dataclass(frozen=True)
class TrialFact:
    """A fact for a trial edit: `fact.old` is true, `fact.target` is not."""

    fact: Fact
    neighbors: tuple[tuple[str, str], ...]  # prompts about other subjects, with their true answers


def trial_facts_from(facts: Sequence[Fact]) -> list[TrialFact]:
    """Return a user's facts as trial facts. Their neighbors share the true answer, as in CounterFact."""
    for fact in facts:
        if fact.old is None:
            raise InputError(
                f"Fact {fact.text!r} has no true answer",
                expected="the true answer (old) in addition to the target",
                code="fact_without_old",
            )
    return [TrialFact(fact, tuple((text, str(fact.old)) for text in fact.neighbors)) for fact in facts]


def _bundled_trial_facts() -> Iterator[TrialFact]:
    """Yield facts that most language models know."""
    for line in (Path(__file__).parent / "data" / "trial_facts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        neighbors = tuple((neighbor["prompt"], neighbor["answer"]) for neighbor in row.pop("neighbors"))
        yield TrialFact(Fact.from_json(row), neighbors)


TRIAL_FACTS = tuple(_bundled_trial_facts())


@dataclass(frozen=True)
class Candidate:
    """A window of layers and the results of a trial edit there; all but the drift are in [0, 1]."""

    layers: tuple[int, ...]
    why: str  # the reason to try it
    effect: float  # mean indirect effect of the MLPs at the subject's last token, at the middle of the window
    efficacy: float | None  # preference for the new answer over the true one, after the prompt
    paraphrase: float | None  # the same after a paraphrase; None without paraphrases
    neighbor: float | None  # preference for the true answer over the new one, after neighbors; None without neighbors
    drift: float  # nats, on canary prompts
    score: float  # see `overall_score`


def overall_score(drift: float, *preferences: float | None) -> float:
    """Return the harmonic mean of the measured preferences, minus the drift."""
    return harmonic_mean([max(preference, 1e-9) for preference in preferences if preference is not None]) - drift


@dataclass(frozen=True)
class LayerChoice:
    """The layers to edit, and the measurements that decided."""

    model: str
    fingerprint: str
    layers: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    trace: tuple[float, ...]  # per layer, mean indirect effect of the MLPs at the subject's last token
    known: int  # number of trial facts that the model knows
    facts: int  # number of trial facts

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def saved_layer_choice(fingerprint: str) -> LayerChoice | None:
    """Return the stored result of `search_layers` for a model; None if it is missing or damaged."""
    record = read_sealed_json(layers_file(fingerprint)) or {}
    try:
        layers, candidates = layers_from_json(record["layers"]), tuple(map(_as_candidate, record["candidates"]))
        trace = _as_numbers(record["trace"])
        return LayerChoice(**{**record, "layers": layers, "candidates": candidates, "trace": trace})
    except (LookupError, TypeError, ValueError):
        return None


def _as_candidate(row: dict[str, Any]) -> Candidate:
    """Return a stored candidate; raise if a field has another type, because the file may be forged."""
    candidate = Candidate(**{**row, "layers": layers_from_json(row["layers"])})
    preferences = (candidate.efficacy, candidate.paraphrase, candidate.neighbor)
    _as_numbers([candidate.effect, candidate.drift, candidate.score, *(one for one in preferences if one is not None)])
    if not isinstance(candidate.why, str):
        raise TypeError("a reason that is no text")
    return candidate


def _as_numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Return stored numbers; raise TypeError or ValueError for anything else."""
    for value in values:
        require_number("number", value, least=-math.inf)
    if not values:
        raise ValueError("no numbers")
    return tuple(values)


def search_layers(
    editor: Editor,
    trials: Sequence[TrialFact] = TRIAL_FACTS,
    *,
    limit: int = 8,
    report: Report = lambda phase, done, total: None,
) -> LayerChoice:
    """Find the layers of a model where edits work best, and store them for later edits of that model.

    Args:
        editor: the editor of the model; its model, ledger and settings are restored.
        trials: the facts to try.
        limit: the maximum number of known facts to try; each costs a target search per candidate.
        report: called with (phase, done, total) as the work proceeds.
    """
    with _trial_mode(editor):
        tracer = Tracer(editor.language_model, TraceSettings(kinds=("mlp",)))
        known = _known_trials(editor, tracer, trials)
        effects = _mean_effects(tracer, known[:limit], report)
        candidates = _try_windows(editor, known[:limit], effects, report)
    model, best = editor.language_model, max(candidates, key=lambda candidate: candidate.score)
    choice = LayerChoice(
        model=model.name,
        fingerprint=model.fingerprint,
        layers=best.layers,
        candidates=tuple(candidates),
        trace=tuple(effects),
        known=len(known),
        facts=len(trials),
    )
    if is_writer():
        save_measured_layers(model.fingerprint, best.layers, choice.to_json())
    return choice


@contextmanager
def _trial_mode(editor: Editor) -> Iterator[None]:
    """Run a block with an empty ledger in memory and without a guard: trial edits that it would reject count, too."""
    ledger, guard, progress = editor.ledger, editor.guard, editor.progress
    try:
        editor.guard = None
        editor.use_ledger(Ledger.in_memory(editor.fingerprint, editor.language_model.name))
        yield
    finally:
        editor.guard, editor.progress = guard, progress
        editor.use_ledger(ledger)


def _known_trials(editor: Editor, tracer: Tracer, trials: Sequence[TrialFact]) -> list[TrialFact]:
    """Return the trials whose true answer the model knows, or raise if there are too few."""
    is_known = unite([tracer.knows(trial.fact) for trial in share(trials)])
    known = [trial for trial, knows in zip(trials, is_known, strict=True) if knows]
    if len(known) < MIN_FACTS:
        raise InputError(
            f"{editor.language_model.name} knows {len(known)} of {len(trials)} facts",
            expected=f"at least {MIN_FACTS} facts for trial edits",
            advice="Use {facts} that the model knows, or choose {layers} by hand",
            settings={"facts": None, "layers": None},
            code="too_few_known_facts",
        )
    return known


def _mean_effects(tracer: Tracer, trials: Sequence[TrialFact], report: Report) -> list[float]:
    """Return the mean indirect effect of each layer's MLP at the last token of the subjects."""
    at_subject: list[Tensor] = []
    for trial in share(trials):
        report("tracing", len(at_subject) * ranks().count, len(trials))
        trace = tracer.trace(trial.fact, subject_only=True)
        at_subject.append(trace.effects["mlp"][trace.prompt.subject[1]])
    report("tracing", len(trials), len(trials))
    effects: list[float] = torch.stack(unite(at_subject)).mean(0).tolist()
    return effects


def _try_windows(
    editor: Editor, trials: Sequence[TrialFact], effects: Sequence[float], report: Report
) -> list[Candidate]:
    windows = candidate_windows(editor.settings("memit").layers, effects)
    editor.progress.phase("moments")
    layers = sorted({layer for window in windows for layer in window})
    editor.weights.load_old_keys([editor.sites[layer].name for layer in layers])  # one pass for all trial edits
    editor.progress = Progress()  # the phases of each trial edit are not reported
    results: list[Candidate] = []
    for window, why in share(list(windows.items())):
        report("trial edits", len(results) * ranks().count, len(windows))
        with alone():
            results.append(_try_edit(editor, window, why, effects[window[len(window) // 2]], trials))
    report("trial edits", len(windows), len(windows))
    return [_as_candidate(row) for row in unite([asdict(result) for result in results])]


def candidate_windows(default: tuple[int, ...], effects: Sequence[float]) -> dict[tuple[int, ...], str]:
    """Return the candidates: the default layers, those around the peak of the trace, and some up to half the depth."""
    depth = len(effects)
    width = min(len(default), depth - 1)

    def ending_at(last: int) -> tuple[int, ...]:
        last = max(width - 1, min(depth - 2, last))
        return tuple(range(last - width + 1, last + 1))

    peak = max(range(depth), key=lambda layer: effects[layer])
    around_peak = ending_at(peak + (width - 1) // 2)
    windows = {default: "default"}
    windows[around_peak] = "default and peak of the trace" if around_peak == default else "peak of the trace"
    for divisor in (6, 4, 3, 2):
        windows.setdefault(ending_at(round(depth / divisor)), f"up to 1/{divisor} of the depth")
    return windows


def _try_edit(
    editor: Editor, layers: tuple[int, ...], why: str, effect: float, trials: Sequence[TrialFact]
) -> Candidate:
    facts = [trial.fact for trial in trials]
    edit = editor.rewrite_many(facts, method="memit", layers=layers)
    prompts = [(fact.text, fact.target, str(fact.old)) for fact in facts]
    paraphrases = [(text, fact.target, str(fact.old)) for fact in facts for text in fact.paraphrases]
    neighbors = [(text, true, trial.fact.target) for trial in trials for text, true in trial.neighbors]
    efficacy, paraphrase, neighbor = (_preference(editor, questions) for questions in (prompts, paraphrases, neighbors))
    drift = editor.drift().kl
    editor.undo(edit.id)
    score = overall_score(drift, efficacy, paraphrase, neighbor)
    return Candidate(layers, why, effect, efficacy, paraphrase, neighbor, drift, score)


def _preference(editor: Editor, questions: Sequence[tuple[str, str, str]]) -> float | None:
    """Return how much the model prefers the first answer to the second, in [0, 1], for (prompt, first, second).

    ES, PS and NS are the share of prompts with NLL(first) < NLL(second), which is coarse for a handful of facts. The
    sigmoid of the difference also shows how clear a preference is. Questions with equal answers do not count.
    """
    prompts = [Prompt(text, answer) for text, *answers in questions if answers[0] != answers[1] for answer in answers]
    scores = editor.language_model.score(prompts)
    gaps = [second.nll - first.nll for first, second in zip(scores[::2], scores[1::2], strict=True)]
    return fmean(1 / (1 + math.exp(-max(-60.0, min(60.0, gap)))) for gap in gaps) if gaps else None
