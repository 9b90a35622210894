"""Layer search tries facts that the model knows, the best trial wins, and the model is left unchanged."""

from __future__ import annotations

import pytest

from rebind.analysis import TRIAL_FACTS, Tracer, saved_layer_choice, search_layers, trial_facts_from
from rebind.analysis.layer_search import TrialFact, candidate_windows, overall_score
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.progress import Progress
from rebind.edit.settings import layers_file, measured_layers
from rebind.edit.targets.objective import TargetSettings
from rebind.errors import InputError
from rebind.storage import seal_json, write_json
from tests import tiny
from tests.support import raises

PROMPTS = ("The capital of {France} is", "I saw {Norway} in", "The bridge of {Mostar} was", "She said {Dante} and")


@pytest.fixture
def all_known(monkeypatch) -> None:
    """Let the tiny model take part in trials although it knows nothing."""
    monkeypatch.setattr(Tracer, "knows", lambda *_: True)


def new_editor(layers: int) -> Editor:
    return Editor(tiny.llama(num_hidden_layers=layers), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256)


@pytest.fixture
def editor() -> Editor:
    return new_editor(6)


def trials_of(editor: Editor) -> list[TrialFact]:
    """Return facts with the model's own answers as the true ones."""
    trials = []
    for prompt in PROMPTS:
        answer = editor.score([Fact.parse(prompt, "Rome")])[0].says.strip()
        new = "Rome" if answer != "Rome" else "Paris"
        paraphrase = f"So {prompt}".replace("{", "").replace("}", "")
        fact = Fact.parse(prompt, new, old=answer, paraphrases=(paraphrase,))
        trials.append(TrialFact(fact, (("The sea is", "red"),)))
    return trials


def test_the_best_candidate_is_chosen_and_everything_else_is_left_unchanged(editor, all_known, monkeypatch):
    trials = trials_of(editor)
    own = editor.rewrite(
        "The capital of {Spain} is", "Rome", method="memit", targets=TargetSettings(steps=2), force=True
    )
    before, ledger, guard = tiny.weights(editor.model), editor.ledger, editor.guard
    reports, phases, windows_read = [], [], []
    editor.progress = progress = Progress(phase=phases.append)
    corpus = type(editor.moments.corpus)
    windows = corpus.windows
    monkeypatch.setattr(corpus, "windows", lambda *args: windows_read.append(1) or windows(*args))
    choice = search_layers(editor, trials, limit=3, report=lambda *row: reports.append(row))
    assert tiny.weights(editor.model) == before
    assert (editor.ledger, editor.guard, editor.progress) == (ledger, guard, progress)
    assert [edit.id for edit in editor.ledger.active] == [own.id]
    assert choice.layers == max(choice.candidates, key=lambda candidate: candidate.score).layers
    assert len({candidate.layers for candidate in choice.candidates}) == len(choice.candidates) > 1
    assert all(max(candidate.layers) < 5 for candidate in choice.candidates), "a block must follow"
    assert len(choice.trace) == 6
    assert ("tracing", 3, 3) in reports, "three facts were tried"
    assert reports[-1][0] == "trial edits"
    assert phases == ["moments"], "the phases of trial edits are not reported"
    assert len(windows_read) == 1, "the text is read once for all trial edits"
    assert measured_layers(editor.fingerprint) == choice.layers
    assert saved_layer_choice(editor.fingerprint) == choice


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_the_peak_of_the_trace_is_the_middle_of_a_candidate(width):
    windows = candidate_windows(tuple(range(width)), [0.1] * 10 + [0.9] + [0.1] * 9)
    (around_peak,) = (layers for layers, why in windows.items() if why == "peak of the trace")
    assert len(around_peak) == width
    assert around_peak[width // 2] == 10


def test_only_facts_that_the_model_knows_are_tried(editor):
    for trials in (TRIAL_FACTS, []):
        with raises(InputError, "too_few_known_facts"):
            search_layers(editor, trials)
    assert saved_layer_choice(editor.fingerprint) is None


def test_facts_without_paraphrases_and_neighbors(all_known):
    editor = new_editor(2)
    trials = trial_facts_from([Fact.parse(prompt, "Rome", old="Paris") for prompt in PROMPTS[:3]])
    choice = search_layers(editor, trials)
    assert {(one.paraphrase, one.neighbor) for one in choice.candidates} == {(None, None)}
    assert saved_layer_choice(editor.fingerprint) == choice


def test_the_score_is_the_harmonic_mean_minus_the_drift():
    assert overall_score(0.0, 0.8, 0.8, 0.8) == pytest.approx(0.8)
    assert overall_score(0.5, 0.8, 0.8, 0.8) == pytest.approx(0.3)
    assert overall_score(0.1, 0.4, None, None) == pytest.approx(0.3), "what was not measured does not count"
    assert overall_score(0.0, 0.0, 0.8, 0.8) < 1e-6
    for low in ((0.1, 0.8, 0.8), (0.8, 0.1, 0.8), (0.8, 0.8, 0.1)):
        assert overall_score(0.0, *low) < 0.3


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "null", '{"fingerprint": "0"}'])
def test_a_saved_choice_that_cannot_be_read_is_ignored(damage):
    path = layers_file("f" * 64)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert saved_layer_choice("f" * 64) is None


CANDIDATE = {"layers": [2, 3], "why": "x", "effect": 0.1, "efficacy": 0.5, "paraphrase": None, "neighbor": 1.0}
CANDIDATE |= {"drift": 0.1, "score": -0.2}
SAVED = {"model": "x", "fingerprint": "f" * 64, "layers": [2, 3], "candidates": [CANDIDATE], "trace": [0.1, 0.2]}
SAVED |= {"known": 3, "facts": 4}


@pytest.mark.parametrize(
    "forged",
    [
        *({"layers": bad} for bad in (0, [], [None], ["2"], "23", [-1], [True], {"a": 1}, None)),
        *({"trace": bad} for bad in (3, [], [None], ["x"], [10**400], {"a": 1})),
        *({"candidates": bad} for bad in (3, [None], ["x"], [{}], {"a": {}}, [{**CANDIDATE, "more": 1}])),
        *(
            {"candidates": [{**CANDIDATE, name: bad}]}
            for name in CANDIDATE
            for bad in ("", [], {}, True)[name == "why" :]
        ),
    ],
)
def test_a_saved_choice_with_other_types_is_ignored(forged):
    write_json(layers_file("f" * 64), seal_json(SAVED))
    assert saved_layer_choice("f" * 64).to_json()["layers"] == (2, 3)
    write_json(layers_file("f" * 64), seal_json(SAVED | forged))
    assert saved_layer_choice("f" * 64) is None


def test_facts_of_the_user_need_the_true_answer():
    fact = Fact.parse("The capital of {France} is", "Rome", old="Paris", neighbors=["Lyon is in"])
    (trial,) = trial_facts_from([fact])
    assert trial.neighbors == (("Lyon is in", "Paris"),)
    with raises(InputError, "fact_without_old"):
        trial_facts_from([fact, Fact.parse("The capital of {Spain} is", "Rome")])


def test_the_trial_facts_are_complete():
    assert len(TRIAL_FACTS) >= 12
    assert len({trial.fact.text for trial in TRIAL_FACTS}) == len(TRIAL_FACTS)
    for trial in TRIAL_FACTS:
        assert trial.fact.old
        assert trial.fact.paraphrases
        assert all(trial.fact.subject.lower() in text.lower() for text in trial.fact.paraphrases)
        assert len(trial.neighbors) == 2
        for text, true in trial.neighbors:
            assert trial.fact.subject not in text
            assert true != trial.fact.target
