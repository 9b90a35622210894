"""The gains of the methods."""

from __future__ import annotations

from rebind import Write
from rebind.edit.methods import METHODS, Method, get_method
from rebind.edit.moments import OldKeys
from rebind.errors import InputError, UnknownNameError
from rebind.memory import equality, ridge
from tests.support import Draw, assert_close, raises


def test_rome_is_one_equality_write_after_another():
    draw = Draw(1)
    old, keys, values, W = OldKeys(draw.moment(8)), draw.normal(5, 8), draw.normal(5, 3), draw.normal(3, 8)
    expected = W
    for k, v in zip(keys, values, strict=True):
        expected = Write(k[None], v[None], equality(k[None], old.moment).value).apply(expected)
    assert_close(Write(keys, values, METHODS["rome"].gain(keys, old, 1.0, keys[:0])).apply(W), expected)


def test_rome_refuses_more_facts_than_dimensions():
    draw = Draw(2)
    keys = draw.normal(9, 8)
    with raises(InputError, "too_many_facts"):
        METHODS["rome"].gain(keys, OldKeys(draw.moment(8)), 1.0, keys[:0])


def test_recursive_is_ridge_with_the_earlier_keys_in_its_moment():
    draw = Draw(3)
    old, keys, earlier = OldKeys(draw.moment(8)), draw.normal(3, 8), draw.normal(4, 8)
    gain = METHODS["recursive"].gain
    assert_close(gain(keys, old, 2.0, earlier), ridge(keys, 2 * old.moment + earlier.mT @ earlier).value)
    assert_close(gain(keys, old, 2.0, keys[:0]), METHODS["memit"].gain(keys, old, 2.0, keys[:0]))


def test_memit_protects_the_keys_it_is_told_to():
    draw = Draw(4)
    old, keys, others = OldKeys(draw.moment(8)), draw.normal(2, 8), draw.normal(3, 8)
    W, values = draw.normal(5, 8), draw.normal(2, 5)
    gain = METHODS["memit"].gain
    free, protecting = (Write(keys, values, gain(keys, old, 0.1, rows)) for rows in (keys[:0], others))
    assert_close(protecting.gain, ridge(keys, 0.1 * old.moment + others.mT @ others).value)
    moved = [(others @ (write.apply(W) - W).mT).norm() for write in (free, protecting)]
    assert moved[1] < 0.5 * moved[0]


def test_methods_are_found_by_name():
    assert get_method("memit") is METHODS["memit"] is get_method(METHODS["memit"])
    with raises(UnknownNameError, "unknown_method"):
        get_method(Method("mine", "not in METHODS", METHODS["memit"].gain))
    with raises(UnknownNameError, "unknown_method") as caught:
        get_method("memt")
    assert "memit" in caught.value.advice
