"""The choice of layers: known facts only, the best trial wins, the model is left alone, the cache is believed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rebind.analysis import layer_search as module
from rebind.analysis.layer_search import Candidate, cached_choice, choice_path, choose_layers, chosen_layers, held_from
from rebind.analysis.trial_facts import HELD, Held
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.progress import Progress
from rebind.edit.targets.optimize import TargetSettings
from rebind.errors import InputError
from tests import tiny


@pytest.fixture
def editor() -> Editor:
    return Editor(tiny.llama(num_hidden_layers=6), tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256)


def known_to(editor: Editor, *prompts: str) -> list[Held]:
    """Facts whose true answer is whatever the model says."""
    made = []
    for prompt in prompts:
        says = editor.score([Fact.parse(prompt, "Rome")])[0].says.strip()
        new = "Rome" if says != "Rome" else "Paris"
        made.append(
            Held(
                Fact.parse(prompt, new, old=says, paraphrases=(f"So {prompt}".replace("{", "").replace("}", ""),)),
                (("The sea is", "red"),),
            )
        )
    return made


PROMPTS = ("The capital of {France} is", "I saw {Norway} in", "The bridge of {Mostar} was", "She said {Dante} and")


def test_the_choice_is_the_best_row_and_everything_is_left_as_it_was(editor, monkeypatch):
    held = known_to(editor, *PROMPTS)
    monkeypatch.setattr(module, "_known", lambda editor, one: True)
    own = editor.rewrite("The capital of {Spain} is", "Rome", targets=TargetSettings(steps=2), force=True)
    before, ledger, guard = tiny.weights(editor.model), editor.ledger, editor.guard
    told = []
    made = choose_layers(editor, held, most=3, told=lambda *row: told.append(row))
    assert tiny.weights(editor.model) == before
    assert (editor.ledger, editor.guard) == (ledger, guard)
    assert [edit.id for edit in editor.ledger.active] == [own.id]
    assert made.layers == max(made.candidates, key=lambda row: row.score).layers
    assert len({row.layers for row in made.candidates}) == len(made.candidates) > 1
    assert all(max(row.layers) < 5 for row in made.candidates), "a block must lie above"
    assert len(made.trace) == 6
    assert ("tracing", 3, 3) in told, "three facts were tried"
    assert told[-1][0] == "trial edits"
    assert chosen_layers(editor.fingerprint) == made.layers
    assert cached_choice(editor.fingerprint) == made


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_the_peak_is_the_middle_of_the_layers_round_it(width):
    deep = SimpleNamespace(settings=lambda method: (None, SimpleNamespace(layers=tuple(range(width)))))
    windows = module._windows(deep, [0.1] * 10 + [0.9] + [0.1] * 9)
    (round_peak,) = (layers for layers, why in windows.items() if why == "round the trace's peak")
    assert len(round_peak) == width
    assert round_peak[width // 2] == 10


def test_the_text_is_read_once_for_all_trials(editor, monkeypatch):
    read, phases = [], []
    monkeypatch.setattr(module, "_known", lambda editor, one: True)
    own = type(editor.corpus).windows
    monkeypatch.setattr(type(editor.corpus), "windows", lambda *args: read.append(1) or own(*args))
    editor.progress = progress = Progress(phase=phases.append)
    made = choose_layers(editor, known_to(editor, *PROMPTS), most=3)
    assert len(made.candidates) > 1
    assert len(read) == 1
    assert phases == ["moments"], "trials are told one by one, not each by its phases"
    assert editor.progress is progress


def test_only_facts_that_the_model_knows_are_tried(editor):
    with pytest.raises(InputError, match="knows 0 of 13 facts.*--facts"):
        choose_layers(editor)
    assert chosen_layers(editor.fingerprint) is None
    with pytest.raises(InputError, match="got no facts"):
        choose_layers(editor, [])


def test_the_score_weighs_all_four():
    even = Candidate((1,), "", 0.0, 0.8, 0.8, 0.8, 0.0)
    assert even.score == pytest.approx(0.8)
    for name in ("efficacy", "paraphrase", "neighbour"):
        worse = Candidate(**{**even.__dict__, name: 0.1})
        assert worse.score < 0.3
    assert Candidate(**{**even.__dict__, "drift": 0.5}).score == pytest.approx(0.3)
    assert Candidate(**{**even.__dict__, "efficacy": 0.0}).score < 1e-6


def test_what_was_not_asked_does_not_count():
    alone = Candidate((1,), "", 0.0, 0.4, None, None, 0.1)
    assert alone.score == pytest.approx(0.3)
    assert Candidate((1,), "", 0.0, 0.4, 0.4, None, 0.1).score == pytest.approx(0.3)


def test_facts_without_paraphrases_and_neighbours_have_no_scores_of_them(editor, monkeypatch):
    monkeypatch.setattr(module, "_known", lambda editor, one: True)
    held = held_from([Fact.parse(prompt, "Rome", old="Paris") for prompt in PROMPTS])
    made = choose_layers(editor, held)
    assert {(one.paraphrase, one.neighbour) for one in made.candidates} == {(None, None)}
    assert cached_choice(editor.fingerprint) == made, "as it was stored"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 0}', "null", "\x00"])
def test_a_cache_that_cannot_be_read_is_no_cache(damage):
    path = choice_path("f" * 64)
    path.parent.mkdir(parents=True)
    path.write_text(damage)
    assert chosen_layers("f" * 64) is None


def test_a_choice_of_another_procedure_or_model_is_not_used(editor, monkeypatch):
    monkeypatch.setattr(module, "_known", lambda editor, one: True)
    choose_layers(editor, known_to(editor, *PROMPTS[:3]))
    path = choice_path(editor.fingerprint)
    stored = json.loads(path.read_text())
    for change in ({"version": module.VERSION + 1}, {"fingerprint": "0" * 64}):
        path.write_text(json.dumps(stored | change))
        assert chosen_layers(editor.fingerprint) is None
    path.write_text(json.dumps(stored))
    assert chosen_layers(editor.fingerprint) == tuple(stored["layers"])


def test_facts_of_the_users_own_need_the_truth():
    fact = Fact.parse("The capital of {France} is", "Rome", old="Paris", neighbours=["Lyon is in"])
    (held,) = held_from([fact])
    assert held.neighbours == (("Lyon is in", "Paris"),)
    with pytest.raises(InputError, match="1 of 2 have none"):
        held_from([fact, Fact.parse("The capital of {Spain} is", "Rome")])


def test_the_bundled_facts_are_whole():
    assert len(HELD) >= 12
    assert len({one.fact.text for one in HELD}) == len(HELD)
    for one in HELD:
        assert one.fact.old
        assert one.fact.paraphrases
        assert all(one.fact.subject.lower() in text.lower() for text in one.fact.paraphrases)
        assert len(one.neighbours) == 2
        for text, true in one.neighbours:
            assert one.fact.subject not in text
            assert true != one.fact.target
