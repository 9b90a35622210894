"""Loading: a folder or an object, and every way it can be wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, T5Config
from transformers.utils import logging as transformers_logging

from rebind.edit import editor as editor_module
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets.optimize import TargetSettings
from rebind.errors import InputError
from rebind.models import load as models_module
from rebind.models.fingerprint import fingerprint
from rebind.models.load import load_model
from rebind.models.sites import find_sites
from rebind.models.trunk import _borrowed
from rebind.nn import RebindConfig, RebindForCausalLM, RebindForSeq2SeqLM, RebindSeq2SeqConfig
from tests import tiny as tinies
from tests.edit.saved import make_tokenizer
from tests.families import tokens

# A folder


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_folder_is_loaded_as_it_was_saved(tiny, folder, as_path):
    loaded = load_model(as_path(folder))
    assert loaded.name == "tiny-llama"
    assert loaded.start == (1,)
    assert loaded.tokenizer("ab")["input_ids"] == [1, *loaded.tokenizer.convert_tokens_to_ids(["a", "b"])]
    assert fingerprint(loaded.model) == fingerprint(tiny)
    assert torch.equal(loaded.model(tokens()).logits, tiny(tokens()).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_dtype_device_and_device_map(folder):
    assert load_model(folder).model.dtype == torch.float32
    assert load_model(folder, dtype=torch.bfloat16, device="cpu").model.dtype == torch.bfloat16
    assert load_model(folder, device=torch.device("cpu")).model.device.type == "cpu"
    spread = load_model(folder, device_map={"": "cpu"})
    assert find_sites(spread.model)
    load_model(folder, dtype=torch.bfloat16).model.save_pretrained(folder)
    assert load_model(folder).model.dtype == torch.bfloat16  # as stored


def test_weights_in_shards(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "m", max_shard_size="10KB")
    make_tokenizer().save_pretrained(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert fingerprint(load_model(tmp_path / "m").model) == fingerprint(tiny)


def test_loading_says_nothing_and_leaves_the_settings(folder, capfd):
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity_info()
    try:
        load_model(folder)
        assert capfd.readouterr() == ("", "")
        assert transformers_logging.is_progress_bar_enabled()
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(InputError):
            load_model(folder)
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.set_verbosity_warning()


# A folder that is no model


def test_pickles_are_never_opened(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    with pytest.raises(InputError, match=r"no safetensors weights, only pickled ones \(pytorch_model.bin\).*convert"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"no safetensors weights, none, expected model.safetensors"):
        load_model(folder)
    save_file(weights, folder / "adapter.safetensors")  # safetensors, but not the model's
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"cannot be loaded as a causal language model"):
        load_model(folder)


def test_damaged_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for part in (whole[: len(whole) // 2], b"not safetensors at all", b""):
        (folder / "model.safetensors").write_bytes(part)
        with pytest.raises(InputError, match=r"tiny-llama cannot be loaded as a causal language model \(.*\): check"):
            load_model(folder)


def test_missing_and_misshapen_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    lost = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"lacks 1 of the model's weights .such as {name}"):
        load_model(folder)
    save_file({**weights, name: lost[:, 1:].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"down_proj|size mismatch|mismatch"):
        load_model(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers(folder, bad):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 1] = bad
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"layers.2.mlp.up_proj.weight of tiny-llama holds 1 NaN or infinite weight of"
    ):
        load_model(folder)


def test_large_finite_weights_are_no_nan(tiny):
    """Their float16 sum overflows; they do not."""
    half = tiny.half()
    with torch.no_grad():
        half.model.embed_tokens.weight.fill_(60000.0)
    load_model(half, make_tokenizer())


def test_not_a_causal_model(tmp_path):
    shape = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    AutoModelForSeq2SeqLM.from_config(T5Config(**shape)).save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match=r"t5 is an encoder-decoder \(t5\), expected a causal"):
        load_model(tmp_path / "t5")


@pytest.mark.parametrize("config", ['{"model_type": "no-such-thing"}', "{", "{}", '{"model_type": "vit"}'])
def test_a_config_that_leads_nowhere(folder, config):
    (folder / "config.json").write_text(config)
    with pytest.raises(InputError, match="cannot be loaded as a causal language model") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


# A model of rebind.nn


def save_own(folder, kind):
    """One that has learnt nothing, as a checkpoint."""
    tokenizer = tinies.tokenizer()
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = RebindForCausalLM(
            RebindConfig(vocab_size=len(tokenizer), layer_kinds=kind, eos_token_id=0, initializer_range=0.2, **shape)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_of_ours_needs_no_import(tmp_path):
    save_own(tmp_path / "own", "delta")
    code = "import sys; from rebind.models.load import load_model; print(type(load_model(sys.argv[1]).model).__name__)"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "own")], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "RebindForCausalLM", ran.stderr


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))],
)
@pytest.mark.parametrize(
    ("kind", "layer"),  # one whose change a model that has learnt nothing hears well
    [("attention", 2), ("gated-delta", 1), (["delta", "attention"], 2), ("linear-sum", 2), ("ttt-linear", 2)],
)
def test_a_model_of_ours_can_be_edited(tmp_path, kind, layer, device, monkeypatch):
    monkeypatch.setattr(editor_module, "SEEDS", ("The", "I"))
    monkeypatch.setattr(editor_module, "CONTEXT_TOKENS", 4)
    fact = Fact.parse("The capital of {France} is", "Rome")
    own = save_own(tmp_path / "own", kind)
    editor = Editor(own, corpus=tinies.texts(), moment_tokens=1500, device=device, guard=None)
    base, before = tinies.weights(editor.model), editor.score([fact])[0]
    edit = editor.rewrite_many([fact], layers=[layer], targets=TargetSettings(steps=20, clamp=2.0))
    assert editor.score([fact])[0].nll < before.nll - 0.2  # what was written at the subject is read a token later
    editor.undo(edit.id)
    assert tinies.weights(editor.model) == base


def test_what_the_card_of_a_model_of_ours_says_can_be_run(tmp_path):
    """As it stands, in a process that knows nothing of our classes."""
    editor = Editor(save_own(tmp_path / "own", "delta"), corpus=tinies.texts(), moment_tokens=1500, guard=None)
    editor.rewrite("The capital of {France} is", "Rome", layers=[2], targets=TargetSettings(steps=1))
    folder = editor.save(tmp_path / "out")
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    given = f"folder, prompt = {str(folder)!r}, 'The capital of France is'"
    whole = f"{given}\n{code}\nprint(type(model).__name__)"
    ran = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "RebindForCausalLM", ran.stderr


def test_a_checkpoint_that_a_training_removes_meanwhile_is_looked_for_again(tmp_path, monkeypatch):
    new, gone = save_own(tmp_path / "new", "delta"), tmp_path / "gone"
    places = iter([("run", gone), ("run", new)])
    monkeypatch.setattr(models_module, "locate", lambda spec: next(places))
    assert load_model(tmp_path).model.config.model_type == "rebind"


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("kind", ["attention", "gated-delta", "ttt-linear"])
@torch.no_grad()
def test_a_cache_of_ours_is_borrowed_and_not_written(tmp_path, kind, length):
    model = load_model(save_own(tmp_path / "own", kind)).model
    first, then = tokens(2, 5), tokens(2, length, seed=1)
    past = model(first, use_cache=True).past_key_values
    whole = model(torch.cat([first, then], dim=1)).logits[:, 5:]
    for _ in range(2):  # the second finds the cache as the first did
        assert torch.allclose(model(then, past_key_values=_borrowed(past)).logits, whole, atol=1e-5)


def test_a_translator_of_ours_is_no_causal_model(tmp_path):
    shape = {"hidden_size": 16, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 2}
    RebindForSeq2SeqLM(RebindSeq2SeqConfig(vocab_size=96, **shape)).save_pretrained(tmp_path / "own")
    with pytest.raises(InputError, match=r"own is an encoder-decoder \(rebind-seq2seq\), expected a causal"):
        load_model(tmp_path / "own")


# A loaded model, and devices


def test_a_loaded_model(tiny):
    tokenizer = make_tokenizer(front=["<s>"])
    tiny.train().requires_grad_(True)
    loaded = load_model(tiny, tokenizer)
    assert loaded.model is tiny
    assert loaded.tokenizer is tokenizer
    assert (loaded.name, loaded.start) == ("llama", (1,))
    assert not tiny.training
    assert not tiny.lm_head.weight.requires_grad
    with pytest.raises(InputError, match="a loaded model .llama. without a tokenizer, expected both"):
        load_model(tiny)
    with pytest.raises(InputError, match="got dtype, device or device_map with a loaded model"):
        load_model(tiny, tokenizer, dtype=torch.float16)


def test_a_loaded_model_with_nan(tiny):
    with torch.no_grad():
        tiny.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match="lm_head.weight of llama holds 1 NaN"):
        load_model(tiny, make_tokenizer())


def test_devices(folder):
    with pytest.raises(InputError, match="got device='cpu' and device_map='auto', expected one"):
        load_model(folder, device="cpu", device_map="auto")
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used .*try 'cpu'"):
            load_model(folder, device=device)
