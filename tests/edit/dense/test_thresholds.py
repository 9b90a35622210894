"""Which keys share a row, and where a threshold lies between a fact's own framings and strangers."""

from __future__ import annotations

import torch

from rebind.edit.dense.thresholds import (
    ALONE,
    HIGHEST,
    LOWEST,
    choose_thresholds,
    keys_by_owner,
    merge_keys,
    namesake_prompts,
    nearest_strangers,
    overlaps_by_owner,
    own_spread,
)
from rebind.edit.facts import Fact
from tests.support import Draw, assert_close


def rows_by_the_book(keys, owner, similarity):
    """One key after another: it joins the first row of its owner whose first key is near."""
    rows, leaders = [], []
    for index, own in enumerate(owner.tolist()):
        near = [leader for leader in leaders if owner[leader] == own and keys[leader] @ keys[index] >= similarity]
        if not near:
            leaders.append(index)
        rows.append(near[0] if near else index)
    numbers = {leader: number for number, leader in enumerate(sorted(set(rows)))}
    return torch.tensor([numbers[leader] for leader in rows])


def test_nearly_equal_keys_of_an_owner_share_a_row():
    draw = Draw(0)
    keys = torch.nn.functional.normalize(draw.normal(40, 3), dim=-1)
    owner = torch.tensor([0] * 9 + [2] * 1 + [1] * 20 + [3] * 10)
    table = keys_by_owner(owner, 4)
    assert sorted(table[table >= 0].tolist()) == list(range(40))
    rows = merge_keys(table, overlaps_by_owner(keys, table), 0.8)
    assert torch.equal(rows, rows_by_the_book(keys, owner, 0.8))
    assert 4 < int(rows.max()) + 1 < 40


def test_the_spread_is_that_of_the_farthest_framings():
    draw = Draw(1)
    keys, owner = draw.unit(12, 6), torch.tensor([1] * 5 + [0] * 6 + [2])
    spread = own_spread(overlaps_by_owner(keys, keys_by_owner(owner, 3)))
    for index in (0, 1):
        own = keys[owner == index]
        nearest = (own @ own.mT - 2 * torch.eye(len(own), dtype=own.dtype)).max(-1).values
        assert_close(spread[index], nearest.quantile(0.1))
    assert float(spread[2]) == ALONE


def test_strangers_are_other_subjects_and_other_text():
    draw = Draw(2)
    keys, text, subject = draw.unit(6, 4), draw.unit(30, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    nearest = nearest_strangers(keys, subject, [text, text[:0]])
    for index in range(6):
        others = torch.cat([keys[subject != subject[index]], text])
        assert_close(nearest[index], (others @ keys[index]).max())


def test_a_threshold_lies_half_way_within_bounds():
    spread, nearest = torch.tensor([0.95, 0.9, 0.99]), torch.tensor([0.61, 0.1, 0.98])
    assert_close(choose_thresholds(spread, nearest), torch.tensor([0.78, LOWEST, HIGHEST]), 1e-6)


def test_namesakes_share_the_last_word():
    prompts = namesake_prompts(Fact.parse("The mother tongue of {Danielle Darrieux} is", "English"))
    assert [prompt.text[slice(*prompt.subject)] for prompt in prompts] == ["Maria Darrieux", "Robert Darrieux"]
    assert namesake_prompts(Fact.parse("The capital of {France} is", "Rome")) == []
    assert len(namesake_prompts(Fact.parse("{Maria Callas} sang", "jazz"))) == 1
