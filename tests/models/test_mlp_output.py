"""What the residual stream gets of a write, in every family: all that was asked, as far as it can be had."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebind.edit.solve.layer_writes import Place, spread, unchanged
from rebind.edit.solve.subject_keys import subject_keys, subject_states
from rebind.edit.targets.optimize import Prompt, Request
from rebind.errors import NumericalWarning
from rebind.memory import Write
from rebind.memory.closed_form import equality
from rebind.models.mlp_output import Norm, Normalised, Summed, how_added
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from tests import tiny
from tests.families import FAMILIES, VOCAB
from tests.support import Draw, assert_close

NORMED = [
    name for name in ("gemma2", "gemma3", "olmo2", "olmo3", "glm4", "exaone4", "opt-post-norm") if name in FAMILIES
]
SCALED = {"granite": 0.22}
PLAIN = [name for name in FAMILIES if name not in NORMED and name not in SCALED]


def _request(seed: int, length: int, at: int) -> Request:
    ids = torch.randint(3, VOCAB - 6, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request((Prompt(tuple(ids), at),), (5,))


BARE = [_request(0, 6, 3), _request(1, 9, 8), _request(2, 8, 4)]


class Asked:
    """A family's model in float64, and the place in it that is written."""

    def __init__(self, name: str, layer: int = 1) -> None:
        self.model: Any = FAMILIES[name](seed=4).double()
        self.trunk, self.layer = tiny.trunk(self.model), layer
        site = find_sites(self.model)[layer]
        self.place = Place(site.name, layer, module_at(self.model, site.name))
        self.added = how_added(self.trunk, layer, self.place.module)

    def states(self) -> Tensor:
        return subject_states(self.trunk, self.layer, BARE)

    def read(self, module: nn.Module) -> Tensor:
        return subject_keys(self.trunk, self.layer, module, BARE)

    def spread(self, wanted: Tensor) -> Tensor:
        """The states after `spread` has written what should make them `wanted`, exactly at its keys."""
        moment = Draw(1).moment(memory_of(self.place.module).shape[-1])
        gain = lambda place, keys: equality(keys, moment).value
        written = spread(self.trunk, [self.place], BARE, wanted, gain)[self.place.name]
        with unchanged([self.place.module]):
            wide = Write(*(tensor.double() for tensor in written.tensors()))
            write_memory(self.place.module, wide.apply(memory_of(self.place.module)))
            return self.states()

    def with_output(self, change: Tensor) -> Tensor:
        """The states with something added to the projection's output at the subjects, by a hook: no algebra of ours."""
        rows = []
        for index, request in enumerate(BARE):
            ids, at = request.prompts[0].ids, request.prompts[0].subject_last
            seen: list[Tensor] = []

            def add(_: nn.Module, __: Any, out: Tensor, at: int = at, index: int = index) -> Tensor:
                flat = out.clone().reshape(-1, out.shape[-1])
                flat[at] += change[index]
                return flat.reshape(out.shape)

            hooks = [
                self.place.module.register_forward_hook(add),
                self.trunk.blocks[self.layer].register_forward_hook(
                    lambda _, __, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
                ),
            ]
            with torch.no_grad():
                self.model(input_ids=torch.tensor([ids]))
            for hook in hooks:
                hook.remove()
            rows.append(seen[0][0, at])
        return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_what_a_block_does_with_its_output_is_found(name, dtype):
    model = FAMILIES[name]().to(dtype)
    trunk = tiny.trunk(model)
    for site in find_sites(model):
        added = how_added(trunk, site.layer, module_at(model, site.name))
        if name in NORMED:
            assert isinstance(added, Normalised)
            assert added.behind == added.norm.centred == (name == "opt-post-norm")
            assert added.scale == 1.0
        else:
            assert isinstance(added, Summed)
            scale = SCALED.get(name, 1.0)
            assert added.scale == (1.0 if scale == 1.0 else pytest.approx(scale, rel=4 * torch.finfo(dtype).eps))


@pytest.mark.parametrize(("name", "kind"), [("llama", Summed), ("gemma2", Normalised), ("granite", Summed)])
def test_a_few_huge_entries_hide_nothing(name, kind):
    """As in many real models; bf16 rounds them by more than all the rest is."""
    model = FAMILIES[name]().to(torch.bfloat16)
    model.get_input_embeddings().weight[:, 3] += 3000.0
    (site, *_) = find_sites(model)
    added = how_added(tiny.trunk(model), 0, module_at(model, site.name))
    assert isinstance(added, kind)
    assert added.scale == pytest.approx(SCALED.get(name, 1.0), rel=0.02)


