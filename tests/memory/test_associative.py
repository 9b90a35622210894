"""`Memory`: what a newcomer does with it, what it promises, what it refuses."""

from __future__ import annotations

import json
import os

import pytest
import torch

from rebind.errors import InputError, NumericalError, ShapeError, UnknownNameError
from rebind.memory import Memory, feature_names, get_rule, rule_names
from tests.support import Draw, assert_close, assert_errors, raises

SINGLE = [name for name in rule_names() if not get_rule(name).several]


def memory(d_k=8, d_v=3, *args, **kwargs):
    return Memory(d_k, d_v, *args, dtype=torch.float64, **kwargs)


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
    assert m.load_factor == 1.0
    assert_close(m.interference(keys).overlap, torch.zeros(8, 8).double(), 1e-12)


@pytest.mark.parametrize("rule", SINGLE)
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


@pytest.mark.parametrize("rule", SINGLE)
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
    loose, value = Memory(8, 3, dtype=torch.float64), draw.normal(3)
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


@pytest.mark.parametrize("feature", feature_names())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_save_and_load(tmp_path, feature, dtype):
    draw = Draw(10)
    m = Memory(8, 3, "gated_delta", feature, "l2", dtype=dtype)
    m.bind(draw.normal(5, 8), draw.normal(5, 3))
    m.save(tmp_path / "m.safetensors")
    back = Memory.load(tmp_path / "m.safetensors")
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
    assert_errors(
        (InputError, "not_a_memory_file", lambda: Memory.load(damaged)),
        (InputError, "not_a_memory_file", lambda: Memory.load(foreign)),
        (InputError, "no_such_file", lambda: Memory.load(tmp_path / "absent")),
    )


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
        (ShapeError, "wrong_width", lambda: m.bind(draw.normal(7), value)),
        (ShapeError, "wrong_width", lambda: m.bind(key, draw.normal(4))),
        (ShapeError, "row_counts_differ", lambda: m.bind(draw.normal(2, 8), value)),
        (ShapeError, "too_many_dimensions", lambda: m.bind(draw.normal(2, 2, 8), draw.normal(2, 2, 3))),
        (InputError, "not_finite", lambda: m.bind(key, poison)),
        (InputError, "not_finite", lambda: m.rebind(key, poison)),
        (InputError, "not_finite", lambda: m.unbind(key * float("inf"))),
        (InputError, "unknown_gate", lambda: m.bind(key, value, alpha=0.5)),
        (InputError, "not_floating_point", lambda: m.bind(key.long(), value)),
        (NumericalError, "too_many_keys", lambda: m.rebind(draw.normal(9, 8), draw.normal(9, 3))),
    ]
    for error, code, attempt in attempts:
        with raises(error, code):
            attempt()
        assert torch.equal(m.weights, weights)
        assert m.rows == rows


@pytest.mark.parametrize("shape", [(2,), (3, 1), (5, 1), (5, 3)])
def test_a_gate_needs_one_number_per_key(shape):
    """A gate that only broadcasts with the keys would make a batch of memories."""
    m, draw = memory(), Draw(22)
    for keys, values in ((draw.normal(3, 8), draw.normal(3, 3)), (draw.normal(8), draw.normal(3))):
        with raises(ShapeError, "gate_does_not_match"):
            m.bind(keys, values, beta=draw.uniform(*shape))
    assert m.rows == 0
    for gate in (torch.tensor(0.5), torch.tensor([0.5])):
        m.bind(draw.normal(8), draw.normal(3), beta=gate)
    assert m.weights.shape == (3, 8)


def test_unknown_parts_are_refused():
    assert_errors(
        (UnknownNameError, "unknown_rule", lambda: memory(rule="delts")),
        (UnknownNameError, "unknown_feature", lambda: memory(feature="dpfq")),
        (UnknownNameError, "unknown_normalization", lambda: memory(normalize="l3")),
        (InputError, "invalid_nu", lambda: memory(feature="dpfp", nu=0)),
        (ShapeError, "invalid_width", lambda: memory(8, 0)),
    )


def test_sum_normalization_needs_non_negative_features():
    with raises(InputError, "negative_features"):
        memory(normalize="sum").bind(Draw(14).normal(8), Draw(14).normal(3))
    m = memory(feature="dpfp", normalize="sum")
    m.bind(Draw(14).normal(8), Draw(14).normal(3))
    assert float(m.recall(Draw(14).normal(8)).norm()) > 0


