"""A delta file holds the change exactly, and turns the base model into the edited one, completely or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rebind.edit.export.change import apply_delta, load_delta, save_delta
from rebind.edit.export.checkpoint import save_model
from rebind.errors import InputError, NumericalError, ShapeError
from rebind.memory.low_rank import LowRank
from tests.edit.edited import KINDS, Case, names_in
from tests.support import raises


@pytest.mark.parametrize("place", ["delta.safetensors", "folder", "folder/mine.safetensors"])
def test_a_delta_comes_back_as_it_was(place, llama, tmp_path):
    changes = llama.changes
    file = save_delta(changes, tmp_path / place, {"fingerprint": "f" * 64, "base": "tiny"})
    assert set(load_file(file)) == {f"{site}/{part}" for site in llama.sites for part in ("left", "right")}
    with safe_open(str(file), framework="pt") as stored:
        described = {"fingerprint": "f" * 64, "base": "tiny", "format": "rebind-delta-1"}
        assert described.items() <= stored.metadata().items()
    loaded = load_delta(tmp_path / place, "f" * 64)
    assert loaded.keys() == changes.keys()
    for site, change in loaded.items():
        assert torch.equal(change.left, changes[site].left)
        assert torch.equal(change.right, changes[site].right)
    with raises(InputError, "delta_of_other_model"):
        load_delta(tmp_path / place, "0" * 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_turns_the_base_into_the_edited_model(kind, dtype, tmp_path):
    case = Case(kind, dtype)
    fresh = case.build()
    apply_delta(fresh, load_delta(save_delta(case.changes, tmp_path / "delta")))
    for name, weight in fresh.state_dict().items():
        assert torch.equal(weight, case.model.state_dict()[name]), name


def test_a_delta_is_applied_completely_or_not_at_all(llama):
    fresh = llama.build()
    before = {name: weight.clone() for name, weight in fresh.state_dict().items()}
    first, second = llama.sites
    good = llama.changes[first]
    for error, site, change in (
        (ShapeError, second, LowRank(good.left, torch.randn(2, 5).double())),
        (NumericalError, second, LowRank(good.left * 1e30, good.right * 1e30)),
        (InputError, "model.layers.9.mlp.down_proj", good),
    ):
        with pytest.raises(error, match=site):
            apply_delta(fresh, {first: good, site: change})
    assert all(torch.equal(weight, before[name]) for name, weight in fresh.state_dict().items())


def test_a_delta_file_is_replaced_only_with_overwrite(llama, tmp_path):
    file = save_delta(llama.changes, tmp_path / "delta")
    before = file.read_bytes()
    with raises(InputError, "file_exists"):
        save_delta(llama.changes, tmp_path / "delta", {"more": "x"})
    assert file.read_bytes() == before
    save_delta(llama.changes, tmp_path / "delta", {"more": "x"}, overwrite=True)
    assert file.read_bytes() != before
    assert names_in(tmp_path / "delta") == ["delta.safetensors"]


def test_a_delta_in_the_folder_of_a_checkpoint_is_replaced_with_it(llama, tokenizer, tmp_path):
    save_model(llama.model, tokenizer, tmp_path / "out", "card")
    save_delta(llama.changes, tmp_path / "out")
    save_model(llama.model, tokenizer, tmp_path / "out", "card", overwrite=True)
    assert "delta.safetensors" not in names_in(tmp_path / "out")


def test_files_that_are_not_deltas_are_refused(tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\0\0\0")
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    save_file({"a/left": torch.ones(2, 1)}, tmp_path / "half.safetensors", {"format": "rebind-delta-1"})
    for name in ("nowhere", "torn.safetensors", "other.safetensors", "half.safetensors"):
        with raises(InputError, "not_a_delta_file"):
            load_delta(tmp_path / name)