@pytest.mark.parametrize("name", PLAIN)
def test_where_nothing_is_done_the_change_is_what_is_missing(name):
    asked, missing = Asked(name), Draw(2).normal(len(BARE), 32)
    unread = lambda module: pytest.fail("nothing needs to be read")
    assert asked.added.change(missing, unread) is missing, "so results are the same bytes as without this file"


@pytest.mark.parametrize("name", [*SCALED, *NORMED])
def test_all_of_a_change_within_reach_is_had(name):
    """What some other output of the same length would have given."""
    asked = Asked(name)
    before, target = asked.states(), None
    if isinstance(asked.added, Normalised):
        x = asked.read(asked.added.norm.module)
        middle = x.mean(-1, keepdim=True) if asked.added.norm.centred else 0.0
        other = x - middle + 2 * Draw(3).normal(*x.shape)
        other = other - (other.mean(-1, keepdim=True) if asked.added.norm.centred else 0.0)
        other = middle + other * ((x - middle).norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True))
        target = asked.with_output(other - x)
    else:
        target = before + Draw(3).normal(*before.shape)
    change = asked.added.change(target - before, asked.read)
    assert_close(asked.with_output(change), target, 1e-4)  # some norms answer in float32 whatever the dtype
    got = asked.spread(target)
    assert float((got - target).abs().max()) < 1e-4 * float((target - before).abs().max())
    plain = asked.with_output(target - before)
    assert float((plain - target).abs().max()) > 0.1 * float((target - before).abs().max()), "the test can fail"


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("size", [0.05, 0.5])
def test_of_a_change_out_of_reach_the_nearest_is_had(name, size):
    """No small step from it, along the sphere, comes nearer."""
    asked = Asked(name)
    before = asked.states()
    missing = size * Draw(5).normal(*before.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        change = asked.added.change(missing, asked.read)
    wanted = before + missing
    error = (asked.with_output(change) - wanted).norm(dim=-1)
    assert (error < missing.norm(dim=-1)).all(), "nearer than doing nothing"
    x = asked.read(asked.added.norm.module)
    for seed in range(8):
        step = Draw(seed).normal(*x.shape)
        step = 0.03 * step * (x.norm(dim=-1) / step.norm(dim=-1)).unsqueeze(-1)
        nearby = asked.with_output(change + step)
        assert ((nearby - wanted).norm(dim=-1) > error * (1 - 1e-6)).all()


class Scaled(nn.Module):
    """A norm whose weight is what it multiplies by."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_small_gains_are_given_up_first():
    """Dividing by a gain near zero would spend all of the length on an entry that answers nothing."""
    draw = Draw(6)
    gain = draw.normal(16)
    gain[0] = 1e-6
    x, missing = draw.normal(4, 16), 0.2 * draw.normal(4, 16)
    norm = Norm(Scaled(gain), gain, torch.zeros(16, dtype=gain.dtype), centred=False)
    wanted = norm(x) + missing
    after = norm.nearest(x, wanted)
    divided = wanted / gain
    divided = divided * (x.norm(dim=-1) / divided.norm(dim=-1)).unsqueeze(-1)
    assert ((norm(after) - wanted).norm(dim=-1) < 0.7 * missing.norm(dim=-1)).all()
    assert ((norm(divided) - wanted).norm(dim=-1) > missing.norm(dim=-1)).all()
    assert_close(after.norm(dim=-1), x.norm(dim=-1), 1e-9)


def test_what_is_out_of_reach_is_said():
    asked = Asked("gemma2")
    missing = 100.0 * Draw(7).normal(len(BARE), 32)
    with pytest.warns(NumericalWarning, match="of the change wanted at this layer is within reach"):
        asked.added.change(missing, asked.read)


def test_a_block_that_is_not_understood_is_said():
    model = tiny.llama(dtype=torch.float64)
    trunk = tiny.trunk(model)
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out.tanh())
    with pytest.warns(NumericalWarning, match="LlamaDecoderLayer 1 does something to its MLP's output"):
        assert how_added(trunk, 1, model.model.layers[1].mlp.down_proj).scale == 1.0
