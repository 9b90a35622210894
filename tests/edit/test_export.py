"""Out of the editor: what is loaded elsewhere is what was edited here, and a folder is there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rebind.edit import export
from rebind.edit.card import LISTED, model_card
from rebind.edit.edits import Edit, fold
from rebind.edit.export import (
    Exported,
    apply_delta,
    changes,
    delta_metadata,
    export_peft,
    load_delta,
    rounding_errors,
    save_delta,
    save_model,
)
from rebind.edit.facts import Fact
from rebind.edit.sites import find_sites, memory_of, module_at, write_memory
from rebind.errors import InputError, NumericalError, ShapeError, StorageError, UnknownNameError
from rebind.memory.low_rank import LowRank
from tests.edit.families import FAMILIES, HIDDEN, INNER, tokens
from tests.support import Draw, assert_close

KINDS = ["llama", "gpt2", "gpt-neox", "gemma2"]
ALL = "all of it"


def make_edit(model, layers, rows, seed=0, **given):
    """An edit of random writes, as strong as the weights they change."""
    draw = Draw(seed, torch.float32)
    sites = [find_sites(model)[layer] for layer in layers]
    tensors = {}
    for site in sites:
        write = draw.write(rows, site.d_k, site.d_v)
        parts = zip(("keys", "values", "gain"), write.tensors(), strict=True)
        tensors |= {f"{site.name}/{part}": tensor for part, tensor in parts}
    facts = tuple(Fact.parse(f"The {{thing {seed}-{row}}} is", "new") for row in range(rows))
    names = tuple(site.name for site in sites)
    plain = {"facts": facts, "method": "memit", "settings": {"layers": list(layers)}, "sites": names}
    return Edit(**{**plain, "tensors": tensors, **given})


class Case:
    """A base model, the same model edited at two sites (of 2 and 5 rows), and what lies between them."""

    def __init__(self, family, dtype=torch.float32, layers=(0, 1), **options):
        self.build = lambda: FAMILIES[family](**options).to(dtype)
        self.model = self.build()
        sites = find_sites(self.model)
        self.sites = [sites[layer].name for layer in layers]
        self.edits = [make_edit(self.model, layers, 2, 1), make_edit(self.model, layers[1:], 3, 2)]
        self.base = {site: memory_of(module_at(self.model, site)).clone() for site in self.sites}
        self.edited = {site: fold(self.base[site], site, self.edits) for site in self.sites}
        for site in self.sites:
            write_memory(module_at(self.model, site), self.edited[site])

    @property
    def changes(self):
        return changes(self.base, self.edits, self.edited)

    def logits(self):
        return self.model(tokens()).logits


@pytest.fixture
def llama():
    return Case("llama")


@pytest.fixture
def tokenizer():
    vocab = {token: index for index, token in enumerate(["<unk>", *"abcdef"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="<unk>")), unk_token="<unk>"
    )


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# The change


@pytest.mark.parametrize("kind", KINDS)
def test_the_change_is_what_the_edits_added(kind):
    case = Case(kind)
    found = case.changes
    assert {site: change.rank for site, change in found.items()} == dict(zip(case.sites, (2, 5), strict=True))
    for site, change in found.items():
        assert change.left.dtype == torch.float64
        exact = fold(case.base[site].double(), site, case.edits) - case.base[site].double()
        assert_close(change.dense(), exact, 1e-12)
        assert float(exact.norm()) > 0.1  # else all of this compares nothing with nothing


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_any_number_of_edits_composes_in_order(llama, count):
    """Random writes do not commute: a wrong order anywhere shows."""
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 1 + seed % 3, seed) for seed in range(count)]
    base = {site: llama.base[site].double()}
    edited = {site: fold(base[site], site, edits)}
    found = changes(base, edits, edited)[site]
    assert_close(found.dense(), edited[site] - base[site], 1e-12)
    if count > 1:
        backwards = fold(base[site], site, edits[::-1])
        assert float((backwards - edited[site]).norm() / found.dense().norm()) > 1e-2


def test_more_rows_than_the_weights_have_are_compacted(llama):
    site = llama.sites[0]
    edits = [make_edit(llama.model, [0], 30, seed) for seed in (1, 2)]
    base = {site: llama.base[site].double()}
    edited = {site: fold(base[site], site, edits)}
    found = changes(base, edits, edited)[site]
    assert found.rank == min(HIDDEN, INNER)
    assert_close(found.dense(), edited[site] - base[site], 1e-10)


def test_gains_that_depend_on_earlier_edits_are_asked_for(llama):
    def gain_at(site):
        return lambda edit, earlier: edit.write(site).gain / (1 + len(earlier))

    edited = {site: fold(llama.base[site], site, llama.edits, gain_at(site)) for site in llama.sites}
    found = changes(llama.base, llama.edits, edited, gain_at=gain_at)
    assert max(rounding_errors(llama.base, edited, found).values()) < 1e-6
    with pytest.raises(NumericalError, match="refresh the editor"):
        changes(llama.base, llama.edits, edited)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_that_are_not_base_and_edits_are_refused(dtype):
    """Also in bf16, where rounding alone moves the weights by a good part of the change."""
    case = Case("llama", dtype)
    assert case.changes
    site = case.sites[1]
    with pytest.raises(NumericalError, match=f"{site} .* expected less than 1e-3: .* refresh the editor"):
        changes(case.base, case.edits, {**case.edited, site: case.base[site]})
    with pytest.raises(NumericalError, match=site):
        changes(case.base, case.edits[:1], case.edited)


def test_a_faint_change_that_is_missing_is_noticed(llama):
    """Of a ten-thousandth of the weights, as a single fact's in a large model may be."""

    def gain_at(site):
        return lambda edit, earlier: 1e-4 * edit.write(site).gain

    edited = {site: fold(llama.base[site], site, llama.edits, gain_at(site)) for site in llama.sites}
    assert changes(llama.base, llama.edits, edited, gain_at=gain_at)
    with pytest.raises(NumericalError, match="refresh the editor"):
        changes(llama.base, llama.edits, llama.base, gain_at=gain_at)


