"""The methods' gains and defaults."""

from __future__ import annotations

import pytest

from rebind import Write
from rebind.edit.methods import ENTRIES, METHODS, Old, choose_settings, default_settings, get_method
from rebind.edit.targets.optimize import TargetSettings
from rebind.errors import InputError, UnknownNameError
from rebind.memory import equality, ridge
from tests.support import Draw, assert_close


def none(keys):
    return keys[:0]


def test_rome_is_one_equality_write_after_another():
    draw = Draw(1)
    old, keys, values, W = Old(draw.moment(8)), draw.normal(5, 8), draw.normal(5, 3), draw.normal(3, 8)
    expected = W
    for k, v in zip(keys, values, strict=True):
        expected = Write(k[None], v[None], equality(k[None], old.moment).value).apply(expected)
    got = Write(keys, values, METHODS["rome"].gain(keys, old, 1.0, none(keys))).apply(W)
    assert_close(got, expected)


def test_rome_refuses_more_facts_than_directions():
    draw = Draw(2)
    keys = draw.normal(9, 8)
    with pytest.raises(InputError, match="got 9 facts for keys 8 wide"):
        METHODS["rome"].gain(keys, Old(draw.moment(8)), 1.0, none(keys))


def test_recursive_is_ridge_with_the_earlier_keys_in_its_moment():
    draw = Draw(3)
    old, keys, earlier = Old(draw.moment(8)), draw.normal(3, 8), draw.normal(4, 8)
    gain = METHODS["recursive"].gain
    assert_close(gain(keys, old, 2.0, earlier), ridge(keys, 2 * old.moment + earlier.mT @ earlier).value)
    assert_close(gain(keys, old, 2.0, none(keys)), METHODS["memit"].gain(keys, old, 2.0, none(keys)))


@pytest.mark.parametrize(
    ("name", "depth", "several", "one"),
    [
        ("gpt2-xl", 48, (13, 14, 15, 16, 17), 17),
        ("EleutherAI/gpt-j-6b", 28, (3, 4, 5, 6, 7, 8), 5),
        ("gpt2-medium", 24, (0, 1, 2, 3, 4), 8),  # ROME's layer is published, MEMIT's are not: from the depth
        ("smollm2", 30, (1, 2, 3, 4, 5), 2),
        ("HuggingFaceTB/SmolLM2-360M", 32, (1, 2, 3, 4, 5), 5),  # not the one that was measured: from the depth
        ("anything", 4, (0, 1), 1),
        ("gpt2-xl", 6, (0, 1), 1),  # a small model of a known name
    ],
)
def test_default_layers(name, depth, several, one):
    assert default_settings(get_method("memit"), name, depth).layers == several
    assert default_settings(get_method("rome"), name, depth).layers == (one,)


def test_many_facts_have_layers_of_their_own():
    few, many = (default_settings(get_method("memit"), "smollm2", 30, facts) for facts in (399, 400))
    assert (few.layers, many.layers) == ((1, 2, 3, 4, 5), (0, 1, 2, 3, 4))
    assert (few.targets.enough, many.targets.enough) == (0.05, 0.2)
    assert default_settings(get_method("memit"), "gpt2-xl", 48, 10_000).layers == (13, 14, 15, 16, 17)


def test_the_search_is_the_models_own_where_it_is_known():
    llama = default_settings(get_method("alphaedit"), "meta-llama/Meta-Llama-3-8B", 32)
    assert (llama.targets.steps, llama.targets.rate, llama.targets.decay, llama.targets.clamp) == (25, 0.1, 0.5, 0.75)
    assert (llama.lam, llama.published_lam, llama.source) == (10.0, None, "published for llama-3-8b")
    medium = default_settings(get_method("rome"), "gpt2-medium", 24)
    assert (medium.targets.steps, medium.targets.clamp) == (20, 3.0)
    borrowed = default_settings(get_method("emmet"), "gpt2-medium", 24)
    assert borrowed.layers == (8,)
    assert borrowed.targets == get_method("emmet").targets, "a layer can be borrowed, a search cannot"
    assert borrowed.source == "published for gpt2-medium with rome"


def test_a_published_lambda_is_told_and_not_used():
    settings = default_settings(get_method("memit"), "gpt2-xl", 48)
    assert (settings.lam, settings.published_lam) == (None, 20_000.0)


def test_settings_say_where_they_come_from_and_take_changes():
    known = default_settings(get_method("memit"), "smollm2", 30)
    assert known.source == "measured for smollm2"
    assert default_settings(get_method("memit"), "unheard-of", 12).source == "by its depth of 12"
    search = TargetSettings(steps=4)
    changed = choose_settings(get_method("memit"), "smollm2", 30, layers=(8, 7, 8), lam=3.0, targets=search)
    assert (changed.layers, changed.lam, changed.targets.steps, changed.source) == ((7, 8), 3.0, 4, "chosen by hand")
    assert choose_settings(get_method("memit"), "smollm2", 30) == known


def test_layers_measured_here_serve_models_without_an_entry():
    measured = choose_settings(get_method("memit"), "unheard-of", 30, measured=(3, 4))
    assert (measured.layers, measured.source) == ((3, 4), "measured on this machine")
    assert choose_settings(get_method("memit"), "unheard-of", 30, measured=(3, 4), layers=(9,)).layers == (9,)
    assert choose_settings(get_method("rome"), "unheard-of", 30, measured=(3, 4, 5)).layers == (4,)
    assert choose_settings(get_method("rome"), "smollm2", 30, measured=(3, 4, 5)).layers == (2,)
    assert choose_settings(get_method("memit"), "gpt2-xl", 48, measured=(3, 4)).layers == (13, 14, 15, 16, 17)


@pytest.mark.parametrize("name", ["rome", "emmet"])
def test_methods_of_one_layer_refuse_several(name):
    assert choose_settings(get_method(name), "unheard-of", 30, layers=(7, 7)).layers == (7,)
    with pytest.raises(InputError, match=rf"layers are \[2, 3\], expected one for {name}.*use memit"):
        choose_settings(get_method(name), "unheard-of", 30, layers=(3, 2))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("depth", [2, 3, 6, 48])
def test_layers_by_depth_leave_a_block_above_them(name, depth):
    layers = choose_settings(get_method(name), "unheard-of", depth).layers
    assert min(layers) >= 0
    assert max(layers) <= depth - 2


@pytest.mark.parametrize("name", ["rome", "emmet"])
def test_methods_that_meet_facts_exactly_take_no_lambda(name):
    with pytest.raises(InputError, match=rf"lam is 3, expected none for {name}, which meets its facts exactly"):
        choose_settings(get_method(name), "unheard-of", 30, lam=3.0)


def test_every_entry_fits_its_model_and_names_methods():
    for entry in ENTRIES:
        assert set(entry.methods) <= METHODS.keys()
        assert list(entry.layers) == sorted(set(entry.layers))
        assert max(entry.layers) < entry.depth - 1
        assert all((len(entry.layers) > 1) is METHODS[name].several_layers for name in entry.methods)


def test_only_alphaedit_has_a_lambda_of_its_own():
    own = {name: default_settings(method, "any", 30).lam for name, method in METHODS.items()}
    assert {name: lam for name, lam in own.items() if lam is not None} == {"alphaedit": 10.0}


def test_unknown_methods_get_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"did you mean 'memit'\?"):
        get_method("memt")
