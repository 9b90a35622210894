"""Routed experts are one memory: closed forms on its blocks are those on the whole matrix."""

from __future__ import annotations

import pytest
import torch

from rebind.edit.methods import METHODS
from rebind.edit.moments import EXPERT_PRIOR, OldKeys
from rebind.models.experts import RoutedKeys
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from tests.model_types import build
from tests.support import Draw, assert_close
from tests.tiny import weights

EXPERTS, INNER = 3, 8


def block_moment() -> torch.Tensor:
    return torch.stack([Draw(seed).moment(INNER) for seed in range(EXPERTS)])


def test_keys_as_vectors_and_their_moment():
    draw = Draw(0)
    parts, experts = draw.normal(2, 5, 2, INNER), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]).repeat(2, 1, 1)
    keys = RoutedKeys(parts, experts, EXPERTS)
    first = keys[0, 0].unflatten(-1, (EXPERTS, INNER))
    assert_close(first, torch.stack([parts[0, 0, 0], torch.zeros(INNER), parts[0, 0, 1]]), 0.0)
    mask = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    gram = keys[mask].mT @ keys[mask]
    for expert, block in enumerate(keys.second_moment(mask)):
        rows = slice(expert * INNER, (expert + 1) * INNER)
        assert_close(block, gram[rows, rows], 1e-12)


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("alphaedit", "dense")])
def test_a_gain_of_blocks_is_that_of_the_whole_matrix(name, earlier):
    draw, moment = Draw(1), block_moment()
    keys, before = draw.normal(4, EXPERTS * INNER), draw.normal(earlier, EXPERTS * INNER)
    prior = EXPERT_PRIOR * moment.diagonal(dim1=-2, dim2=-1).mean()
    dense = OldKeys(torch.block_diag(*moment) + prior * torch.eye(EXPERTS * INNER, dtype=moment.dtype))
    gain = METHODS[name].gain
    assert_close(gain(keys, OldKeys(moment), 0.3, before), gain(keys, dense, 0.3, before), 1e-9)


def test_alphaedit_leaves_the_directions_that_each_expert_uses():
    draw, moment = Draw(2), block_moment()
    old_keys = OldKeys(moment)
    keys, before = draw.normal(3, EXPERTS * INNER), draw.normal(2, EXPERTS * INNER)
    gain = METHODS["alphaedit"].gain(keys, old_keys, 0.3, before).unflatten(-1, (EXPERTS, INNER))
    most_used = torch.linalg.eigh(moment).eigenvectors[..., -1]  # [experts, inner]
    assert float((gain * most_used).sum(-1).abs().max()) < 1e-9 * float(gain.abs().max())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])  # gpt-oss stores the transpose
def test_the_memory_is_written_as_it_is_read(kind):
    model = build(kind)
    site, before = find_sites(model)[1], weights(model)
    module = module_at(model, site.name)
    memory = memory_of(module).clone()
    write_memory(module, memory + 1)
    assert torch.equal(memory_of(module), memory + 1)
    assert sum(before[name] != after for name, after in weights(model).items()) == 1
    write_memory(module, memory)
    assert weights(model) == before
