"""transformers loads from a checkpoint exactly the model that was edited; folders are replaced or left as they are."""

from __future__ import annotations

import errno

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebind.edit.export.adapter import export_peft
from rebind.edit.export.checkpoint import choose_dtype, save_model
from rebind.errors import InputError, StorageError
from rebind.storage import cache_dir
from tests.edit.edited import KINDS, Case, contents, names_in
from tests.support import raises


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_comes_back_bit_for_bit(kind, dtype, tokenizer, tmp_path, capfd):
    case = Case(kind, dtype)
    assert save_model(case.model, tokenizer, tmp_path / "new" / "out", "# card") == (tmp_path / "new" / "out").resolve()
    assert names_in(tmp_path / "new") == ["out"]
    assert (tmp_path / "new" / "out" / "README.md").read_text() == "# card"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(names_in(tmp_path / "new" / "out"))
    assert capfd.readouterr().err == ""  # no progress bar
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out", dtype="auto")
    expected = case.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight.view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "out")("a").input_ids == tokenizer("a").input_ids


def test_a_checkpoint_in_another_dtype_leaves_the_model_as_it_is(tokenizer, tmp_path):
    case = Case("llama", tie_word_embeddings=True)
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in case.model.state_dict().items()}
    save_model(case.model, tokenizer, tmp_path / "out", "card", dtype=torch.bfloat16)
    for name, weight in case.model.state_dict().items():
        assert weight.data_ptr() == before[name][0]
        assert torch.equal(weight, before[name][1])
    assert case.model.config.dtype in (None, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(weight, before[name][1].bfloat16()) for name, weight in loaded.state_dict().items())
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 - tied weights are stored once


@pytest.mark.parametrize(
    ("held_in", "expected"),
    [
        ({torch.bfloat16, torch.float16}, torch.bfloat16),
        ({torch.float16}, torch.float16),
        (set(), torch.float32),
    ],
)
def test_a_model_from_a_gguf_file_is_saved_in_16_bits_that_say_the_facts(held_in, expected, llama):
    model = llama.model

    def count_said():
        return int(model.dtype == torch.float32 or model.dtype in held_in)

    assert choose_dtype(model, lambda: pytest.fail("asked in vain")) == torch.float32
    model.config._name_or_path = str(cache_dir() / "models" / "converted-0123")
    assert choose_dtype(model, count_said) == expected
    assert model.dtype == torch.float32
    model.to(torch.bfloat16)
    assert choose_dtype(model, lambda: pytest.fail("asked in vain")) == torch.bfloat16


def test_the_base_model_is_never_overwritten(llama, tokenizer, tmp_path):
    save_model(llama.build(), tokenizer, tmp_path / "base", "card")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with raises(InputError, "folder_of_base_model"):
        save_model(loaded, tokenizer, tmp_path / "x" / ".." / "base", "card", overwrite=True)
    save_model(loaded, tokenizer, tmp_path / "beside", "card")


def test_a_config_that_transformers_does_not_save(llama, tmp_path):
    llama.model.generation_config.temperature = -1.0
    llama.model.generation_config.do_sample = False
    with raises(InputError, "invalid_config"):
        save_model(llama.model, None, tmp_path / "out", "card")
    assert names_in(tmp_path) == []


# Folders


def test_only_an_earlier_export_of_the_same_kind_is_replaced(llama, tokenizer, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "config.json").write_text("years of work")
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="tiny")
    save_model(llama.model, tokenizer, tmp_path / "model", "first")
    before = contents(tmp_path)
    for name, overwrite, code in (
        ("thesis", True, "not_an_export"),
        ("adapter", True, "not_an_export"),
        ("model", False, "folder_not_empty"),
    ):
        with raises(InputError, code):
            save_model(llama.model, tokenizer, tmp_path / name, "second", overwrite=overwrite)
    assert contents(tmp_path) == before
    save_model(llama.build(), tokenizer, tmp_path / "model", "second", overwrite=True)
    assert (tmp_path / "model" / "README.md").read_text() == "second"
    assert contents(tmp_path)["model/model.safetensors"] != before["model/model.safetensors"]
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="other", overwrite=True)
    assert "other" in (tmp_path / "adapter" / "adapter_config.json").read_text()


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_export_leaves_what_was_there(failure, exists, llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if exists:
        save_model(llama.build(), tokenizer, out, "old")
    before = contents(tmp_path)

    def fail(*args, **options):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "save_pretrained", fail)  # after the weights
        with pytest.raises((StorageError, KeyboardInterrupt)) as caught:
            save_model(llama.model, tokenizer, out, "new", overwrite=True)
    if isinstance(failure, OSError):
        assert (caught.value.code, caught.value.errno) == ("disk_full", errno.ENOSPC)
    assert contents(tmp_path) == before
    assert names_in(tmp_path) == (["out"] if exists else [])
    save_model(llama.model, tokenizer, out, "new", overwrite=True)  # and then it works
    assert (out / "README.md").read_text() == "new"
