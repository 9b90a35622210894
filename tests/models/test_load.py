"""Loading a folder or an object, and every way in which it can be wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.load import load_pretrained
from rebind.models.weights.fingerprint import fingerprint
from tests.families import tokens
from tests.support import raises
from tests.tiny import letter_tokenizer

load = LanguageModel.load


def refused(code, *arguments, **options):
    with raises(InputError, code) as caught:
        load_pretrained(*arguments, **options)
    assert "\n" not in str(caught.value)
    return caught.value


# A folder


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_folder_is_loaded_as_it_was_saved(tiny, folder, as_path):
    loaded = load(as_path(folder))
    assert (loaded.name, loaded.start, loaded.base_name) == ("tiny-llama", (1,), str(folder))
    assert (loaded.dtype, loaded.device.type, loaded.context_length) == (torch.float32, "cpu", 64)
    assert loaded.tokenizer("ab")["input_ids"] == [1, *loaded.tokenizer.convert_tokens_to_ids(["a", "b"])]
    assert loaded.fingerprint == fingerprint(tiny)
    assert torch.equal(loaded.model(tokens()).logits, tiny(tokens()).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_dtype_device_and_device_map(folder):
    assert load(folder, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    assert load(folder, device=torch.device("cpu")).device.type == "cpu"
    assert load(folder, device_map={"": "cpu"}).sites
    load(folder, dtype=torch.bfloat16).model.save_pretrained(folder)
    assert load(folder).dtype == torch.bfloat16  # as stored
    refused("device_and_device_map", folder, device="cpu", device_map="auto")
    for device in ("cuda:99", "nonsense"):
        refused("device_unavailable", folder, device=device)


def test_loading_is_quiet_and_leaves_the_settings(folder, capfd):
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity_info()
    try:
        load(folder)
        assert capfd.readouterr() == ("", "")
        (folder / "model.safetensors").write_bytes(b"")
        refused("unreadable_model", folder)
        assert transformers_logging.is_progress_bar_enabled()
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
    finally:
        transformers_logging.set_verbosity_warning()


# A folder that is not a model


def test_pickles_are_never_opened(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    refused("no_safetensors", folder)
    save_file(weights, folder / "adapter.safetensors")  # safetensors, but not of the model
    refused("unreadable_model", folder)


def test_damaged_missing_and_misshapen_weights_are_not_made_up(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused("unreadable_model", folder)
    (folder / "model.safetensors").write_bytes(whole)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    lost = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert name in refused("missing_weights", folder).problem
    save_file({**weights, name: lost[:, 1:].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    refused("unreadable_model", folder)


def test_weights_must_be_finite_and_may_be_large(tiny):
    half = tiny.half()
    half.model.embed_tokens.weight.data.fill_(60000.0)  # the sum overflows, they do not
    load(half, letter_tokenizer())
    for bad in (float("nan"), -float("inf")):
        tiny.model.layers[2].mlp.up_proj.weight.data[3, 1] = bad
        assert "layers.2.mlp.up_proj.weight" in refused("weights_not_finite", tiny, letter_tokenizer()).problem


@pytest.mark.parametrize("config", ['{"model_type": "no-such-thing"}', "{", "{}", '{"model_type": "vit"}'])
def test_a_config_that_cannot_be_used(folder, config):
    (folder / "config.json").write_text(config)
    refused("unreadable_model", folder)


# A loaded model


def test_a_loaded_model(tiny):
    tokenizer = letter_tokenizer(front=["<s>"])
    tiny.train().requires_grad_(True)
    loaded = load(tiny, tokenizer)
    assert loaded.model is tiny
    assert loaded.tokenizer is tokenizer
    assert (loaded.name, loaded.start) == ("llama", (1,))
    assert not tiny.training
    assert not tiny.lm_head.weight.requires_grad
    refused("no_tokenizer", tiny)
    refused("options_of_loaded_model", tiny, tokenizer, dtype=torch.float16)
    chatting = loaded.with_chat(True)
    assert (loaded.chat, chatting.chat) == (False, True)
    assert chatting.model is tiny


def test_a_model_with_an_adapter_around_it_is_refused(tiny):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(copy.deepcopy(tiny), peft.LoraConfig(target_modules=["q_proj"]))
    assert "merge_and_unload()" in refused("adapter", wrapped, letter_tokenizer()).advice
    refused("not_a_model", torch.nn.Linear(2, 2), letter_tokenizer())


# Folders that want more than to be loaded

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


def forge(folder, name, **fields):
    """Change fields of one of the JSON files in a folder."""
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_no_code_of_a_folder_is_run_or_offered_to_be(folder, monkeypatch):
    def answer(*_):
        raise AssertionError("nobody is asked")

    monkeypatch.setattr("builtins.input", answer)
    (folder / "modeling_own.py").write_text(CODE)
    auto = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    forge(folder, "config.json", model_type="own", auto_map=auto)
    assert "code" in refused("needs_code", folder).problem
    forge(folder, "config.json", model_type="llama")  # of which transformers has the code
    assert load(folder).name == "tiny-llama"
    forge(folder, "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["modeling_own.T", None]})
    refused("needs_code", folder)
    assert not list(folder.rglob("ran"))


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("size", [99_999_999_999, 10**30, -(10**12)])
def test_absurd_sizes_are_refused_before_a_model_is_built(folder, field, size):
    if field == "num_hidden_layers" and size < 0:
        pytest.skip("transformers builds no layers then, and misses none")
    forge(folder, "config.json", **{field: size})
    assert field in refused("implausible_config", folder).problem


def test_a_config_may_not_have_more_layers_than_there_are_tensors(folder):
    forge(folder, "config.json", num_hidden_layers=5_000)
    refused("implausible_config", folder)
    forge(folder, "config.json", num_hidden_layers=5)  # as many as that are built, and found to be missing
    refused("missing_weights", folder)
