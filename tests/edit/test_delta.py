"""The change alone: it comes back as it was, and makes the edited model of the base, whole or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rebind.edit.export.delta import apply_delta, delta_metadata, load_delta, save_delta
from rebind.errors import InputError, NumericalError, ShapeError, UnknownNameError
from rebind.memory.low_rank import LowRank
from tests.edit.edited import KINDS, Case, left_in


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
