"""Models that accelerate has spread over devices: edited like any other, or refused where weights are not at hand.

On a machine with one device the pieces all lie on it, but each still runs behind accelerate's hooks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from rebind.edit import editor as editor_module
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets.optimize import TargetSettings
from rebind.errors import InputError
from tests import tiny

FACT = Fact.parse("The capital of {France} is", "Rome")
QUICK = TargetSettings(steps=5, clamp=2.0)
PIECES = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(tiny.LAYERS)), "model.norm", "model.rotary_emb")


@pytest.fixture(autouse=True)
def two_contexts(monkeypatch):
    monkeypatch.setattr(editor_module, "SEEDS", ("The", "I"))
    monkeypatch.setattr(editor_module, "CONTEXT_TOKENS", 4)


def spread_out(model: Any, **places: str) -> Any:
    """Each piece where it is said to be, the others on the CPU; all of them behind hooks."""
    where = dict.fromkeys((*PIECES, "lm_head"), "cpu") | {name.replace("__", "."): at for name, at in places.items()}
    return dispatch_model(model, where, force_hooks=True)


def edit(model: Any, method: str) -> tuple[Editor, str]:
    editor = Editor(model, tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=1500, guard=None)
    return editor, editor.rewrite_many([FACT], method=method, targets=QUICK).id


@pytest.mark.parametrize("method", ["memit", "rome", "alphaedit"])
def test_a_spread_model_gets_the_same_edit(method):
    whole, spread = tiny.llama(), spread_out(tiny.llama())
    assert hasattr(spread.model.layers[1].mlp.down_proj, "_hf_hook"), "the hooks are there"
    base = tiny.weights(spread)
    one, _ = edit(whole, method)
    two, name = edit(spread, method)
    assert tiny.weights(spread) == tiny.weights(whole) != base
    assert two.drift() == one.drift()
    assert two.say(FACT.text, tokens=4) == one.say(FACT.text, tokens=4)
    with two.lifted():
        assert tiny.weights(spread) == base
    two.undo(name)
    assert tiny.weights(spread) == base
    assert hasattr(spread.model.layers[1].mlp.down_proj, "_hf_hook"), "and still are"


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a second device")
def test_a_model_on_two_devices_is_edited():
    model = spread_out(tiny.llama(), **{f"model__layers__{i}": "cuda" for i in (1, 2, 3)})
    editor, name = edit(model, "memit")
    site = editor.ledger.get(name).sites[-1]
    assert not torch.equal(model.get_submodule(site).weight.cpu(), tiny.llama().get_submodule(site).weight)
    editor.undo(name)
    for path, weights in tiny.llama().named_parameters():
        assert torch.equal(model.get_parameter(path).cpu(), weights), path


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_are_refused(offload, tmp_path):
    """They are not in the module: what is written there would be thrown away with the next forward pass."""
    model = tiny.llama()
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(InputError, match="offloaded .*expected weights in memory: load the model with a device_map"):
        Editor(model, tiny.tokenizer())
