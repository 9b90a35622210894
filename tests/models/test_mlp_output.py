"""The output map, in every family: a write changes the residual stream as wanted, as far as that is possible."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebind.errors import NumericalWarning
from rebind.memory import Write
from rebind.memory.closed_form import equality
from rebind.models.mlp_output import GateMap, Norm, NormMap, ScaleMap, output_map
from rebind.models.sites import find_sites, memory_of, module_at, write_memory
from rebind.models.tokens import Tokens
from tests import tiny
from tests.families import FAMILIES, VOCAB
from tests.support import Draw, assert_close

NORMED = ["gemma2", "gemma3", "olmo2", "olmo3", "glm4", "exaone4", "opt-post-norm"]
SCALED = {"granite": 0.22}


def random_row(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB - 6, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


ROWS = [random_row(0, 4), random_row(1, 9), random_row(2, 5)]  # up to the last token of a subject
TOKENS = Tokens.left_padded(ROWS, torch.device("cpu"))


class Setup:
    """A model of a family in float64, with one site."""

    def __init__(self, name: str, layer: int = 1) -> None:
        self.model: Any = FAMILIES[name](seed=4).double()
        self.trunk, self.layer = tiny.trunk(self.model), layer
        self.site = find_sites(self.model)[layer]
        self.module = module_at(self.model, self.site.name)
        self.map = output_map(self.trunk, layer, self.module)

    def states(self) -> Tensor:
        return self.trunk.after(self.layer, TOKENS)[:, -1]

    def read(self, module: nn.Module) -> Tensor:
        return self.trunk.inputs([module], TOKENS)[0][:, -1]

    def with_write(self, change: Tensor) -> Tensor:
        """Return the states with a change written into the projection, exactly at the keys of the subjects."""
        memory, keys = memory_of(self.module).clone(), self.read(self.module)
        gain = equality(keys, Draw(1).moment(memory.shape[-1])).value
        write_memory(self.module, Write(keys, keys @ memory.mT + change, gain).apply(memory))
        try:
            return self.states()
        finally:
            write_memory(self.module, memory)

    def with_output(self, change: Tensor) -> Tensor:
        """Return the states with a change added to the output of the projection at the subjects, by a hook."""

        def add(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            rows = out.clone().reshape(*TOKENS.ids.shape, -1)
            rows[:, -1] += change
            return rows.reshape(out.shape)

        with self.module.register_forward_hook(add):
            return self.states()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_output_map_is_found(name, dtype):
    model = FAMILIES[name]().to(dtype)
    trunk = tiny.trunk(model)
    for site in find_sites(model):
        added = output_map(trunk, site.layer, module_at(model, site.name))
        if name in NORMED:
            assert isinstance(added, NormMap)
            assert added.norm.centered == (name == "opt-post-norm")
            assert added.scale == 1.0
        else:
            assert isinstance(added, ScaleMap)
            scale = SCALED.get(name, 1.0)
            assert added.scale == (1.0 if scale == 1.0 else pytest.approx(scale, rel=4 * torch.finfo(dtype).eps))
            missing = Draw(2).normal(len(ROWS), 32)
            change = added.change(missing, lambda module: pytest.fail("no inputs are needed"))
            assert (change is missing) == (scale == 1.0), "the same bytes as without the map"


@pytest.mark.parametrize(("name", "kind"), [("llama", ScaleMap), ("gemma2", NormMap), ("granite", ScaleMap)])
def test_a_few_huge_entries_hide_nothing(name, kind):
    """As in many real models; the rounding errors of bfloat16 in them are larger than everything else."""
    model = FAMILIES[name]().to(torch.bfloat16)
    model.get_input_embeddings().weight[:, 3] += 3000.0
    (site, *_) = find_sites(model)
    added = output_map(tiny.trunk(model), 0, module_at(model, site.name))
    assert isinstance(added, kind)
    assert added.scale == pytest.approx(SCALED.get(name, 1.0), rel=0.02)


@pytest.mark.parametrize("name", [*SCALED, *NORMED])
def test_a_change_within_reach_is_reached(name):
    """The target is what some other output of the same length gives."""
    setup = Setup(name)
    before = setup.states()
    if isinstance(setup.map, NormMap):
        x = setup.read(setup.map.norm.module)
        middle = x.mean(-1, keepdim=True) if setup.map.norm.centered else 0.0
        other = x - middle + 2 * Draw(3).normal(*x.shape)
        other = other - (other.mean(-1, keepdim=True) if setup.map.norm.centered else 0.0)
        other = middle + other * ((x - middle).norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True))
        target = setup.with_output(other - x)
    else:
        target = before + Draw(3).normal(*before.shape)
    change = setup.map.change(target - before, setup.read)
    assert_close(setup.with_output(change), target, 1e-4)  # some norms compute in float32 whatever the dtype
    got = setup.with_write(change)
    assert float((got - target).abs().max()) < 1e-4 * float((target - before).abs().max())
    plain = setup.with_output(target - before)
    assert float((plain - target).abs().max()) > 0.1 * float((target - before).abs().max()), "the test can fail"


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("size", [0.05, 0.5])
def test_the_nearest_is_reached_of_a_change_out_of_reach(name, size):
    """No small step from it along the sphere comes nearer."""
    setup = Setup(name)
    before = setup.states()
    missing = size * Draw(5).normal(*before.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        change = setup.map.change(missing, setup.read)
    wanted = before + missing
    error = (setup.with_output(change) - wanted).norm(dim=-1)
    assert (error < missing.norm(dim=-1)).all(), "nearer than doing nothing"
    x = setup.read(setup.map.norm.module)
    for seed in range(8):
        step = Draw(seed).normal(*x.shape)
        step = 0.03 * step * (x.norm(dim=-1) / step.norm(dim=-1)).unsqueeze(-1)
        nearby = setup.with_output(change + step)
        assert ((nearby - wanted).norm(dim=-1) > error * (1 - 1e-6)).all()


class SimpleNorm(nn.Module):
    """An RMSNorm without ε."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_small_gains_are_given_up_first():
    """Dividing by a gain near zero would spend all of the length on an entry that adds nothing."""
    draw = Draw(6)
    gain = draw.normal(16)
    gain[0] = 1e-6
    x, missing = draw.normal(4, 16), 0.2 * draw.normal(4, 16)
    norm = Norm(SimpleNorm(gain), gain, torch.zeros(16, dtype=gain.dtype), centered=False)
    wanted = norm(x) + missing
    after = norm.nearest(x, wanted)
    divided = wanted / gain
    divided = divided * (x.norm(dim=-1) / divided.norm(dim=-1)).unsqueeze(-1)
    assert ((norm(after) - wanted).norm(dim=-1) < 0.7 * missing.norm(dim=-1)).all()
    assert ((norm(divided) - wanted).norm(dim=-1) > missing.norm(dim=-1)).all()
    assert_close(after.norm(dim=-1), x.norm(dim=-1), 1e-9)


def test_a_change_out_of_reach_and_an_unknown_map_warn():
    setup = Setup("gemma2")
    with pytest.warns(NumericalWarning, match="within reach"):
        setup.map.change(100.0 * Draw(7).normal(len(ROWS), 32), setup.read)
    model = tiny.llama(dtype=torch.float64)
    trunk = tiny.trunk(model)
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out.tanh())
    with pytest.warns(NumericalWarning, match="neither a scale nor a norm"):
        assert isinstance(output_map(trunk, 1, model.model.layers[1].mlp.down_proj), GateMap)
