"""peft and llama.cpp compute from an adapter exactly the change that the edits made."""

from __future__ import annotations

import json
import subprocess
import sys

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

from rebind.edit.export.adapter import AdapterExport, export_peft
from rebind.edit.export.gguf_adapter import export_gguf, gguf_architecture, gguf_names, read_gguf
from rebind.errors import InputError, ShapeError
from rebind.memory.low_rank import LowRank
from rebind.models.sites import find_sites, memory_of, module_at
from tests import model_types
from tests.edit.edited import KINDS, Case, contents, names_in
from tests.families import FAMILIES, HIDDEN, INNER, LLAMA_LIKE, tokens
from tests.support import Draw, assert_close, raises


@pytest.mark.parametrize("kind", KINDS)
def test_peft_gives_the_edited_models_logits(kind, tmp_path):
    case = Case(kind)
    done = export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    assert done == AdapterExport((tmp_path / "adapter").resolve(), 8, done.errors)
    assert all(error < 1e-6 for error in done.errors.values())
    assert names_in(tmp_path) == ["adapter"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(names_in(tmp_path / "adapter"))

    base = case.build()
    unedited = base(tokens()).logits
    loaded = PeftModel.from_pretrained(base, done.path)  # warnings are errors: no key is missing, none unknown
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
    assert done.rank == rank
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for site, change in whole.items():
        A, B = (stored[f"base_model.model.{site}.lora_{part}.weight"] for part in "AB")
        assert (A.dtype, A.shape) == (torch.float32, (rank, change.right.shape[-1]))
        assert (B.dtype, B.shape) == (torch.float32, (change.left.shape[-2], rank))
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


def test_all_sites_have_one_rank(tmp_path):
    """llama.cpp divides one alpha by the rank of each tensor, and vLLM reads one rank: nothing may differ by site."""
    case = Case("llama", layers=(1, 11), num_hidden_layers=13)  # names that begin alike, and changes of rank 2 and 5
    export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    assert not {"rank_pattern", "alpha_pattern"} & set(config)
    assert config["target_modules"] == case.sites
    assert (config["base_model_name_or_path"], config["bias"], config["task_type"]) == ("tiny", "none", "CAUSAL_LM")
    loaded = PeftModel.from_pretrained(case.build(), tmp_path / "adapter")
    assert_close(loaded(tokens()).logits, case.logits(), 1e-5)


@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (2, 8), (8, 8), (9, 16), (17, 32)])
def test_the_default_rank_is_the_smallest_of_vllm_that_holds_the_change(rows, rank, llama, tmp_path):
    """Rows that repeat others, as keys of one subject do, add nothing to the rank."""
    draw = Draw(rows)
    left, right = draw.normal(HIDDEN, rows), draw.normal(rows, INNER)
    change = LowRank(torch.cat([left, left], -1), torch.cat([right, right]))
    done = export_peft(llama.model, {llama.sites[0]: change}, tmp_path / "adapter", base_name="tiny")
    assert done.rank == rank
    assert done.error < 1e-6


def test_an_adapter_says_what_vllm_needs(tmp_path):
    notes = {rank: AdapterExport(tmp_path, rank, {}).note for rank in (1, 5, 8, 16, 17, 512, 600)}
    assert notes == {
        1: "",
        5: "vLLM pads this rank to the next one that it serves",
        8: "",
        16: "",
        17: "vLLM needs --max-lora-rank 32",
        512: "vLLM needs --max-lora-rank 512",
        600: "vLLM serves ranks up to 512; export with that rank",
    }


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
    for rank in (0, 99_999_999_999, 10**30):
        with raises(InputError, "bad_rank"):
            export_peft(llama.model, llama.changes, tmp_path / "adapter", rank=rank, base_name="tiny")
    assert names_in(tmp_path) == []