def test_occupancy_is_relative_to_the_features_width():
    m, draw = memory(feature="dpfp"), Draw(15)
    m.bind(draw.normal(4, 8), draw.normal(4, 3))
    assert m.load_factor == 4 / 16
    m.unbind(draw.normal(6, 8))
    assert m.load_factor == 0.0


def test_every_setting_is_saved(tmp_path):
    m = memory(8, 3, "mamba2", "favor", "sum", m=5, seed=3)
    m.feature.projection = m.feature.projection + 1  # as a learned or replaced projection would be
    m.bind(Draw(17).normal(8), Draw(17).normal(3))
    m.weights = m.weights.requires_grad_() * 1.0
    m.save(tmp_path / "m")
    back = Memory.load(tmp_path / "m")
    assert repr(back) == repr(m)
    assert back.normalize == "sum"
    assert torch.equal(back.feature.projection, m.feature.projection)
    assert_close(back.recall(Draw(18).normal(8)), m.recall(Draw(18).normal(8)), 1e-15)
    assert not back.weights.requires_grad


@pytest.mark.parametrize(
    "change",
    [{"d_k": None}, {"rows": "a"}, {"options": None}, {"rule": "nosuch"}, {"d_k": 9}, {"normalize": 1}],
)
def test_bad_descriptions_are_refused(tmp_path, change):
    from safetensors.torch import save_file

    described = {
        "format": "rebind-memory-1",
        "rule": "delta",
        "feature": "identity",
        "options": {},
        "normalize": "l2",
        "d_k": 8,
        "rows": 0,
    }
    changed = {name: value for name, value in {**described, **change}.items() if value is not None or name == "options"}
    path = tmp_path / "m"
    save_file({"weights": torch.zeros(3, 8)}, path, metadata={"rebind": json.dumps(changed)})
    with raises(InputError, "not_a_memory_file"):
        Memory.load(path)
    save_file({"weights": torch.zeros(3, 8)}, path, metadata={"rebind": "[1]"})
    with raises(InputError, "not_a_memory_file"):
        Memory.load(path)


def test_keys_without_features_are_refused():
    m = Memory(8, 2, feature="relu")
    with raises(InputError, "zero_key"):
        m.bind(torch.stack([torch.ones(8), -torch.ones(8)]), torch.ones(2, 2))
    assert m.rows == 0
    assert torch.equal(m.recall(-torch.ones(8)), torch.zeros(2))
    with raises(InputError, "zero_key"):
        Memory(8, 2).rebind(torch.zeros(8), torch.ones(2))


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("feature", ["identity", "dpfp", "favor", "elu+1"])
def test_keys_of_any_scale_are_recalled(scale, feature):
    m = Memory(64, 2, feature=feature)
    key, value = scale * Draw(20).normal(64).float(), torch.ones(2)
    m.bind(key, value)
    assert_close(m.recall(key), value, 1e-5)


def test_half_precision_overflow_is_refused():
    m = Memory(8, 2, dtype=torch.float16)
    with raises(InputError, "not_finite"):
        m.recall(torch.full((8,), 1e5))


def test_protecting_everything_protects_the_others():
    m, draw = memory(), Draw(21)
    keys, values = draw.normal(4, 8), draw.normal(4, 3)
    m.bind(keys, values)
    before, new = m.recall(keys), draw.normal(3)
    m.rebind(keys[1], new, protect=keys)
    assert_close(m.recall(keys[1]), new)
    assert_close(m.recall(keys)[[0, 2, 3]], before[[0, 2, 3]])


def test_recall_has_gradients():
    m, draw = memory(feature="elu+1"), Draw(23)
    m.bind(draw.normal(4, 8), draw.normal(4, 3))
    assert torch.autograd.gradcheck(m.recall, draw.normal(2, 8).requires_grad_())


def test_a_file_with_a_flipped_bit_is_refused(tmp_path):
    memory = Memory(4, 3)
    memory.bind(torch.eye(4)[:2], torch.ones(2, 3))
    memory.save(tmp_path / "memory")
    data = bytearray((tmp_path / "memory").read_bytes())
    data[-1] ^= 1
    (tmp_path / "memory").write_bytes(data)
    with raises(InputError, "not_a_memory_file"):
        Memory.load(tmp_path / "memory")
