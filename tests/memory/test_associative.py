"""`Memory`: what a newcomer does with it, what it promises, what it refuses."""

from __future__ import annotations

import os

import pytest
import torch

import rebind
from rebind.errors import InputError, NumericalError, ShapeError, UnknownNameError
from rebind.memory import feature_names, get_rule, rule_names
from rebind.memory.features import Dpfp
from tests.support import Draw, assert_close


def memory(d_k=8, d_v=3, *args, **kwargs):
    return rebind.Memory(d_k, d_v, *args, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("feature", feature_names())
def test_bind_and_recall(feature):
    m, draw = memory(feature=feature), Draw(1)
    key, value = draw.normal(8), draw.normal(3)
    assert_close(m.recall(key), torch.zeros(3).double(), 0.0)
    m.bind(key, value)
    assert_close(m.recall(key), value)


def test_orthogonal_keys_do_not_disturb_each_other():
    m, draw = memory(), Draw(2)
    keys, values = draw.orthonormal(8, 8), draw.normal(8, 3)
    m.bind(keys, values)
    assert_close(m.recall(keys), values)
    assert m.load == 1.0
    assert_close(m.interference(keys).overlap, torch.zeros(8, 8).double(), 1e-12)


@pytest.mark.parametrize("rule", rule_names())
def test_binding_many_is_binding_one_by_one(rule):
    draw = Draw(3)
    keys, values = draw.normal(20, 8), draw.normal(20, 3)
    gates = {name: 0.2 + 0.6 * draw.uniform(20) for name in get_rule(rule).gates}
    together, apart = memory(rule=rule, feature="dpfp"), memory(rule=rule, feature="dpfp")
    together.bind(keys, values, **gates)
    for i in range(20):
        apart.bind(keys[i], values[i], **{name: float(gate[i]) for name, gate in gates.items()})
    assert_close(together.weights, apart.weights)
    assert together.rows == apart.rows == 20


@pytest.mark.parametrize("rule", rule_names())
def test_rebind_is_exact_whatever_the_rule(rule):
    m, draw = memory(rule=rule), Draw(4)
    keys, values = draw.normal(5, 8), draw.normal(5, 3)
    m.bind(keys, values)
    new = draw.normal(2, 3)
    m.rebind(keys[:2], new)
    assert_close(m.recall(keys[:2]), new)
    assert m.rows == 5
    m.unbind(keys[0])
    assert_close(m.recall(keys[0]), torch.zeros(3).double())
    assert m.rows == 4


def test_rebind_makes_the_smallest_change():
    m, draw = memory(), Draw(5)
    keys = draw.normal(5, 8)
    m.bind(keys, draw.normal(5, 3))
    before, direction = m.weights.clone(), torch.nn.functional.normalize(keys[0], dim=-1)
    value = draw.normal(3)
    m.rebind(keys[0], value)
    assert_close(m.weights - before, torch.outer(value - before @ direction, direction))


def test_protected_keys_do_not_move():
    m, draw = memory(), Draw(6)
    keys, values = draw.normal(5, 8), draw.normal(5, 3)
    m.bind(keys, values)
    before = m.recall(keys[1:])
    loose, value = rebind.Memory(8, 3, dtype=torch.float64), draw.normal(3)
    loose.weights = m.weights.clone()
    loose.rebind(keys[0], value)
    m.rebind(keys[0], value, protect=keys[1:])
    assert_close(m.recall(keys[0]), value)
    assert_close(m.recall(keys[1:]), before)
    assert float((loose.recall(keys[1:]) - before).abs().max()) > 0.01
    m.unbind(keys[0], protect=keys[1:])
    assert_close(m.recall(keys[1:]), before)


def test_interference_is_what_binding_does():
    """Entry (i, j) is how much of a value bound at key j is read at key i."""
    draw = Draw(7)
    keys = draw.normal(4, 8)
    for rule in ("sum", "delta", "longhorn"):
        m = memory(rule=rule)
        report = m.interference(keys)
        for j in range(4):
            alone = memory(8, 1, rule=rule)
            alone.bind(keys[j], torch.ones(1).double())
            read = alone.recall(keys)[:, 0]
            read[j] = 0.0
            assert_close(report.overlap[:, j], read)
        assert_close(report.caused, report.overlap.square().sum(0))
        assert_close(report.suffered, report.overlap.square().sum(1))
        assert_close(m.weights, torch.zeros(3, 8).double(), 0.0)


def test_random_keys_interfere_as_theory_says():
    """(n − 1)/d for random directions."""
    report = memory(64, 3).interference(Draw(8).normal(33, 64))
    assert float(report.suffered.mean()) == pytest.approx(32 / 64, rel=0.1)


def test_a_wider_feature_leaves_more_room():
    keys = Draw(9).normal(40, 8)
    narrow, wide = memory(), memory(feature=Dpfp(8, nu=6))
    assert wide.interference(keys).suffered.mean() < narrow.interference(keys).suffered.mean()
    assert wide.feature.width == 96
    assert memory(feature="dpfp", nu=6).feature.width == 96


@pytest.mark.parametrize("feature", feature_names())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_save_and_load(tmp_path, feature, dtype):
    draw = Draw(10)
    m = rebind.Memory(8, 3, "gated_delta", feature, "l2", dtype=dtype)
    m.bind(draw.normal(5, 8), draw.normal(5, 3))
    m.save(tmp_path / "m.safetensors")
    back = rebind.load(tmp_path / "m.safetensors")
    assert repr(back) == repr(m)
    query = draw.normal(4, 8)
    assert torch.equal(back.weights, m.weights)
    assert torch.equal(back.recall(query), m.recall(query))
    assert back.recall(query).dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    m = memory()
    path = tmp_path / "m.safetensors"
    m.save(path)
    before = path.read_bytes()
    m.bind(Draw(11).normal(8), Draw(11).normal(3))

    def full(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        m.save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    damaged.write_bytes(b"not a memory")
    save_file({"weights": torch.zeros(2, 2)}, foreign)
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        rebind.load(damaged)
    with pytest.raises(InputError, match="not a saved memory"):
        rebind.load(foreign)
    with pytest.raises(FileNotFoundError):
        rebind.load(tmp_path / "absent")


def test_recall_takes_any_leading_shape():
    m, draw = memory(), Draw(12)
    m.bind(draw.normal(5, 8), draw.normal(5, 3))
    queries = draw.normal(2, 4, 8)
    assert_close(m.recall(queries)[1, 2], m.recall(queries[1, 2]))


def test_binding_nothing_changes_nothing():
    m = memory()
    m.bind(torch.zeros(0, 8).double(), torch.zeros(0, 3).double())
    m.unbind(torch.zeros(0, 8).double())
    assert m.rows == 0


def test_what_is_refused_changes_nothing():
    m, draw = memory(), Draw(13)
    m.bind(draw.normal(5, 8), draw.normal(5, 3))
    weights, rows = m.weights.clone(), m.rows
    key, value, poison = draw.normal(8), draw.normal(3), torch.full((3,), float("nan")).double()
    attempts = [
        (ShapeError, "keys .* is 7 wide, this memory takes 8", lambda: m.bind(draw.normal(7), value)),
        (ShapeError, "values .* is 4 wide, this memory takes 3", lambda: m.bind(key, draw.normal(4))),
        (ShapeError, "one value a key", lambda: m.bind(draw.normal(2, 8), value)),
        (ShapeError, "flatten", lambda: m.bind(draw.normal(2, 2, 8), draw.normal(2, 2, 3))),
        (InputError, "values .* 3 NaN", lambda: m.bind(key, poison)),
        (InputError, "values .* 3 NaN", lambda: m.rebind(key, poison)),
        (InputError, "keys .* NaN", lambda: m.unbind(key * float("inf"))),
        (InputError, "gate 'alpha'", lambda: m.bind(key, value, alpha=0.5)),
        (InputError, "int64", lambda: m.bind(key.long(), value)),
        (NumericalError, "9 keys of width 8", lambda: m.rebind(draw.normal(9, 8), draw.normal(9, 3))),
    ]
    for error, message, attempt in attempts:
        with pytest.raises(error, match=message):
            attempt()
        assert torch.equal(m.weights, weights)
        assert m.rows == rows


def test_unknown_parts_are_refused():
    with pytest.raises(UnknownNameError, match="unknown rule"):
        memory(rule="delts")
    with pytest.raises(UnknownNameError, match="unknown feature"):
        memory(feature="dpfq")
    with pytest.raises(UnknownNameError, match="unknown normalisation 'l3', expected one of l2, none, sum"):
        memory(normalise="l3")
    with pytest.raises(InputError, match="nu is 0"):
        memory(feature="dpfp", nu=0)
    with pytest.raises(ShapeError, match="d_v is 0"):
        memory(8, 0)


def test_sum_normalisation_needs_non_negative_features():
    with pytest.raises(InputError, match="non-negative"):
        memory(normalise="sum").bind(Draw(14).normal(8), Draw(14).normal(3))
    m = memory(feature="dpfp", normalise="sum")
    m.bind(Draw(14).normal(8), Draw(14).normal(3))
    assert float(m.recall(Draw(14).normal(8)).norm()) > 0