# For llama.cpp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 3])
def test_llama_cpp_computes_the_change_from_a_gguf_adapter(kind, rank, tmp_path):
    case = Case(kind)
    done = export_gguf(case.model, case.changes, tmp_path / "adapter.gguf", rank=rank, base_name="tiny")
    assert done.rank == (rank or 8)
    reader = gguf.GGUFReader(done.path)
    metadata = {name: reader.fields[name].contents() for name in reader.fields}
    assert metadata["general.type"] == "adapter"
    assert metadata["general.architecture"] == {"gpt-neox": "gptneox"}.get(kind, kind)
    assert (metadata["adapter.type"], metadata["adapter.lora.alpha"]) == ("lora", float(done.rank))
    assert reader.fields["adapter.lora.alpha"].types == [gguf.GGUFValueType.FLOAT32]
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(stored) == 2 * len(case.sites)
    for layer, (site, change) in enumerate(case.changes.items()):
        a, b = (stored[f"blk.{layer}.ffn_down.weight.lora_{part}"] for part in "ab")
        d_v, d_k = change.dense().shape
        assert (list(a.shape), list(b.shape)) == ([d_k, done.rank], [done.rank, d_v])  # ne: fastest dimension first
        scale = metadata["adapter.lora.alpha"] / b.shape[0]
        delta = scale * torch.from_numpy(b.data.copy()).double() @ torch.from_numpy(a.data.copy()).double()
        error = float((delta - change.dense()).norm() / change.dense().norm())
        assert error == pytest.approx(done.errors[site], abs=1e-6)
        assert (error < 1e-6) == (done.rank >= change.rank)
    assert {
        site: change.rank for site, change in read_gguf(done.path, case.model, case.sites).items()
    } == dict.fromkeys(case.sites, done.rank)


def test_a_gguf_adapter_is_replaced_only_with_overwrite(llama, tmp_path):
    file = tmp_path / "new" / "adapter.gguf"
    export_gguf(llama.model, llama.changes, file, base_name="tiny")
    with raises(InputError, "file_exists"):
        export_gguf(llama.model, llama.changes, file, base_name="tiny")
    export_gguf(llama.model, llama.changes, file, rank=1, base_name="tiny", overwrite=True)
    assert names_in(file.parent) == ["adapter.gguf"]


def test_a_model_that_llama_cpp_does_not_know_has_no_gguf_adapter(tmp_path):
    case = Case("opt")
    with raises(InputError, "no_gguf_architecture"):
        export_gguf(case.model, case.changes, tmp_path / "adapter.gguf", base_name="tiny")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["mistral", "phi", "gpt-neox", "gpt-bigcode", "gemma3", "olmo3", "cohere", "qwen3"])
def test_sites_have_the_names_of_the_base_models_tensors(name):
    model = FAMILIES[name]()
    sites = [site.name for site in find_sites(model)]
    assert list(gguf_names(model, sites).values()) == [f"blk.{layer}.ffn_down.weight" for layer in range(len(sites))]
    renamed = {"mistral": "llama", "phi": "phi2", "gpt-neox": "gptneox", "gpt-bigcode": "starcoder"}
    renamed |= {"olmo3": "olmo2", "cohere": "command-r"}
    assert gguf_architecture(model) == renamed.get(name, name)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("deepseek_v2", "deepseek2"),
        ("deepseek_v3", "deepseek2"),
        ("ernie4_5_moe", "ernie4_5-moe"),
        ("exaone_moe", "exaone-moe"),
        ("glm4_moe", "glm4moe"),
        ("glm_moe_dsa", "glm-dsa"),
        ("granitemoeshared", "granitemoe"),
        ("hunyuan_v1_moe", "hunyuan-moe"),
        ("kimi_linear", "kimi-linear"),
        ("llama4_text", "llama4"),
        ("qwen2_moe", "qwen2moe"),
        ("qwen3_5_moe_text", "qwen35moe"),
        ("qwen3_next", "qwen3next"),
    ],
)
def test_shared_experts_have_the_names_of_the_base_models_tensors(kind, architecture):
    model = model_types.build(kind)
    assert gguf_architecture(model) == architecture
    names = gguf_names(model, [site.name for site in find_sites(model)])
    assert [name.split(".", 2)[2] for name in names.values()][1:] == ["ffn_down_shexp.weight"] * (len(names) - 1)


def test_recurrent_blocks_have_the_names_of_the_base_models_tensors():
    model = model_types.build("falcon_mamba")
    names = gguf_names(model, [site.name for site in find_sites(model)])
    assert (gguf_architecture(model), names["backbone.layers.0.mixer.out_proj"]) == ("mamba", "blk.0.ssm_out.weight")


def test_routed_experts_have_no_adapter(tmp_path):
    """A LoRA adapter is one product per module, and routed experts are many matrices in one module."""
    model = MixtralForCausalLM(MixtralConfig(**LLAMA_LIKE, num_local_experts=4))
    site = find_sites(model)[0]
    change = LowRank(torch.ones(site.d_v, 1), torch.ones(1, site.d_k))
    for export, name in ((export_peft, "adapter"), (export_gguf, "adapter.gguf")):
        with raises(InputError, "no_adapter_for_experts"):
            export(model, {site.name: change}, tmp_path / name, base_name="tiny")
    assert names_in(tmp_path) == []