def test_what_the_dtype_rounds_away_is_reported():
    for dtype, least, most in ((torch.float32, 1e-9, 1e-6), (torch.bfloat16, 1e-4, 0.05)):
        case = Case("llama", dtype)
        found = case.changes
        for site, error in rounding_errors(case.base, case.edited, found).items():
            dense = found[site].dense()
            moved = case.edited[site].double() - case.base[site].double()
            assert error == pytest.approx(float((moved - dense).norm() / dense.norm()))
            assert least < error < most


def test_no_edits_is_an_error(llama, tmp_path):
    with pytest.raises(InputError, match="got 0 edits .* expected at least one .*: write a fact first"):
        changes(llama.base, [], llama.edited)
    for nothing in ({}, {llama.sites[0]: LowRank(torch.zeros(HIDDEN, 0), torch.zeros(0, INNER))}):
        with pytest.raises(InputError, match="no changes .*: write a fact first"):
            export_peft(llama.model, nothing, tmp_path / "adapter", base_name="tiny")
        with pytest.raises(InputError, match="no changes .*: write a fact first"):
            save_delta(nothing, tmp_path / "delta.safetensors")
    assert left_in(tmp_path) == []


def test_a_site_without_weights_is_named(llama):
    first, second = llama.sites
    with pytest.raises(UnknownNameError, match=f"site of the base weights '{second}'"):
        changes({first: llama.base[first]}, llama.edits, llama.edited)
    with pytest.raises(UnknownNameError, match=f"site of the edited weights '{first}'"):
        changes(llama.base, llama.edits, {second: llama.edited[second]})


# An adapter


@pytest.mark.parametrize("kind", KINDS)
def test_peft_gives_the_edited_models_logits(kind, tmp_path):
    case = Case(kind)
    done = export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    assert done == Exported((tmp_path / "adapter").resolve(), dict(zip(case.sites, (2, 5), strict=True)), done.errors)
    assert all(error < 1e-6 for error in done.errors.values())
    assert left_in(tmp_path) == ["adapter"]
    assert left_in(tmp_path / "adapter") == ["adapter_config.json", "adapter_model.safetensors"]

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
def test_merging_gives_the_edited_weights(kind, tmp_path):
    case = Case(kind)
    export_peft(case.model, case.changes, tmp_path / "adapter", base_name="tiny")
    merged = PeftModel.from_pretrained(case.build(), tmp_path / "adapter").merge_and_unload()
    expected = case.model.state_dict()
    assert merged.state_dict().keys() == expected.keys()
    for name, weight in merged.state_dict().items():
        if name.removesuffix(".weight") in case.sites:
            assert_close(weight, expected[name], 1e-6)
        else:
            assert torch.equal(weight, expected[name]), name


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


