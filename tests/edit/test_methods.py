"""The methods' gains and defaults."""

from __future__ import annotations

import pytest

from rebind import Write
from rebind.edit.methods import METHODS, Old, default_settings, get_method
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
        ("gpt2-medium", 24, (1, 2, 3, 4, 5), 8),  # ROME's layer is published, MEMIT's are not: from the depth
        ("smollm2", 30, (2, 3, 4, 5, 6), 5),
        ("anything", 4, (0, 1), 1),
        ("gpt2-xl", 6, (0, 1), 1),  # a small model of a known name
    ],
)
def test_default_layers(name, depth, several, one):
    assert default_settings(get_method("memit"), name, depth).layers == several
    assert default_settings(get_method("rome"), name, depth).layers == (one,)


def test_only_alphaedit_has_a_lambda_of_its_own():
    own = {name: default_settings(method, "any", 30).lam for name, method in METHODS.items()}
    assert {name: lam for name, lam in own.items() if lam is not None} == {"alphaedit": 10.0}


def test_unknown_methods_get_a_suggestion():
    with pytest.raises(UnknownNameError, match=r"did you mean 'memit'\?"):
        get_method("memt")
