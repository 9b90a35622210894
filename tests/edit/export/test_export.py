"""transformers and peft load from an export exactly the model that was edited."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rebind.edit.export.folders import AdapterExport, export_peft, save_model
from rebind.errors import InputError, ShapeError, StorageError
from rebind.memory.low_rank import LowRank
from rebind.models.sites import memory_of, module_at
from tests.edit.edited import KINDS, Case, contents, names_in
from tests.families import FAMILIES, HIDDEN, INNER, tokens
from tests.support import Draw, assert_close, raises

# An adapter


@pytest.mark.parametrize("kind", KINDS)
def test_peft_gives_the_edited_models_logits(kind, tmp_path):
    case = Case(kind)
    done = export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    ranks = dict(zip(case.sites, (2, 5), strict=True))
    assert done == AdapterExport((tmp_path / "adapter").resolve(), ranks, done.errors)
    assert all(error < 1e-6 for error in done.errors.values())
    assert names_in(tmp_path) == ["adapter"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names_in(tmp_path / "adapter"))

    base = case.build()
    unedited = base(tokens()).logits
    loaded = PeftModel.from_pretrained(base, done.folder)  # warnings are errors: no key is missing, none unknown
    assert_close(loaded(tokens()).logits, case.logits(), 1e-5)
    assert float((case.logits() - unedited).abs().max()) > 1e-2
    wrapped = {name.removeprefix("base_model.model.") for name, m in loaded.named_modules() if hasattr(m, "lora_A")}
    assert wrapped == set(case.sites)
    for site in case.sites:
        module = loaded.get_submodule(f"base_model.model.{site}")
        assert module.scaling == {"default": 1.0}
        assert module.fan_in_fan_out == (kind == "gpt2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 2, 4, 9])
def test_a_truncated_adapter_states_its_error(kind, rank, tmp_path):
    case = Case(kind)
    whole = case.changes
    done = export_peft(case.model, whole, tmp_path / "adapter", rank=rank, base_name="tiny")
    assert done.ranks == {site: min(rank, change.rank) for site, change in whole.items()}
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for site, change in whole.items():
        A, B = (stored[f"base_model.model.{site}.lora_{part}.weight"] for part in "AB")
        assert (A.dtype, A.shape) == (torch.float32, (done.ranks[site], change.right.shape[-1]))
        assert (B.dtype, B.shape) == (torch.float32, (change.left.shape[-2], done.ranks[site]))
        dense = change.dense()
        actual = float((B.double() @ A.double() - dense).norm() / dense.norm())
        assert done.errors[site] == pytest.approx(actual, rel=1e-9)
        singular = torch.linalg.svdvals(dense)
        best = float(singular[rank:].norm() / singular.norm())
        assert done.errors[site] == pytest.approx(best, abs=1e-6)
        assert (best > 0.05) == (rank < change.rank)
    merged = PeftModel.from_pretrained(case.build(), tmp_path / "adapter").merge_and_unload()
    for site, change in whole.items():
        moved = memory_of(module_at(merged, site)).double() - case.base[site].double()
        error = float((moved - change.dense()).norm() / change.dense().norm())
        assert error == pytest.approx(done.errors[site], abs=1e-5)


def test_factors_that_cancel_lose_nothing(llama, tmp_path):
    """Near-parallel keys have large errors against large gains; as they stand float32 would lose the digits."""
    draw = Draw(3)
    left, right = draw.normal(HIDDEN, 2), draw.normal(2, INNER)
    mix = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-6]], dtype=torch.float64)
    change = LowRank(left @ mix, torch.linalg.solve(mix, right))
    naive = change.left.float().double() @ change.right.float().double()
    assert float((naive - left @ right).norm() / (left @ right).norm()) > 1e-3
    done = export_peft(llama.model, {llama.sites[0]: change}, tmp_path / "adapter", base_name="tiny")
    assert done.errors[llama.sites[0]] < 1e-6


def test_sites_whose_names_begin_alike_keep_their_ranks(tmp_path):
    """Patterns are regular expressions to peft: layers.1 must not speak for layers.11."""
    case = Case("llama", layers=(1, 11), num_hidden_layers=13)
    export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (5, 5)
    assert config["rank_pattern"] == config["alpha_pattern"] == {case.sites[0]: 2}
    assert config["target_modules"] == case.sites
    assert (config["base_model_name_or_path"], config["bias"], config["task_type"]) == ("tiny", "none", "CAUSAL_LM")
    loaded = PeftModel.from_pretrained(case.build(), tmp_path / "adapter")
    assert_close(loaded(tokens()).logits, case.logits(), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_loads_on_a_bf16_base(kind, tmp_path):
    case = Case(kind)
    export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    base = case.build().to(torch.bfloat16)
    unedited = base(tokens()).logits.float()
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    got, moved = loaded(tokens()).logits.float(), (case.logits() - unedited).norm()
    assert float((got - case.logits()).norm() / moved) < 0.1


def test_an_adapter_of_a_bf16_model_carries_the_unrounded_change(tmp_path):
    case = Case("llama", torch.bfloat16)
    done = export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    assert all(error < 1e-6 for error in done.errors.values())


def test_writing_an_adapter_needs_no_peft():
    code = "import sys, rebind.edit.export; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_same_change_gives_the_same_bytes(llama, tmp_path):
    for name in "ab":
        export_peft(llama.model, llama.changes, tmp_path / name, base_name="tiny", card="read me")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (tmp_path / "a" / "README.md").read_text() == "read me"


def test_changes_of_another_model_are_refused(llama, tmp_path):
    wide = FAMILIES["llama"](intermediate_size=INNER + 8)
    with raises(ShapeError, "change_of_other_model"):
        export_peft(wide, llama.changes, tmp_path / "adapter", base_name="tiny")
    with raises(InputError, "change_of_other_model"):
        export_peft(FAMILIES["gpt2"](), llama.changes, tmp_path / "adapter", base_name="tiny")
    with raises(InputError, "bad_rank"):
        export_peft(llama.model, llama.changes, tmp_path / "adapter", rank=0, base_name="tiny")
    assert names_in(tmp_path) == []


# A checkpoint


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