def test_an_adapter_of_more_rows_than_the_weights_have(llama, tmp_path):
    site = llama.sites[0]
    draw = Draw(0)
    change = LowRank(draw.normal(HIDDEN, 90) / 90, draw.normal(90, INNER))
    done = export_peft(llama.model, {site: change}, tmp_path / "adapter", base_name="tiny")
    assert done.ranks == {site: HIDDEN}
    assert done.errors[site] < 1e-6


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
    with pytest.raises(ShapeError, match=rf"\[{HIDDEN}, {INNER}\], the model holds \[{HIDDEN}, {INNER + 8}\]"):
        export_peft(wide, llama.changes, tmp_path / "adapter", base_name="tiny")
    with pytest.raises(UnknownNameError, match="has no module 'model.layers.0.mlp.down_proj'"):
        export_peft(FAMILIES["gpt2"](), llama.changes, tmp_path / "adapter", base_name="tiny")
    for rank in (0, -1):
        with pytest.raises(InputError, match=f"rank is {rank}, expected 1 or more: leave it out"):
            export_peft(llama.model, llama.changes, tmp_path / "adapter", rank=rank, base_name="tiny")
    assert left_in(tmp_path) == []


# A checkpoint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_comes_back_bit_for_bit(kind, dtype, tokenizer, tmp_path, capfd):
    case = Case(kind, dtype)
    assert save_model(case.model, tokenizer, tmp_path / "new" / "out", "# card") == (tmp_path / "new" / "out").resolve()
    assert left_in(tmp_path / "new") == ["out"]
    assert (tmp_path / "new" / "out" / "README.md").read_text() == "# card"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(left_in(tmp_path / "new" / "out"))
    assert capfd.readouterr().err == ""  # no progress bar
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "out", dtype="auto")
    expected = case.model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, weight in loaded.state_dict().items():
        assert weight.dtype == expected[name].dtype
        assert torch.equal(weight.view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "out")("a").input_ids == tokenizer("a").input_ids


def test_a_folder_with_something_in_it_is_left_alone(llama, tokenizer, tmp_path):
    out = tmp_path / "out"
    save_model(llama.model, tokenizer, out, "first")
    before = contents(out)
    with pytest.raises(InputError, match="is not empty, expected a new or empty folder: .* overwrite=True"):
        save_model(llama.model, tokenizer, out, "second")
    assert contents(out) == before
    save_model(llama.build(), tokenizer, out, "second", overwrite=True)
    assert (out / "README.md").read_text() == "second"
    assert contents(out)["model.safetensors"] != before["model.safetensors"]
    assert left_in(tmp_path) == ["out"]


