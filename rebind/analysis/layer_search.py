"""Find the layers to edit by measurement: a small trace proposes layers, and trial edits decide.

Tracing shows where a model recalls a fact, but edits do not always work best there (Hase et al., 2023, "Does
localization inform editing?"). So facts that the model knows are rewritten at each candidate window of layers, in
memory, and the results are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rebind.analysis.traces import POSITIONS, SUBJECT_LAST, TraceSettings, average_traces
from rebind.analysis.tracing import Tracer
from rebind.analysis.trial_facts import TRIAL_FACTS, TrialFact
from rebind.edit.editor import Editor
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.progress import Progress
from rebind.edit.settings import layers_file, save_measured_layers
from rebind.errors import InputError
from rebind.models.prompts import Prompt
from rebind.storage.atomic import read_json_object

MIN_FACTS = 3  # known facts: results of fewer mean nothing
MAX_FACTS = 8  # facts that are tried: each one costs a target search per candidate

Report = Callable[[str, int, int], None]  # (phase, done, total)


@dataclass(frozen=True)
class Candidate:
    """A window of layers and the results of a trial edit there; all but the drift are in [0, 1]."""

    layers: tuple[int, ...]
    why: str  # why it was tried
    effect: float  # mean indirect effect of the MLPs at the subject's last token, at the middle of the window
    efficacy: float | None  # preference for the new answer over the true one, after the prompt
    paraphrase: float | None  # the same after a paraphrase; None if no fact has one
    neighbor: float | None  # preference for the true answer over the new one, after neighbors; None if there are none
    drift: float  # nats, on canary prompts
    score: float  # see `overall_score`


def overall_score(drift: float, *preferences: float | None) -> float:
    """Return the harmonic mean of the preferences that were measured, minus the drift."""
    measured = [preference for preference in preferences if preference is not None]
    return len(measured) / sum(1 / max(preference, 1e-9) for preference in measured) - drift


@dataclass(frozen=True)
class LayerChoice:
    """The layers to edit, and the measurements that decided."""

    model: str
    fingerprint: str
    layers: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    trace: tuple[float, ...]  # per layer, mean indirect effect of the MLPs at the subject's last token
    known: int  # facts that the model knows
    facts: int  # facts in all

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def saved_layer_choice(fingerprint: str) -> LayerChoice | None:
    """Return the stored result of `search_layers` for a model; None if there is none that can be read."""
    stored = read_json_object(layers_file(fingerprint)) or {}
    if stored.get("fingerprint") != fingerprint:
        return None
    try:
        candidates = tuple(Candidate(**{**row, "layers": tuple(row["layers"])}) for row in stored["candidates"])
        sequences = {name: tuple(stored[name]) for name in ("layers", "trace")}
        return LayerChoice(**{**stored, **sequences, "candidates": candidates})
    except (KeyError, TypeError):
        return None


def search_layers(
    editor: Editor,
    trials: Sequence[TrialFact] = TRIAL_FACTS,
    *,
    limit: int = MAX_FACTS,
    check_known: bool = True,
    report: Report = lambda phase, done, total: None,
) -> LayerChoice:
    """Find the layers of a model where edits work best, and store them for later edits of that model.

    Args:
        editor: its model and ledger are left as they were.
        trials: the facts to try.
        limit: try at most this many of the facts that the model knows.
        check_known: leave out facts that the model does not know.
        report: called with (phase, done, total) as the work proceeds.
    """
    with _isolated(editor):
        known = [trial for trial in trials if not check_known or _knows(editor, trial)]
        if len(known) < MIN_FACTS:
            raise InputError(
                f"{editor.language_model.name} knows {len(known)} of {len(trials)} facts",
                expected=f"at least {MIN_FACTS} facts for trial edits",
                advice="Give {facts} that the model knows, or choose {layers} by hand",
                settings={"facts": None, "layers": None},
                code="too_few_known_facts",
            )
        tried = known[:limit]
        effects = _subject_effects(editor, tried, report)
        windows = candidate_windows(editor.settings("memit").layers, effects)
        editor.progress.phase("moments")
        layers = sorted({layer for window in windows for layer in window})
        editor.weights.load_old_keys([editor.sites[layer].name for layer in layers])  # one pass for all trial edits
        editor.progress = Progress()  # the phases of each trial edit are not reported
        candidates = []
        for done, (window, why) in enumerate(windows.items()):
            report("trial edits", done, len(windows))
            candidates.append(_try_edit(editor, window, why, effects[window[len(window) // 2]], tried))
        report("trial edits", len(windows), len(windows))
    choice = LayerChoice(
        model=editor.language_model.name,
        fingerprint=editor.fingerprint,
        layers=max(candidates, key=lambda candidate: candidate.score).layers,
        candidates=tuple(candidates),
        trace=tuple(effects),
        known=len(known),
        facts=len(trials),
    )
    save_measured_layers(editor.fingerprint, choice.layers, choice.to_json())
    return choice


@contextmanager
def _isolated(editor: Editor) -> Iterator[None]:
    """Use a temporary ledger and no guard (trial edits that fail its checks are results, too); restore everything."""
    ledger, guard, progress = editor.ledger, editor.guard, editor.progress
    try:
        editor.guard = None
        editor.use_ledger(Ledger.in_memory(editor.fingerprint, editor.language_model.name))
        yield
    finally:
        editor.guard, editor.progress = guard, progress
        editor.use_ledger(ledger)


def _knows(editor: Editor, trial: TrialFact) -> bool:
    return editor.language_model.score([trial.fact.as_prompt(trial.fact.old)])[0].rank == 1


def _subject_effects(editor: Editor, trials: Sequence[TrialFact], report: Report) -> list[float]:
    """Return, for each layer, the mean indirect effect of the MLPs at the subject's last token."""
    tracer = Tracer(editor.language_model, TraceSettings(kinds=("mlp",)))
    traces = []
    for done, trial in enumerate(trials):
        report("tracing", done, len(trials))
        traces.append(tracer.trace(trial.fact, tokens="subject"))
    report("tracing", len(trials), len(trials))
    effects: list[float] = average_traces(traces).effects["mlp"][POSITIONS.index(SUBJECT_LAST)].tolist()
    return effects


