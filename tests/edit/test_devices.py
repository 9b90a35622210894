"""Models that accelerate has spread over devices, or offloaded, are edited like any other.

On a machine with one device all pieces are on it, but each of them still runs behind accelerate's hooks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from rebind.edit.dense import attach
from rebind.models.sites import memory_of, module_at
from rebind.models.weights.placement import bring_back, move_constant, waiting_constants
from tests import tiny
from tests.edit.editors import FACTS, open_editor, rewrite

PIECES = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(tiny.LAYERS)), "model.norm", "model.rotary_emb")


def dispatch(model: Any, **devices: str) -> Any:
    """Put each piece on its device, by default the CPU, all of them behind hooks."""
    places = dict.fromkeys((*PIECES, "lm_head"), "cpu")
    places |= {name.replace("__", "."): device for name, device in devices.items()}
    return dispatch_model(model, places, main_device="cpu", force_hooks=True)


@pytest.mark.parametrize("method", ["memit", "rome", "alphaedit"])
def test_a_dispatched_model_gets_the_same_edit(method):
    whole, dispatched = open_editor(), open_editor(dispatch(tiny.llama()))
    assert hasattr(dispatched.model.model.layers[1].mlp.down_proj, "_hf_hook"), "the hooks are there"
    base = tiny.weights(dispatched.model)
    rewrite(whole, FACTS[0], method=method)
    edit = rewrite(dispatched, FACTS[0], method=method)
    assert tiny.weights(dispatched.model) == tiny.weights(whole.model) != base
    assert dispatched.drift() == whole.drift()
    assert dispatched.say(FACTS[0].text, tokens=4) == whole.say(FACTS[0].text, tokens=4)
    with dispatched.base_model():
        assert tiny.weights(dispatched.model) == base
    dispatched.undo(edit.id)
    assert tiny.weights(dispatched.model) == base
    assert hasattr(dispatched.model.model.layers[1].mlp.down_proj, "_hf_hook"), "and still are"


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a second device")
def test_a_model_on_two_devices_is_edited():
    model = dispatch(tiny.llama(), **{f"model__layers__{i}": "cuda" for i in (1, 2, 3)})
    editor = open_editor(model)
    edit = rewrite(editor, FACTS[0])
    site = edit.sites[-1]
    assert not torch.equal(model.get_submodule(site).weight.cpu(), tiny.llama().get_submodule(site).weight)
    editor.undo(edit.id)
    for path, weights in tiny.llama().named_parameters():
        assert torch.equal(model.get_parameter(path).cpu(), weights), path


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_an_offloaded_model_is_streamed_but_for_its_edited_layers(offload, build, tmp_path):
    whole, model = open_editor(build()), build()
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    editor = open_editor(model)
    assert editor.fingerprint == whole.fingerprint
    expected, edit = rewrite(whole, FACTS[0]), rewrite(editor, FACTS[0])
    names = [name for name, weight in model.named_parameters() if not weight.is_meta]
    assert {name.rpartition(".")[0] for name in names} == set(edit.sites), "all others are still offloaded"
    for site in edit.sites:
        assert torch.equal(memory_of(module_at(model, site)), memory_of(module_at(whole.model, site)))
    assert editor.say(FACTS[0].text, tokens=4) == whole.say(FACTS[0].text, tokens=4)
    assert expected.sites == edit.sites
    editor.undo(edit.id)
    assert all(torch.equal(memory_of(module_at(model, site)), whole.weights.base[site]) for site in edit.sites)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
def test_an_offloaded_model_reads_a_dense_memory_and_stays_offloaded(build, tmp_path):
    whole, model = open_editor(build()), build()
    cpu_offload(model, execution_device=torch.device("cpu"))
    editor = open_editor(model)
    plain = editor.score(FACTS)
    for one in (whole, editor):
        rewrite(one, *FACTS, method="dense")
    assert all(weight.is_meta for weight in model.parameters())
    assert editor.score(FACTS) == whole.score(FACTS) != plain
    editor.save_memory(tmp_path / "memory")
    editor.undo("e0001")
    assert editor.score(FACTS) == plain
    with attach(model, tmp_path / "memory"):
        assert editor.score(FACTS) == whole.score(FACTS)


def test_constants_of_a_backward_pass_can_wait_elsewhere():
    weight = torch.randn(600, 600)
    x = torch.randn(3, 600, requires_grad=True)
    plain = torch.autograd.grad((x @ weight).square().sum(), x)[0]
    moved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: moved.append(move_constant(t)) or moved[-1], bring_back):
        loss = (x @ weight).square().sum()
    assert [type(one) for one in moved].count(tuple) == 1, "the weight, and not the activations"
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
    assert isinstance(waiting_constants(tiny.llama(), torch.device("cuda")), nullcontext), "nothing is offloaded"