def test_overwriting_replaces_nothing_but_its_own_kind(llama, tokenizer, tmp_path):
    """`overwrite` on a mistyped name must not cost somebody's home folder."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years")
    (tmp_path / "file").write_text("text")
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="tiny")
    before = contents(tmp_path)
    for name, why in (("thesis", "holds other things"), ("file", "is a file"), ("adapter", "holds other things")):
        with pytest.raises(InputError, match=f"{name} {why} and is not replaced"):
            save_model(llama.model, tokenizer, tmp_path / name, "", overwrite=True)
    with pytest.raises(InputError, match="holds other things"):
        export_peft(llama.model, llama.changes, tmp_path / "thesis", base_name="tiny", overwrite=True)
    assert contents(tmp_path) == before
    with pytest.raises(InputError, match="overwrite=True"):
        export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="other")
    export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="other", overwrite=True)
    assert "other" in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_an_empty_folder_is_filled(llama, tmp_path):
    (tmp_path / "out").mkdir()
    save_model(llama.model, None, tmp_path / "out", "card")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert left_in(tmp_path) == ["out"]


def test_what_a_killed_save_left_goes(llama, tokenizer, tmp_path):
    left = [tmp_path / name for name in (".out.0123456789ab.new", "..out.0123456789ab.new.ba9876543210.tmp")]
    young = tmp_path / ".out.ffffffffffff.new"
    for folder in (*left, young):
        folder.mkdir()
    for folder in left:
        os.utime(folder, (0, 0))
    save_model(llama.model, tokenizer, tmp_path / "out", "")
    assert not any(folder.exists() for folder in left)
    assert young.exists()  # whose owner may be alive


def test_the_base_is_never_overwritten(llama, tokenizer, tmp_path):
    save_model(llama.build(), tokenizer, tmp_path / "base", "card")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match="holds the base model, expected another folder: .* save beside it"):
        save_model(loaded, tokenizer, tmp_path / "x" / ".." / "base", "card", overwrite=True)
    save_model(loaded, tokenizer, tmp_path / "beside", "card")


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ALL])
@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_what_was_there(failure, there, llama, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "out"
    if there:
        save_model(llama.build(), tokenizer, out, "old")
    before = contents(tmp_path)

    def fail(*args, **options):
        raise OSError(errno.EACCES, "Permission denied") if failure is ALL else failure

    if failure is ALL:  # everything is written, and the new folder cannot take the old one's place
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: fail() if Path(b) == out and "new" in a.name else rename(a, b))
    else:
        monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)  # after the weights
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else StorageError
    with pytest.raises(expected) as caught:
        save_model(llama.model, tokenizer, out, "new", overwrite=True)
    if expected is StorageError:
        assert f"cannot write {out.resolve()} (" in str(caught.value)
        assert caught.value.errno in (errno.ENOSPC, errno.EACCES)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert left_in(tmp_path) == (["out"] if there else [])
    save_model(llama.model, tokenizer, out, "new", overwrite=True)  # and then it works
    assert (out / "README.md").read_text() == "new"


def test_a_failed_adapter_leaves_nothing(llama, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(StorageError, match="adapter .*No space left on device.* free some space"):
        export_peft(llama.model, llama.changes, tmp_path / "adapter", base_name="tiny")
    assert left_in(tmp_path) == []


def test_a_folder_that_appears_meanwhile_is_kept(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real = export.write_folder_atomically

    def rival(path, fill):
        real(path, fill)
        out.mkdir()
        (out / "config.json").write_text("theirs")

    monkeypatch.setattr(export, "write_folder_atomically", rival)
    with pytest.raises(InputError, match="is not empty"):
        save_model(llama.model, None, out, "ours")
    assert contents(tmp_path) == {"out/config.json": b"theirs"}


def test_a_config_that_transformers_will_not_save(llama, tmp_path):
    llama.model.generation_config.temperature = -1.0
    llama.model.generation_config.do_sample = False
    with pytest.raises(
        InputError, match="will not save this LlamaForCausalLM .*temperature.*: correct model.config or"
    ):
        save_model(llama.model, None, tmp_path / "out", "card")
    assert left_in(tmp_path) == []


# The change alone


@pytest.mark.parametrize("place", ["delta.safetensors", "folder", "folder/mine.safetensors"])
def test_a_delta_comes_back_as_it_was(place, llama, tmp_path):
    found = llama.changes
    file = save_delta(found, tmp_path / place, {"fingerprint": "f" * 64, "base": "tiny"})
    assert file.suffix == ".safetensors"
    assert set(load_file(file)) == {f"{site}/{part}" for site in llama.sites for part in ("left", "right")}
    assert delta_metadata(tmp_path / place) == {"fingerprint": "f" * 64, "base": "tiny", "format": "rebind-delta-1"}
    loaded = load_delta(tmp_path / place, "f" * 64)
    assert loaded.keys() == found.keys()
    for site, change in loaded.items():
        assert torch.equal(change.left, found[site].left)
        assert torch.equal(change.right, found[site].right)
    with pytest.raises(InputError, match="made for model ffffffffffff…, this one is 000000000000…: load the model"):
        load_delta(tmp_path / place, "0" * 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_makes_the_edited_model_of_the_base(kind, dtype, tmp_path):
    case = Case(kind, dtype)
    fresh = case.build()
    apply_delta(fresh, load_delta(save_delta(case.changes, tmp_path / "delta")))
    for name, weight in fresh.state_dict().items():
        assert torch.equal(weight, case.model.state_dict()[name]), name


def test_a_delta_is_applied_whole_or_not_at_all(llama):
    fresh = llama.build()
    before = {name: weight.clone() for name, weight in fresh.state_dict().items()}
    first, second = llama.sites
    good = llama.changes[first]
    bad = {
        ShapeError: LowRank(good.left, torch.randn(2, 5).double()),
        NumericalError: LowRank(good.left * 1e30, good.right * 1e30),
    }
    for error, change in bad.items():
        with pytest.raises(error, match=second):
            apply_delta(fresh, {first: good, second: change})
    with pytest.raises(UnknownNameError, match="model.layers.9"):
        apply_delta(fresh, {first: good, "model.layers.9.mlp.down_proj": good})
    assert all(torch.equal(weight, before[name]) for name, weight in fresh.state_dict().items())


def test_a_delta_is_not_overwritten_unasked(llama, tmp_path):
    file = save_delta(llama.changes, tmp_path / "delta")
    before = file.read_bytes()
    with pytest.raises(InputError, match="is there already, expected a new name: .* overwrite=True"):
        save_delta(llama.changes, tmp_path / "delta", {"more": "x"})
    assert file.read_bytes() == before
    save_delta(llama.changes, tmp_path / "delta", {"more": "x"}, overwrite=True)
    assert delta_metadata(file)["more"] == "x"
    assert left_in(tmp_path / "delta") == ["delta.safetensors"]


def test_what_is_no_delta_is_refused(llama, tmp_path):
    with pytest.raises(InputError, match="metadata 'facts' is a int, expected a text"):
        save_delta(llama.changes, tmp_path / "delta", {"facts": 3})
    with pytest.raises(InputError, match="nowhere.delta.safetensors cannot be read"):
        load_delta(tmp_path / "nowhere")
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(InputError, match="torn.safetensors cannot be read .* expected a file that save_delta wrote"):
        load_delta(tmp_path / "torn.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="has format None, expected 'rebind-delta-1'"):
        load_delta(tmp_path / "other.safetensors")
    save_file({"a/left": torch.ones(2, 1)}, tmp_path / "half.safetensors", {"format": "rebind-delta-1"})
    with pytest.raises(InputError, match="has no tensor 'a/right'"):
        load_delta(tmp_path / "half.safetensors")


# The card


def scored(**changes):
    return {"probability": 0.5, "rank": 1, "nll": 0.1, "exact": True, "says": " Rome", **changes}


def test_the_card_lists_every_fact_with_its_scores(llama):
    facts = (Fact.parse("The capital of {France} is", "Rome"), Fact.parse("{a|b} *is*\nof", "<c>"))
    before = [scored(probability=0.0012, rank=412, says=" Paris"), scored(rank=7, says="|")]
    after = [scored(probability=0.973), scored(rank=2, says="x")]
    edit = make_edit(
        llama.model,
        [0, 1],
        2,
        id="e0001",
        facts=facts,
        scores={"before": before, "after": after},
        versions={"rebind": "0.1"},
        created="2025-01-01T00:00:00+00:00",
        forced=True,
    )
    card = model_card([edit], "Org/some_model", "f" * 64)
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model: Org/some_model" in front.splitlines()
    assert "library_name: transformers" in front.splitlines()
    lines = body.splitlines()
    assert "## Edits" in lines
    assert "2 facts rewritten" in body
    assert "- Base model: Org/some\\_model" in lines
    assert f"- Fingerprint of the base: `{'f' * 64}`" in lines
    assert "| e0001 | memit (forced) | 0, 1 | 2 | 2025-01-01T00:00:00+00:00 | rebind 0.1 |" in lines
    assert "| e0001 | The capital of France is | Rome | 0.12%, rank 412, “ Paris” | 97.30%, rank 1, “ Rome” |" in lines
    assert "| e0001 | a\\|b \\*is\\* of | \\<c\\> | 50.00%, rank 7, “\\|” | 50.00%, rank 2, “x” |" in lines


def test_a_card_without_scores_or_a_hub_name(llama):
    edits = [make_edit(llama.model, [0], 1, 1, scores={"before": 0.5}), make_edit(llama.model, [0], 1, 2, settings={})]
    card = model_card(edits, "smollm2", "f", library="peft")
    assert "base_model" not in card
    assert "library_name: peft" in card
    assert card.count("| – | – |") == 2
    assert "| model.layers.0.mlp.down\\_proj |" in card  # no layers in the settings: the sites


def test_a_long_card_says_what_it_leaves_out(llama):
    edit = make_edit(llama.model, [0], LISTED + 3)
    card = model_card([edit], "tiny", "f")
    assert "And 3 more facts: the ledger has them all." in card
    assert card.count("thing 0-") == LISTED
    assert "more facts" not in model_card([make_edit(llama.model, [0], 3)], "tiny", "f")
