"""`Memory`: what a newcomer does with it, what it promises, what it refuses."""

from __future__ import annotations

import json
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
    with pytest.raises(InputError, match="not a saved memory of format"):
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


def test_caused_and_suffered_are_not_the_same():
    """Without normalisation a long key under Longhorn disturbs others more than they disturb it."""
    m = memory(rule="longhorn", normalise="none")
    keys = torch.stack([torch.eye(8)[0] * 10, torch.eye(8)[0] + torch.eye(8)[1]]).double()
    report = m.interference(keys)
    assert report.overlap[0, 1] != report.overlap[1, 0]
    assert_close(report.caused, torch.stack([report.overlap[1, 0], report.overlap[0, 1]]).square())
    assert_close(report.suffered, report.caused.flip(0))


def test_load_is_against_the_features_width():
    m, draw = memory(feature="dpfp"), Draw(15)
    m.bind(draw.normal(4, 8), draw.normal(4, 3))
    assert m.load == 4 / 16
    m.unbind(draw.normal(6, 8))
    assert m.load == 0.0


def test_the_default_rule_is_delta():
    m, draw = memory(), Draw(16)
    key, first, second = draw.normal(8), draw.normal(3), draw.normal(3)
    m.bind(key, first)
    m.bind(key, second)
    assert_close(m.recall(key), second)


def test_every_setting_is_saved(tmp_path):
    m = memory(8, 3, "mamba2", "favor", "sum", m=5, seed=3)
    m.feature.projection = m.feature.projection + 1  # as a learned or replaced projection would be
    m.bind(Draw(17).normal(8), Draw(17).normal(3))
    m.weights = m.weights.requires_grad_() * 1.0
    m.save(tmp_path / "m")
    back = rebind.load(tmp_path / "m")
    assert repr(back) == repr(m)
    assert back.normalise == "sum"
    assert torch.equal(back.feature.projection, m.feature.projection)
    assert_close(back.recall(Draw(18).normal(8)), m.recall(Draw(18).normal(8)), 1e-15)
    assert not back.weights.requires_grad


def test_saving_respects_the_umask_and_follows_links(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    memory().save(real)
    assert real.stat().st_mode & 0o777 == 0o666 & ~_umask()
    link.symlink_to(real)
    m = memory()
    m.bind(Draw(19).normal(8), Draw(19).normal(3))
    m.save(link)
    assert link.is_symlink()
    assert rebind.load(real).rows == 1


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path / 'none'} does not exist"):
        memory().save(tmp_path / "none" / "m")
    with pytest.raises(FileNotFoundError, match="not a file"):
        rebind.load(tmp_path)


def test_a_part_without_a_name_of_its_own_is_not_saved(tmp_path):
    class Louder(type(get_rule("sum"))):
        pass

    with pytest.raises(InputError, match="rule Louder goes by the name 'sum' of another class"):
        memory(rule=Louder()).save(tmp_path / "m")


@pytest.mark.parametrize(
    "change",
    [{"d_k": None}, {"rows": -3}, {"rows": "a"}, {"options": None}, {"rule": "nosuch"}, {"d_k": 9}, {"normalise": 1}],
)
def test_bad_descriptions_are_refused(tmp_path, change):
    from safetensors.torch import save_file

    described = {
        "format": "rebind-memory-1",
        "rule": "delta",
        "feature": "identity",
        "options": {},
        "normalise": "l2",
        "d_k": 8,
        "rows": 0,
    }
    changed = {name: value for name, value in {**described, **change}.items() if value is not None or name == "options"}
    path = tmp_path / "m"
    save_file({"weights": torch.zeros(3, 8)}, path, metadata={"rebind": json.dumps(changed)})
    with pytest.raises(InputError):
        rebind.load(path)
    save_file({"weights": torch.full((3, 8), float("nan"))}, path, metadata={"rebind": json.dumps(described)})
    with pytest.raises(InputError, match="weights .* NaN"):
        rebind.load(path)
    save_file({"weights": torch.zeros(3, 8)}, path, metadata={"rebind": "[1]"})
    with pytest.raises(InputError, match="not a saved memory"):
        rebind.load(path)


def test_keys_without_features_are_refused():
    m = rebind.Memory(8, 2, feature="relu")
    with pytest.raises(InputError, match=r"key 1 is all zeros under Relu\(8\)"):
        m.bind(torch.stack([torch.ones(8), -torch.ones(8)]), torch.ones(2, 2))
    assert m.rows == 0
    assert torch.equal(m.recall(-torch.ones(8)), torch.zeros(2))
    with pytest.raises(InputError, match="key 0 is all zeros"):
        rebind.Memory(8, 2).rebind(torch.zeros(8), torch.ones(2))


@pytest.mark.parametrize("scale", [1e-20, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("feature", ["identity", "dpfp", "favor", "elu+1"])
def test_keys_of_any_scale_are_recalled(scale, feature):
    m = rebind.Memory(64, 2, feature=feature)
    key, value = scale * Draw(20).normal(64).float(), torch.ones(2)
    m.bind(key, value)
    assert_close(m.recall(key), value, 1e-5)


def test_features_that_underflow_are_refused():
    """DPFP's products of keys of 1e-30 are zero in float32: said, not stored."""
    with pytest.raises(InputError, match="all zeros"):
        rebind.Memory(64, 2, feature="dpfp").bind(1e-30 * torch.ones(64), torch.ones(2))


def test_half_precision_overflow_is_refused():
    m = rebind.Memory(8, 2, dtype=torch.float16)
    with pytest.raises(InputError, match="keys .* NaN or infinite"):
        m.recall(torch.full((8,), 1e5))


def test_protecting_everything_protects_the_others():
    m, draw = memory(), Draw(21)
    keys, values = draw.normal(4, 8), draw.normal(4, 3)
    m.bind(keys, values)
    before, new = m.recall(keys), draw.normal(3)
    m.rebind(keys[1], new, protect=keys)
    assert_close(m.recall(keys[1]), new)
    assert_close(m.recall(keys)[[0, 2, 3]], before[[0, 2, 3]])


def test_gates_that_do_not_fit_are_refused():
    m, draw = memory(), Draw(22)
    with pytest.raises(ShapeError, match="beta"):
        m.bind(draw.normal(3, 8), draw.normal(3, 3), beta=torch.rand(2))
    with pytest.raises(InputError, match="dtype is torch.int64"):
        rebind.Memory(8, 2, dtype=torch.int64)
    m.bind(draw.normal(8), draw.normal(3), beta=torch.tensor(0.5))
    assert m.rows == 1


def test_recall_has_gradients():
    m, draw = memory(feature="elu+1"), Draw(23)
    m.bind(draw.normal(4, 8), draw.normal(4, 3))
    assert torch.autograd.gradcheck(m.recall, draw.normal(2, 8).requires_grad_())
