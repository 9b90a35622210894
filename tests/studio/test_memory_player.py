"""The memory player: its trajectories are those of `rebind.memory`, and its readings mean what they say."""

from __future__ import annotations

import pytest
import torch

from rebind.errors import FieldError
from rebind.memory import Memory, get_rule
from rebind.studio.memory_player import FEATURES, Geometry, Pair, Player, Script, read_pairs, read_player, rules

PAIRS = read_pairs("France = Paris\nItaly -> Rome\nSpain: Madrid\n\nNorway → Oslo\nItaly = Milan\nFrance = Paris")
SCRIPT = Script(PAIRS)
GATES = {"alpha": 0.9, "beta": 0.7, "dt": 0.8, "erase": 0.6, "write": 0.9, "feedback": 0.8, "scale": 0.7, "a": 0.5}


def gates_of(rule):
    return {name: GATES.get(name, default) for name, default in rule.gates.items()}


def vectors(script, geometry):
    keys = dict(zip(script.keys, geometry.keys(script.keys), strict=True))
    values = dict(zip(script.values, geometry.values(script.values), strict=True))
    return torch.stack([keys[p.key] for p in script.pairs]), torch.stack([values[p.value] for p in script.pairs])


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_a_trajectory_is_what_memory_binds(rule, feature):
    geometry = Geometry(width=6, similarity=0.3, seed=4)
    keys, values = vectors(SCRIPT, geometry)
    trajectory = SCRIPT.play(Player(rule, gates_of(rule), feature), geometry)
    memory = Memory(6, 6, rule, feature, dtype=torch.float64)
    for number, (key, value) in enumerate(zip(keys, values, strict=True), 1):
        memory.bind(key, value, **gates_of(rule))
        torch.testing.assert_close(trajectory.matrices[number], memory.weights)
        for index, name in enumerate(SCRIPT.keys):
            written = [value for pair, value in zip(PAIRS[:number], values, strict=False) if pair.key == name]
            if not written:
                assert trajectory.errors[number, index].isnan()
                continue
            read = memory.recall(keys[[pair.key for pair in PAIRS].index(name)])
            expected = (read - written[-1]).square().sum() / written[-1].square().sum()
            torch.testing.assert_close(trajectory.errors[number, index], expected)
    assert not trajectory.matrices[0].any()


def test_delta_overwrites_orthogonal_keys_exactly_and_sum_does_not():
    geometry = Geometry(width=8, orthogonal=True)
    delta, total = (SCRIPT.play(Player(get_rule(name)), geometry) for name in ("delta", "sum"))
    italy, france = SCRIPT.keys.index("Italy"), SCRIPT.keys.index("France")
    assert float(delta.errors[-1].max()) < 1e-24
    assert SCRIPT.forgotten(delta)[-1] == []
    assert float(total.errors[-1, italy]) == pytest.approx(1.0)  # all of Rome is still there
    assert float(total.remains[-1, italy]) == pytest.approx(1.0)
    assert float(delta.remains[-1, italy]) == pytest.approx(0.0, abs=1e-12)
    assert float(total.errors[-1, france]) == pytest.approx(1.0)  # Paris was added twice
    assert total.remains[-1, france].isnan()  # writing the same value again replaces nothing


def test_a_full_memory_forgets():
    script = Script(tuple(Pair(f"k{n}", f"v{n}") for n in range(24)))
    trajectory = script.play(Player(get_rule("sum")), Geometry(width=4))
    forgotten = script.forgotten(trajectory)
    assert forgotten[:2] == [[], []]
    assert len(forgotten[-1]) > 6
    for index in forgotten[-1]:
        assert trajectory.answers[-1][index] != f"v{index}"


def test_a_memory_that_retains_nothing_answers_nothing():
    script = Script((Pair("a", "x"), Pair("b", "y")))
    trajectory = script.play(Player(get_rule("mamba2"), {"alpha": 0.0}), Geometry(width=4, orthogonal=True))
    assert trajectory.answers == [[None, None], ["x", None], [None, "y"]]
    assert script.forgotten(trajectory) == [[], [], [0]]
    assert trajectory.errors[2].tolist() == pytest.approx([1.0, 0.0])
    assert trajectory.mean_errors() == [None, pytest.approx(0.0, abs=1e-20), pytest.approx(0.5)]


@pytest.mark.parametrize("similarity", [0.0, 0.25, 0.9])
def test_orthogonal_keys_have_exactly_the_similarity(similarity):
    keys = Geometry(width=8, similarity=similarity, orthogonal=True).keys(list("abcdefg"))
    expected = torch.full((7, 7), similarity, dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(keys @ keys.mT, expected)


def test_a_name_is_the_same_vector_in_every_sequence():
    for orthogonal in (False, True):
        geometry = Geometry(width=8, similarity=0.2, orthogonal=orthogonal)
        short, long = geometry.keys(["a", "b"]), geometry.keys(["a", "b", "c", "d"])
        torch.testing.assert_close(short, long[:2])
    other = Geometry(width=8, seed=1)
    assert not torch.allclose(other.keys(["a"]), Geometry(width=8).keys(["a"]))
    assert not torch.allclose(other.keys(["a"]), other.values(["a"]))


def test_random_keys_have_the_similarity_on_average():
    keys = Geometry(width=32, similarity=0.5).keys([f"k{n}" for n in range(64)])
    cosines = (keys @ keys.mT)[~torch.eye(64, dtype=torch.bool)]
    assert float(cosines.mean()) == pytest.approx(0.5, abs=0.05)


def test_a_gate_per_channel_decays_columns_differently():
    player = read_player("gla", {"alpha": [0.0, 1.0]})
    keys, values = torch.eye(3, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    after = player.matrices(keys, values)[-1]
    assert after.tolist() == [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]


def test_json_is_rounded_and_has_no_nan():
    data = SCRIPT.to_json(read_player("delta", {"beta": 0.5}), Geometry(width=4))
    assert data["errors"][0] == [None] * 4
    assert data["errors"][1][1:] == [None] * 3
    trajectory = SCRIPT.play(read_player("delta", {"beta": 0.5}), Geometry(width=4))
    torch.testing.assert_close(
        torch.tensor(data["matrices"], dtype=torch.float64), trajectory.matrices, atol=5e-5, rtol=0
    )
    assert data["errors"][-1] == pytest.approx(trajectory.errors[-1].tolist(), rel=1e-5)
    replaced = [write["replaces"] for write in SCRIPT.writes()]
    assert replaced == [None, None, None, None, "Rome", None]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: read_pairs("France Paris"), "pairs"),
        (lambda: read_pairs("France ="), "pairs"),
        (lambda: Script(read_pairs("")), "pairs"),
        (lambda: Script(tuple(Pair("a", "b") for _ in range(65))), "pairs"),
        (lambda: Geometry(width=3, orthogonal=True).keys(list("abcd")), "width"),
        (lambda: Geometry(width=3, similarity=0.1, orthogonal=True).keys(list("abc")), "width"),
        (lambda: read_player("delta", {"beta": 3.0}), "beta"),
        (lambda: read_player("delta", {"beta": [0.0, 1.0]}), "beta"),
        (lambda: read_player("delta", {"beta": "much"}), "beta"),
        (lambda: read_player("delta", {"gamma": 1.0}), "gate"),
        (lambda: read_player("delta_product", {}), "rule"),
        (lambda: read_player("nothing", {}), "rule"),
        (lambda: read_player("delta", {}, "favor"), "feature"),
    ],
)
def test_bad_input_names_its_field(call, field):
    with pytest.raises(FieldError) as caught:
        call()
    assert caught.value.field == field
