"""On a GPU: the search as a CUDA graph is the search step by step, and running in pieces is running whole."""

from __future__ import annotations

import warnings

import pytest
import torch

from rebind.edit.targets import optimize as targets_module
from rebind.edit.targets.optimize import TargetSettings, find_targets
from rebind.edit.targets.search_copy import hurry
from rebind.errors import CudaGraphWarning
from rebind.models.sites import find_sites, module_at
from rebind.models.trunk import Tokens, Trunk
from tests.edit.test_targets import LAYER, REQUESTS, SETTINGS
from tests.families import FAMILIES
from tests.support import assert_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

# Families whose code makes tensors on the host in the middle of a step, which a graph does not allow.
NOT_RECORDED = {"bloom", "falcon", "falcon-new", "gpt-j", "gpt-neo", "mpt"}


def _trunk(name: str) -> Trunk:
    model = FAMILIES[name](seed=2).double().cuda()
    return Trunk(model, [module_at(model, site.block) for site in find_sites(model)])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_recorded_search_is_the_search(name, monkeypatch):
    trunk = _trunk(name)
    settings = TargetSettings(steps=9, rate=0.3, clamp=0.9, decay=0.4, kl=0.3, enough=SETTINGS.enough)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in NOT_RECORDED else "error", CudaGraphWarning)
        recorded = find_targets(trunk, LAYER, REQUESTS, settings)
    monkeypatch.setattr(targets_module, "can_be_recorded", lambda trunk: False)
    plain = find_targets(trunk, LAYER, REQUESTS, settings)
    assert recorded.steps.tolist() == plain.steps.tolist()
    assert_close(recorded.hidden, plain.hidden, 1e-5)  # float32 inside norms and attention
    assert_close(recorded.loss, plain.loss, 1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_hurried_copy_is_recorded_too(name):
    """Its attention and its masks are ours: nothing in them may be made on the host."""
    trunk = _trunk(name)
    quick = trunk.narrowed(torch.float64)
    hurry(quick.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in NOT_RECORDED else "error", CudaGraphWarning)
        found = find_targets(trunk, LAYER, REQUESTS, SETTINGS, quick=quick)
        expected = find_targets(trunk, LAYER, REQUESTS, SETTINGS)
    assert_close(found.hidden, expected.hidden, 1e-4)


def test_a_model_that_cannot_be_recorded_is_searched_all_the_same(monkeypatch):
    trunk = _trunk("llama")
    expected = find_targets(trunk, LAYER, REQUESTS, SETTINGS)
    head = trunk.model.get_output_embeddings()

    def wait(*_: object) -> None:
        torch.cuda.synchronize()

    handle = head.register_forward_hook(wait)
    with pytest.warns(CudaGraphWarning, match="cannot be recorded"):
        found = find_targets(trunk, LAYER, REQUESTS, SETTINGS)
    handle.remove()
    assert_close(found.hidden, expected.hidden, 1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-j", "gemma2", "olmo3"])
def test_suffixes_behind_cached_prefixes_are_the_whole_rows(name):
    trunk = _trunk(name)
    rows = [[5, 6, 7, 8, 9], [11, 12, 13, 14], [21, 22, 23, 24, 25, 26]]
    cut = [2, 1, 3]
    past = Tokens.left_padded([row[:at] for row, at in zip(rows, cut, strict=True)], trunk.device)
    after = Tokens.following(past, [row[at:] for row, at in zip(rows, cut, strict=True)])
    where = torch.tensor([(index, len(row) - at - 1) for index, (row, at) in enumerate(zip(rows, cut, strict=True))])
    with torch.no_grad():
        found = trunk.logits(after, where, cache=trunk.cache(past))
        for index, row in enumerate(rows):
            whole = trunk.model(input_ids=torch.tensor([row]).cuda()).logits[0, -1]
            assert_close(found[index].double(), whole.double(), 1e-5)
