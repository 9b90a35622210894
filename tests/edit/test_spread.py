"""Targets spread over layers: the subject's hidden state arrives where it should, and the model is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.solve.layer_writes import CROWDING, Place, spread, suitable_lambda, unchanged
from rebind.edit.solve.subject_keys import Subjects, subject_keys, subject_states
from rebind.edit.targets.optimize import Prompt, Request
from rebind.memory import Write
from rebind.memory.closed_form import equality, ridge
from rebind.memory.solve import factor
from rebind.models.batching import MemoryWarning
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from rebind.models.trunk import Trunk
from tests import tiny
from tests.families import FAMILIES
from tests.support import Draw, assert_close

# Families whose MLP adds its output to the hidden state as it is: what is missing there can be written exactly.
PLAIN_RESIDUAL = [
    "llama",
    "gpt2",
    "opt",
    "gpt-neo",
    "gpt-j",
    "gpt-neox",
    "bloom",
    "falcon",
    "phi",
    "qwen3",
    "stablelm",
    "mpt",
]


def _request(seed: int, *prompts: tuple[int, int]) -> Request:
    draw = torch.Generator().manual_seed(seed)
    return Request(
        tuple(Prompt(tuple(torch.randint(3, 90, (n,), generator=draw).tolist()), at) for n, at in prompts), (5,)
    )


BARE = [_request(0, (6, 3)), _request(1, (9, 8)), _request(2, (3, 0)), _request(3, (8, 4))]
VARIED = [_request(0, (6, 3), (9, 6), (12, 9)), _request(1, (9, 8), (11, 10)), _request(2, (3, 0), (8, 5))]


def _places(model: Any, layers: tuple[int, ...]) -> list[Place]:
    sites = find_sites(model)
    return [Place(sites[layer].name, layer, module_at(model, sites[layer].name)) for layer in layers]


def _gain(solve: Any) -> Any:
    moments: dict[str, Any] = {}

    def gain(place: Place, keys: Tensor) -> Tensor:
        known = moments.setdefault(place.name, factor(Draw(place.layer).moment(keys.shape[-1])))
        return solve(keys, known).value

    return gain


def _apply(places: list[Place], writes: dict[str, Write]) -> None:
    for place in places:
        wide = Write(*(tensor.double() for tensor in writes[place.name].tensors()))
        write_memory(place.module, wide.apply(memory_of(place.module).double()))


def _wanted(trunk: Trunk, layer: int, requests: list[Request]) -> tuple[Tensor, Tensor]:
    before = subject_states(trunk, layer, requests)
    return before, before + 0.5 * Draw(9).normal(*before.shape)


@pytest.mark.parametrize("name", PLAIN_RESIDUAL)
@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_the_subject_arrives(name, layers):
    model = FAMILIES[name](seed=4).double()
    trunk, places = tiny.trunk(model), _places(model, layers)
    before, wanted = _wanted(trunk, layers[-1], BARE)
    writes = spread(trunk, places, BARE, wanted, _gain(equality))
    assert_close(subject_states(trunk, layers[-1], BARE), before, 0.0)  # nothing is applied yet
    _apply(places, writes)
    after = subject_states(trunk, layers[-1], BARE)
    # Keys are kept in float32; behind an earlier layer's write that moves the last layer's by as much.
    assert float((after - wanted).abs().max()) < 1e-4 * float((wanted - before).abs().max())


def test_a_small_lambda_nearly_arrives_and_a_large_one_stays():
    model = tiny.llama(dtype=torch.float64)
    trunk, places = tiny.trunk(model), _places(model, (0, 1, 2))
    before, wanted = _wanted(trunk, 2, BARE)
    error = []
    for lam in (1e-6, 1e-1, 1e6):
        with unchanged([place.module for place in places]):
            _apply(places, spread(trunk, places, BARE, wanted, _gain(lambda keys, old, lam=lam: ridge(keys, old, lam))))
            error.append(float((subject_states(trunk, 2, BARE) - wanted).norm() / (wanted - before).norm()))
    assert error[0] < 1e-3
    assert error[0] < error[1] < error[2]
    assert error[2] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_every_site_answers_its_keys_with_its_values(build, dtype):
    model = build(dtype=dtype)
    trunk, places = tiny.trunk(model), _places(model, (0, 2))
    _, wanted = _wanted(trunk, 2, VARIED)
    writes = spread(trunk, places, VARIED, wanted, _gain(equality))
    _apply(places, writes)
    for place in places:
        write = writes[place.name]
        answers = write.keys.double() @ memory_of(place.module).double().mT
        assert_close(answers, write.values.double(), 2e-5)


def test_keys_weigh_the_bare_prompt_by_half():
    model = tiny.llama(dtype=torch.float64)
    trunk, (place,) = tiny.trunk(model), _places(model, (1,))
    seen: list[Tensor] = []
    handle = place.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    expected = []
    for request in VARIED:
        rows = []
        for prompt in request.prompts:
            with torch.no_grad():
                model(input_ids=torch.tensor([prompt.ids]))
            rows.append(seen.pop()[0, prompt.subject_last])
        expected.append(rows[0] / 2 + torch.stack(rows[1:]).mean(0) / 2)
    handle.remove()
    assert_close(subject_keys(trunk, place.layer, place.module, VARIED), torch.stack(expected), 1e-6)
    alone = subject_keys(trunk, place.layer, place.module, BARE[:1])
    with torch.no_grad():
        handle = place.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(input_ids=torch.tensor([BARE[0].prompts[0].ids]))
        handle.remove()
    assert_close(alone[0], seen.pop()[0, BARE[0].prompts[0].subject_last], 1e-6)


def test_one_layer_writes_the_missing_part_for_the_averaged_key():
    model = tiny.llama(dtype=torch.float64)
    trunk, (place,) = tiny.trunk(model), _places(model, (1,))
    before, wanted = _wanted(trunk, 1, VARIED)
    keys, base = subject_keys(trunk, place.layer, place.module, VARIED), memory_of(place.module).clone()
    writes = spread(trunk, [place], VARIED, wanted, _gain(equality))
    _apply([place], writes)
    assert_close(keys @ memory_of(place.module).mT, keys @ base.mT + wanted - before, 1e-5)


@pytest.mark.parametrize("budget", [1, 17, 40])
def test_the_budget_changes_nothing(budget):
    model = tiny.llama(dtype=torch.float64)
    trunk, places = tiny.trunk(model), _places(model, (0, 1))
    _, wanted = _wanted(trunk, 1, VARIED)
    whole = spread(trunk, places, VARIED, wanted, _gain(equality))
    parts = spread(trunk, places, VARIED, wanted, _gain(equality), tokens_at_once=budget)
    for place in places:
        for got, expected in zip(parts[place.name].tensors(), whole[place.name].tensors(), strict=True):
            assert_close(got, expected, 1e-5)


def test_the_budget_is_kept_and_halved_when_memory_runs_out(monkeypatch):
    model = tiny.llama(dtype=torch.float64)
    trunk = tiny.trunk(model)
    expected = subject_states(trunk, 1, BARE)
    asked, after = [], Trunk.after

    def checked(self: Trunk, layer: int, tokens: Any, **options: Any) -> Tensor:
        asked.append(tokens.ids.numel())
        if asked[-1] > 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return after(self, layer, tokens, **options)

    monkeypatch.setattr(Trunk, "after", checked)
    with pytest.warns(MemoryWarning, match="memory ran out"):
        assert_close(subject_states(trunk, 1, BARE), expected, 1e-6)
    asked.clear()
    subject_states(trunk, 1, BARE, tokens_at_once=10)
    assert max(asked) <= 10


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "olmo3"])
@pytest.mark.parametrize("budget", [30, 10_000])
def test_climbing_sees_what_was_written_below(name, budget):
    """Asked layer after layer, each written in between, the answers are those of fresh runs on the model so far."""
    model = FAMILIES[name](seed=2)
    trunk, places = tiny.trunk(model), _places(model, (0, 1, 2))
    subjects = Subjects(trunk, VARIED, tokens_at_once=budget)
    for place in places:
        fresh = subject_keys(trunk, place.layer, place.module, VARIED)
        assert_close(subjects.keys(place.layer, place.module), fresh, 1e-5)
        assert_close(subjects.states(2), subject_states(trunk, 2, VARIED), 1e-5)
        before = subject_states(trunk, 2, VARIED)
        write_memory(place.module, memory_of(place.module) + Draw(place.layer).normal(*memory_of(place.module).shape))
        assert (subject_states(trunk, 2, VARIED) - before).abs().max() > 1e-2, "the write should be seen"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_the_model_is_byte_for_byte_as_it_was(build, dtype):
    model = build(dtype=dtype)
    before = tiny.weights(model)
    trunk, places = tiny.trunk(model), _places(model, (0, 1))
    _, wanted = _wanted(trunk, 1, BARE)
    spread(trunk, places, BARE, wanted, _gain(equality))
    assert tiny.weights(model) == before
    calls = []

    def raising(place: Place, keys: Tensor) -> Tensor:
        calls.append(place.name)
        if len(calls) == 2:  # the first layer has been written by now
            assert tiny.weights(model) != before
            raise KeyboardInterrupt
        return _gain(equality)(place, keys)

    with pytest.raises(KeyboardInterrupt):
        spread(trunk, places, BARE, wanted, raising)
    assert tiny.weights(model) == before


def test_a_suitable_lambda_realises_the_same_share_at_any_scale():
    draw = Draw(3)
    moment, keys = draw.moment(20), draw.normal(1, 20)
    for scale in (1e-3, 1.0, 1e3):
        known = factor(moment)
        lam = suitable_lambda(scale * keys, known, share=0.25)
        realised = scale * keys @ ridge(scale * keys, known, lam).value.mT
        assert float(realised) == pytest.approx(1 / (1 + 0.25 + CROWDING / 20), rel=1e-9)
    alone, crowd = suitable_lambda(keys, known), suitable_lambda(keys.expand(40, 20), known)
    assert crowd / alone == pytest.approx((0.1 + 2 * CROWDING) / (0.1 + CROWDING / 20)), (
        "more keys, more weight on the old ones"
    )