def candidate_windows(default: tuple[int, ...], effects: Sequence[float]) -> dict[tuple[int, ...], str]:
    """Return the candidates: the default layers, those around the trace's peak, and steps up to half the depth."""
    depth = len(effects)
    width = min(len(default), depth - 1)

    def ending_at(last: int) -> tuple[int, ...]:
        last = max(width - 1, min(depth - 2, last))
        return tuple(range(last - width + 1, last + 1))

    peak = max(range(depth), key=lambda layer: effects[layer])
    around_peak = ending_at(peak + (width - 1) // 2)
    windows = {default: "default"}
    windows[around_peak] = "default and peak of the trace" if around_peak == default else "peak of the trace"
    for share in (6, 4, 3, 2):
        windows.setdefault(ending_at(round(depth / share)), f"up to 1/{share} of the depth")
    return windows


def _try_edit(
    editor: Editor, layers: tuple[int, ...], why: str, effect: float, trials: Sequence[TrialFact]
) -> Candidate:
    facts = [trial.fact for trial in trials]
    edit = editor.rewrite_many(facts, layers=layers)
    try:
        efficacy = _preference(editor, [(fact.text, fact.target, str(fact.old)) for fact in facts])
        paraphrases = [(text, fact.target, str(fact.old)) for fact in facts for text in fact.paraphrases]
        neighbors = [(text, true, trial.fact.target) for trial in trials for text, true in trial.neighbors]
        paraphrase, neighbor = _preference(editor, paraphrases), _preference(editor, neighbors)
        drift = editor.drift().kl
    finally:
        editor.undo(edit.id)
    score = overall_score(drift, efficacy, paraphrase, neighbor)
    return Candidate(layers, why, effect, efficacy, paraphrase, neighbor, drift, score)


def _preference(editor: Editor, questions: Sequence[tuple[str, str, str]]) -> float | None:
    """Return how much the model prefers the first answer to the second, in [0, 1], over (prompt, first, second).

    ES, PS and NS count how often NLL(first) < NLL(second), which takes few values for a handful of facts; the sigmoid
    of the difference also shows how clear the preference is. Questions with equal answers do not count.
    """
    prompts = [Prompt(text, answer) for text, *answers in questions if answers[0] != answers[1] for answer in answers]
    if not prompts:
        return None
    scores = editor.language_model.score(prompts)
    gaps = [second.nll - first.nll for first, second in zip(scores[::2], scores[1::2], strict=True)]
    return sum(1 / (1 + math.exp(-max(-60.0, min(60.0, gap)))) for gap in gaps) / len(gaps)
