"""Writes move the subjects' hidden states to their targets, and leave the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.methods import Method
from rebind.edit.moments import OldKeys
from rebind.edit.solve import CROWDING, SubjectStates, choose_lambda, solve_writes, weights_restored
from rebind.edit.targets import FactPrompts
from rebind.memory import Write
from rebind.memory.closed_form import equality, ridge
from rebind.models.prompts import EncodedPrompt
from rebind.models.sites import Site, find_sites, memory_of, module_at, write_memory
from rebind.models.trunk import Trunk
from tests import tiny
from tests.families import FAMILIES
from tests.support import Draw, assert_close

# Families in which the MLP adds its output to the hidden state unchanged: what is missing can be written exactly.
PLAIN_RESIDUAL = ["llama", "gpt2", "opt", "gpt-neo", "gpt-j", "gpt-neox", "bloom", "falcon", "phi", "qwen3", "mpt"]
EXACT = Method("exact", "", lambda keys, old, lam, earlier: equality(keys, old.factored).value)
RIDGE = Method("ridge", "", lambda keys, old, lam, earlier: ridge(keys, old.factored, lam).value)


def make_fact(seed: int, *prompts: tuple[int, int]) -> FactPrompts:
    draw = torch.Generator().manual_seed(seed)
    rows = [(tuple(torch.randint(3, 90, (length,), generator=draw).tolist()), at) for length, at in prompts]
    return FactPrompts(tuple(EncodedPrompt(ids, at, (5,)) for ids, at in rows))


BARE = [make_fact(0, (6, 3)), make_fact(1, (9, 8)), make_fact(2, (3, 0)), make_fact(3, (8, 4))]
VARIED = [make_fact(0, (6, 3), (9, 6), (12, 9)), make_fact(1, (9, 8), (11, 10)), make_fact(2, (3, 0), (8, 5))]


def sites_of(model: Any, layers: tuple[int, ...]) -> list[Site]:
    return [find_sites(model)[layer] for layer in layers]


def solve(
    trunk: Trunk, sites: list[Site], facts: list[FactPrompts], targets: Tensor, method: Method = EXACT, **options: Any
) -> dict[str, Write]:
    lam = options.pop("lam", 1.0)
    old_keys = {site.name: OldKeys(Draw(site.layer).moment(site.d_k)) for site in sites}
    delta = targets - states(trunk, sites[-1].layer, facts)
    return solve_writes(SubjectStates(trunk, facts, **options), sites, delta, method, old_keys, lam)


def states(trunk: Trunk, layer: int, facts: list[FactPrompts], **options: Any) -> Tensor:
    return SubjectStates(trunk, facts, **options).states_after(layer)


def apply(model: Any, writes: dict[str, Write]) -> None:
    for name, write in writes.items():
        wide = Write(*(tensor.double() for tensor in write.tensors()))
        write_memory(module_at(model, name), wide.apply(memory_of(module_at(model, name)).double()))


def make_targets(trunk: Trunk, layer: int, facts: list[FactPrompts]) -> tuple[Tensor, Tensor]:
    before = states(trunk, layer, facts)
    return before, before + 0.5 * Draw(9).normal(*before.shape)


# The writes


@pytest.mark.parametrize("name", PLAIN_RESIDUAL)
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_subjects_reach_their_targets(name, layers):
    model = FAMILIES[name](seed=4).double()
    trunk, last = tiny.trunk(model), layers[-1]
    before, targets = make_targets(trunk, last, BARE)
    writes = solve(trunk, sites_of(model, layers), BARE, targets)
    assert_close(states(trunk, last, BARE), before, 0.0)  # nothing is applied yet
    apply(model, writes)
    # Keys are stored in float32; behind an earlier layer's write that moves the last layer's keys by as much.
    error = states(trunk, last, BARE) - targets
    assert float(error.abs().max()) < 1e-4 * float((targets - before).abs().max())


def test_a_small_lambda_nearly_gets_there_and_a_large_one_does_nothing():
    model = tiny.llama(dtype=torch.float64)
    trunk, sites = tiny.trunk(model), sites_of(model, (0, 1, 2))
    before, targets = make_targets(trunk, 2, BARE)
    errors = []
    for lam in (1e-6, 1e-1, 1e6):
        with weights_restored([module_at(model, site.name) for site in sites]):
            apply(model, solve(trunk, sites, BARE, targets, RIDGE, lam=lam))
            errors.append(float((states(trunk, 2, BARE) - targets).norm() / (targets - before).norm()))
    assert errors[0] < 1e-3
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("budget", [1, 17, 40])
def test_the_budget_changes_nothing(budget):
    model = tiny.llama(dtype=torch.float64)
    trunk, sites = tiny.trunk(model), sites_of(model, (0, 1))
    targets = make_targets(trunk, 1, VARIED)[1]
    whole = solve(trunk, sites, VARIED, targets)
    parts = solve(trunk, sites, VARIED, targets, tokens_at_once=budget)
    for name, write in whole.items():
        for got, expected in zip(parts[name].tensors(), write.tensors(), strict=True):
            assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_the_model_is_left_byte_for_byte_as_it_was(build, dtype):
    model = build(dtype=dtype)
    before = tiny.weights(model)
    trunk, sites = tiny.trunk(model), sites_of(model, (0, 1))
    targets = make_targets(trunk, 1, BARE)[1]
    solve(trunk, sites, BARE, targets)
    assert tiny.weights(model) == before
    calls = []

    def interrupt(keys: Tensor, old: OldKeys, lam: float, earlier: Tensor) -> Tensor:
        calls.append(len(keys))
        if len(calls) == 2:  # the first layer has been written by now
            assert tiny.weights(model) != before
            raise KeyboardInterrupt
        return equality(keys, old.factored).value

    with pytest.raises(KeyboardInterrupt):
        solve(trunk, sites, BARE, targets, Method("interrupted", "", interrupt))
    assert tiny.weights(model) == before


def test_lambda_achieves_the_same_share_at_any_scale():
    draw = Draw(3)
    old, keys = OldKeys(draw.moment(20)), draw.normal(1, 20)
    for scale in (1e-3, 1.0, 1e3):
        lam = choose_lambda(scale * keys, old, share=0.25)
        achieved = scale * keys @ ridge(scale * keys, old.factored, lam).value.mT
        assert float(achieved) == pytest.approx(1 / (1 + 0.25 + CROWDING / 20), rel=1e-9)
    alone, crowd = choose_lambda(keys, old), choose_lambda(keys.expand(40, 20), old)
    assert crowd / alone == pytest.approx((0.1 + 2 * CROWDING) / (0.1 + CROWDING / 20)), "more keys, larger λ"


# Keys and hidden states of subjects


def test_the_bare_prompt_is_half_of_a_key():
    model = tiny.llama(dtype=torch.float64)
    trunk, (site,) = tiny.trunk(model), sites_of(model, (1,))
    seen: list[Tensor] = []
    handle = module_at(model, site.name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    expected = []
    for fact in [*VARIED, BARE[0]]:
        rows = []
        for prompt in fact.prompts:
            with torch.no_grad():
                model(input_ids=torch.tensor([prompt.ids]))
            rows.append(seen.pop()[0, prompt.subject_last])
        expected.append(rows[0] / 2 + torch.stack(rows[1:]).mean(0) / 2 if len(rows) > 1 else rows[0])
    handle.remove()
    keys = SubjectStates(trunk, [*VARIED, BARE[0]]).keys(site)
    assert keys.dtype == torch.float32
    assert_close(keys, torch.stack(expected), 1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "olmo3"])
@pytest.mark.parametrize("budget", [30, 10_000])
def test_what_is_written_below_is_seen(name, budget):
    """From the bottom up, with a write after each layer, results are those of fresh runs on the model so far."""
    model = FAMILIES[name](seed=2)
    trunk = tiny.trunk(model)
    subjects = SubjectStates(trunk, VARIED, tokens_at_once=budget)
    for site in sites_of(model, (0, 1, 2)):
        assert_close(subjects.keys(site), SubjectStates(trunk, VARIED).keys(site), 1e-5)
        before = states(trunk, 2, VARIED)
        assert_close(subjects.states_after(2), before, 1e-5)
        module = module_at(model, site.name)
        write_memory(module, memory_of(module) + Draw(site.layer).normal(site.d_v, site.d_k))
        assert (states(trunk, 2, VARIED) - before).abs().max() > 1e-2, "the write should be seen"


def test_every_mention_in_every_prompt_has_a_key_of_its_own():
    model = tiny.llama(dtype=torch.float64)
    trunk, (site,) = tiny.trunk(model), sites_of(model, (1,))
    chat = EncodedPrompt((3, 4, 5, 6, 7, 4, 8), 5, (9,), mentions=(1, 5))
    bare = EncodedPrompt((3, 4, 5, 6), 1, (9,))  # its key is that of the first mention in the chat
    other = EncodedPrompt((8, 9, 4, 6), 2, (9,))
    subjects = SubjectStates(trunk, [FactPrompts((bare, chat, other)), BARE[0]], several_keys=True)
    rows = [(bare.ids[:2]), chat.ids[:6], other.ids[:3], BARE[0].prompts[0].ids[:4]]
    seen: list[Tensor] = []
    handle = module_at(model, site.name).register_forward_pre_hook(lambda _, args: seen.append(args[0][0, -1]))
    with torch.no_grad():
        for ids in rows:
            model(input_ids=torch.tensor([ids]))
    handle.remove()
    assert_close(subjects.keys(site), torch.stack(seen), 1e-6)
    assert subjects.owner.tolist() == [0, 0, 0, 1]
    assert_close(subjects.weights, torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0], dtype=torch.float64), 1e-12)


def test_several_keys_all_reach_the_target():
    model = tiny.llama(dtype=torch.float64)
    trunk, sites = tiny.trunk(model), sites_of(model, (0, 1))
    before = states(trunk, 1, VARIED, several_keys=True)
    delta = 0.5 * Draw(9).normal(len(VARIED), before.shape[-1])
    old_keys = {site.name: OldKeys(Draw(site.layer).moment(site.d_k)) for site in sites}
    subjects = SubjectStates(trunk, VARIED, several_keys=True)
    writes = solve_writes(subjects, sites, delta, EXACT, old_keys, 1.0)
    apply(model, writes)
    moved = states(trunk, 1, VARIED, several_keys=True) - before
    assert_close(moved, delta[subjects.owner], 1e-3)
