"""Settings: known for a model, measured on this machine, or chosen by the caller."""

from __future__ import annotations

import pytest

from rebind.edit.methods import METHODS
from rebind.edit.settings import (
    KNOWN_MODELS,
    choose_settings,
    default_settings,
    layers_file,
    measured_layers,
    save_measured_layers,
)
from rebind.edit.targets import TargetSettings
from rebind.errors import InputError, UnknownNameError
from rebind.storage import seal_json, write_json
from tests.support import raises

MEMIT, ROME, EMMET, ALPHAEDIT, DENSE = (METHODS[name] for name in ("memit", "rome", "emmet", "alphaedit", "dense"))


@pytest.mark.parametrize(
    ("name", "depth", "several", "one"),
    [
        ("gpt2-xl", 48, (13, 14, 15, 16, 17), 17),
        ("EleutherAI/gpt-j-6b", 28, (3, 4, 5, 6, 7, 8), 5),
        ("gpt2-medium", 24, (0, 1, 2, 3, 4), 8),  # ROME's layer is published, MEMIT's layers are not: by depth
        ("smollm2", 30, (1, 2, 3, 4, 5), 2),
        ("HuggingFaceTB/SmolLM2-360M", 32, (1, 2, 3, 4, 5), 5),  # not the model that was measured: by depth
        ("anything", 4, (0, 1), 1),
        ("gpt2-xl", 6, (0, 1), 1),  # a small model with a known name
    ],
)
def test_default_layers(name, depth, several, one):
    assert default_settings(MEMIT, name, depth).layers == several
    assert default_settings(ROME, name, depth).layers == (one,)


def test_many_facts_have_their_own_layers():
    few, many = (default_settings(MEMIT, "smollm2", 30, facts) for facts in (399, 400))
    assert (few.layers, many.layers) == ((1, 2, 3, 4, 5), (0, 1, 2, 3, 4))
    assert (few.targets.enough, many.targets.enough) == (0.05, 0.2)
    assert default_settings(MEMIT, "gpt2-xl", 48, 10_000).layers == (13, 14, 15, 16, 17)


def test_thousands_of_dense_facts_keep_nothing_else():
    few, many = (default_settings(DENSE, "smollm2", 30, facts) for facts in (999, 1_000))
    assert few.layers == many.layers
    assert (few.targets.keep, many.targets.keep) == (2.0, 0.0)


def test_known_models_have_their_own_search_and_methods_their_own_lambda():
    llama = default_settings(ALPHAEDIT, "meta-llama/Meta-Llama-3-8B", 32)
    assert (llama.targets.steps, llama.targets.rate, llama.targets.decay, llama.targets.clamp) == (25, 0.1, 0.5, 0.75)
    assert (llama.lam, llama.published_lam) == (10.0, None)
    borrowed = default_settings(EMMET, "gpt2-medium", 24)
    assert borrowed.layers == (8,)
    assert borrowed.targets == EMMET.targets, "a layer can be borrowed from another method, a search cannot"
    known = default_settings(MEMIT, "gpt2-xl", 48)
    assert (known.lam, known.published_lam) == (None, 20_000.0), "a published λ is shown, not used"


def test_settings_say_where_they_come_from_and_can_be_changed():
    known = default_settings(MEMIT, "smollm2", 30)
    search = TargetSettings(steps=4)
    changed = choose_settings(MEMIT, "smollm2", 30, layers=(8, 7, 8), lam=3.0, targets=search)
    assert (changed.layers, changed.lam, changed.targets) == ((7, 8), 3.0, search)
    assert choose_settings(MEMIT, "smollm2", 30) == known
    assert len({known.source, changed.source, default_settings(MEMIT, "unknown", 12).source}) == 3


def test_measured_layers_serve_models_that_are_not_known():
    assert choose_settings(MEMIT, "unknown", 30, measured=(3, 4)).layers == (3, 4)
    assert choose_settings(MEMIT, "unknown", 30, measured=(3, 4), layers=(9,)).layers == (9,)
    assert choose_settings(ROME, "unknown", 30, measured=(3, 4, 5)).layers == (4,)
    assert choose_settings(ROME, "smollm2", 30, measured=(3, 4, 5)).layers == (2,)


def test_measured_layers_are_stored_for_one_model():
    assert measured_layers("f" * 64) is None
    save_measured_layers("f" * 64, (2, 3), {"score": 0.9})
    assert measured_layers("f" * 64) == (2, 3)
    assert measured_layers("f" * 63 + "0") is None, "the file is found by the beginning of the fingerprint"
    layers_file("f" * 64).write_text("damaged")
    assert measured_layers("f" * 64) is None


@pytest.mark.parametrize("forged", [0, None, [], {}, {"a": 1}, "", "23", [None], [2.5], [-1], [True], [[2]]])
def test_forged_layers_count_as_not_measured(forged):
    save_measured_layers("f" * 64, [4, 2], {})
    assert measured_layers("f" * 64) == (2, 4)
    write_json(layers_file("f" * 64), seal_json({"fingerprint": "f" * 64, "layers": forged}))
    assert measured_layers("f" * 64) is None


@pytest.mark.parametrize("method", [ROME, EMMET])
def test_exact_methods_take_one_layer_and_no_lambda(method):
    assert choose_settings(method, "unknown", 30, layers=(7, 7)).layers == (7,)
    with raises(InputError, "too_many_layers"):
        choose_settings(method, "unknown", 30, layers=(3, 2))
    with raises(InputError, "lambda_not_used"):
        choose_settings(method, "unknown", 30, lam=3.0)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("depth", [2, 3, 6, 48])
def test_layers_by_depth_leave_a_block_above_them(method, depth):
    layers = choose_settings(method, "unknown", depth).layers
    assert 0 <= min(layers) <= max(layers) <= depth - 2


def test_every_entry_fits_its_model_and_its_methods():
    for entry in KNOWN_MODELS:
        assert list(entry.layers) == sorted(set(entry.layers))
        assert max(entry.layers) < entry.depth - 1
        assert all((len(entry.layers) > 1) is METHODS[name].several_layers for name in entry.methods)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"rate": -0.1}, {"clamp": 0.0}, {"rate": float("nan")}])
def test_a_search_must_be_able_to_move(settings):
    with raises(InputError, "not_positive"):
        TargetSettings(**settings)


@pytest.mark.parametrize("settings", [{"decay": -1.0}, {"keep": -1.0}, {"kl": float("inf")}, {"end": float("nan")}])
def test_penalties_are_not_negative(settings):
    with raises(InputError, "negative_setting"):
        TargetSettings(**settings)


def test_an_unknown_optimizer_is_named():
    with raises(UnknownNameError, "unknown_optimizer") as caught:
        TargetSettings(optimizer="normalised")
    assert "Did you mean 'normalized'?" in str(caught.value)
