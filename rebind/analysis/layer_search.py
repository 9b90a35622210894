"""Which layers to edit, found by measurement: a small trace, then a trial edit on each candidate.

Tracing says where a fact's subject is looked up; where an edit works best is not always there (Hase et al., 2023,
"Does localization inform editing?"). So the trace only proposes, and trial edits decide: facts that the model is
known to know are rewritten at each candidate window of layers, in memory, and what they did is measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebind.analysis.averages import PLACES, average
from rebind.analysis.traces import TraceSettings
from rebind.analysis.tracing import Tracer
from rebind.analysis.trial_facts import HELD, Held
from rebind.edit.cache import cache_folder
from rebind.edit.facts.fact import Fact
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.progress import Progress
from rebind.edit.solve.layer_writes import Place
from rebind.errors import InputError
from rebind.files import write_atomically
from rebind.models.sites import module_at

if TYPE_CHECKING:
    from rebind.edit.editor import Editor

VERSION = 1  # of this procedure: a choice made by another one is not used
FEWEST = 3  # known facts; with fewer the numbers say nothing
MOST = 8  # that are tried: a trial costs a search for targets
SUBJECT_LAST = PLACES.index("last subject token")


@dataclass(frozen=True)
class Candidate:
    """A window of layers and what a trial edit there did, each but drift in [0, 1]."""

    layers: tuple[int, ...]
    why: str  # what proposed it
    effect: float  # the trace's: mean indirect effect of the MLPs at the subject's last token, at the window's middle
    efficacy: float  # the new answer against the true one, after the prompt
    paraphrase: float | None  # the same, after another wording; None where no fact has one
    neighbour: float | None  # the true answer against the new one, about other subjects; None where none is named
    drift: float  # nats on unrelated prompts

    @property
    def score(self) -> float:
        """The harmonic mean of those of the three that were asked, less the drift."""
        parts = [part for part in (self.efficacy, self.paraphrase, self.neighbour) if part is not None]
        return len(parts) / sum(1 / max(part, 1e-9) for part in parts) - self.drift

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score}


@dataclass(frozen=True)
class Choice:
    """The layers to edit, and the table that decided."""

    model: str
    fingerprint: str
    layers: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    trace: tuple[float, ...]  # a layer's mean indirect effect of the MLPs at the subject's last token
    known: int  # facts that the model knows
    asked: int  # of so many

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"version": VERSION, "candidates": [one.to_json() for one in self.candidates]}


def chosen_layers(fingerprint: str) -> tuple[int, ...] | None:
    """The layers chosen for this model on this machine; None where no choice was made. Reads one small file."""
    made = cached_choice(fingerprint)
    return None if made is None else made.layers


def cached_choice(fingerprint: str) -> Choice | None:
    """The choice as it was stored; a file that cannot be read is as good as none."""
    try:
        stored = json.loads(choice_path(fingerprint).read_bytes())
        if (stored.pop("version"), stored["fingerprint"]) != (VERSION, fingerprint):
            return None
        rows = [dict(one) for one in stored.pop("candidates")]
        for row in rows:
            row.pop("score")
            row["layers"] = tuple(row["layers"])
        stored |= {"layers": tuple(stored["layers"]), "trace": tuple(stored["trace"])}
        return Choice(**stored, candidates=tuple(Candidate(**row) for row in rows))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def choice_path(fingerprint: str) -> Path:
    return cache_folder() / "layers" / f"{fingerprint[:32]}-{VERSION}.json"


def choose_layers(
    editor: Editor,
    held: Sequence[Held] = HELD,
    *,
    most: int = MOST,
    told: Callable[[str, int, int], None] = lambda phase, done, of: None,
) -> Choice:
    """Trace, try, decide, and keep the choice in the cache. The model and its ledger are left as they were."""
    with _apart(editor):
        known = [one for one in held if _known(editor, one)]
        if len(known) < FEWEST:
            raise InputError(
                f"{editor.loaded.name} knows {len(known)} of {len(held)} facts (such as {held[0].fact.text!r} → "
                f"{held[0].fact.old!r}), expected {FEWEST} or more to try edits on: pass facts that it knows with "
                f"--facts, or choose layers yourself"
                if held
                else "got no facts, expected some to try edits on: pass facts that the model knows"
            )
        tried = known[:most]
        effects = _subject_effects(editor, [one.fact for one in tried], told)
        windows = _windows(editor, effects)
        _learn_old_keys(editor, windows)
        rows = []
        with _quietly(editor):
            for done, (layers, why) in enumerate(windows.items()):
                told("trial edits", done, len(windows))
                rows.append(_tried(editor, layers, why, effects[layers[len(layers) // 2]], tried))
            told("trial edits", len(windows), len(windows))
    best = max(rows, key=lambda row: row.score)
    made = Choice(
        editor.loaded.name, editor.fingerprint, best.layers, tuple(rows), tuple(effects), len(known), len(held)
    )
    data = json.dumps(made.to_json(), indent=1).encode()
    write_atomically(choice_path(editor.fingerprint), data + b"\n")
    return made


def held_from(facts: Sequence[Fact]) -> list[Held]:
    """Facts of the user's own: they need the true answer (`old`). Their neighbours are taken to share it, as
    CounterFact's do."""
    if missing := [fact for fact in facts if fact.old is None]:
        raise InputError(
            f"fact {missing[0].text!r} has no old answer ({len(missing)} of {len(facts)} have none), expected what "
            f"is true now beside what to write: add old to each"
        )
    return [Held(fact, tuple((text, str(fact.old)) for text in fact.neighbours)) for fact in facts]


@contextmanager
def _apart(editor: Editor) -> Iterator[None]:
    """The base model and a ledger that is thrown away; trials may fail the guard's checks, that is what they show."""
    ledger, guard = editor.ledger, editor.guard
    try:
        editor.guard = None
        editor.use(Ledger.in_memory(editor.fingerprint, editor.loaded.name))
        yield
    finally:
        editor.guard = guard
        editor.use(ledger)


@contextmanager
def _quietly(editor: Editor) -> Iterator[None]:
    """Trials are told one by one, and not each by its phases."""
    progress = editor.progress
    try:
        editor.progress = Progress()
        yield
    finally:
        editor.progress = progress


def _known(editor: Editor, one: Held) -> bool:
    true = Fact(one.fact.prompt, one.fact.subject, str(one.fact.old))
    return editor.score([true])[0].rank == 1


def _subject_effects(editor: Editor, facts: Sequence[Fact], told: Callable[[str, int, int], None]) -> list[float]:
    """Each layer's mean indirect effect of the MLPs at the subject's last token."""
    tracer = Tracer.of(editor, TraceSettings(kinds=("mlp",)))
    traces = []
    for done, fact in enumerate(facts):
        told("tracing", done, len(facts))
        traces.append(tracer.trace(fact, tokens="subject"))
    told("tracing", len(facts), len(facts))
    found: list[float] = average(traces).effects["mlp"][SUBJECT_LAST].tolist()
    return found


def _windows(editor: Editor, effects: Sequence[float]) -> dict[tuple[int, ...], str]:
    """What to try: the layers used without a choice, the trace's peak, and steps up to the middle of the model."""
    depth = len(effects)
    default = editor.settings("memit")[1].layers
    width = min(len(default), depth - 1)

    def ending(last: int) -> tuple[int, ...]:
        last = max(width - 1, min(depth - 2, last))
        return tuple(range(last - width + 1, last + 1))

    peak = max(range(depth), key=lambda layer: effects[layer])
    round_peak = ending(peak + (width - 1) // 2)
    found = {default: "used now"}
    found[round_peak] = "used now, the trace's peak" if round_peak == default else "round the trace's peak"
    for share in (6, 4, 3, 2):
        found.setdefault(ending(round(depth / share)), f"up to 1/{share} of the depth")
    return found


def _learn_old_keys(editor: Editor, windows: Iterable[tuple[int, ...]]) -> None:
    """The moments of all windows in one pass: each trial alone would read, or sample, the text anew."""
    sites = [(editor.sites[layer].name, layer) for layer in sorted({layer for window in windows for layer in window})]
    editor.progress.phase("moments")
    editor.weights.learn_old_keys([Place(name, layer, module_at(editor.model, name)) for name, layer in sites])


def _tried(editor: Editor, layers: tuple[int, ...], why: str, effect: float, held: Sequence[Held]) -> Candidate:
    edit = editor.rewrite_many([one.fact for one in held], layers=layers)
    try:
        prompts = [(one.fact.text, one.fact.target, str(one.fact.old)) for one in held]
        others = [
            [(text, one.fact.target, str(one.fact.old)) for one in held for text in one.fact.paraphrases],
            [(text, true, one.fact.target) for one in held for text, true in one.neighbours if true != one.fact.target],
        ]
        paraphrase, neighbour = (_preferred(editor, asked) if asked else None for asked in others)
        return Candidate(layers, why, effect, _preferred(editor, prompts), paraphrase, neighbour, editor.drift().kl)
    finally:
        editor.undo(edit.id)


def _preferred(editor: Editor, asked: Sequence[tuple[str, str, str]]) -> float:
    """How much the first answer is preferred to the second, in [0, 1], over (prompt, first, second).

    ES, PS and NS count whether NLL(first) < NLL(second); a handful of facts would give them a handful of values. The
    sigmoid of the difference says how clearly, too.
    """
    facts = [Fact("{}", prompt, answer) for prompt, *answers in asked for answer in answers]
    scores = editor.score(facts)
    gaps = [second.nll - first.nll for first, second in zip(scores[::2], scores[1::2], strict=True)]
    return sum(1 / (1 + math.exp(-max(-60.0, min(60.0, gap)))) for gap in gaps) / len(gaps)
