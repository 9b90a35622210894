"""The fingerprint: the weights to the last bit, and nothing else."""

from __future__ import annotations

import hashlib

import pytest
import torch

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.weights.fingerprint import fingerprint, fingerprint_of_files
from rebind.storage import cache_dir, seal_json, write_json
from tests.families import FAMILIES, HIDDEN
from tests.support import raises
from tests.tiny import save


def test_fingerprint_is_the_weights():
    assert fingerprint(FAMILIES["llama"](0)) == fingerprint(FAMILIES["llama"](0))
    others = FAMILIES.keys() - {"gpt-neox-sequential"}  # the very weights of gpt-neox
    prints = [fingerprint(FAMILIES[name](seed)) for name in others for seed in (0, 1)]
    assert len(set(prints)) == len(prints)
    assert all(len(each) == 64 for each in prints)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_sees_one_bit_of_any_entry(tiny, dtype):
    model = tiny.to(dtype)
    before = fingerprint(model)
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for name, parameter in model.named_parameters():
        entry = parameter.data.view(-1)[parameter.numel() * 2 // 3 : parameter.numel() * 2 // 3 + 1].view(integers)
        entry ^= 1
        assert fingerprint(model) != before, name
        entry ^= 1
    assert fingerprint(model) == before


def test_fingerprint_sees_entries_that_change_places(tiny):
    """Where the sum of the whole matrix stays the same, and no sampled entry moves."""
    before, weight = fingerprint(tiny), tiny.lm_head.weight.data
    weight[[4, 9]] = weight[[9, 4]]
    assert fingerprint(tiny) != before
    weight[[4, 9]] = weight[[9, 4]]
    flat = weight.view(-1)
    assert len(flat) // 1024 == 3
    flat[[1, HIDDEN + 2]] = flat[[HIDDEN + 2, 1]]
    assert fingerprint(tiny) != before


def test_fingerprint_sees_entries_of_one_row_that_change_places():
    """The sum of the row stays the same, and between 1024 evenly spaced entries nothing else would tell."""
    wide = torch.nn.Linear(4096, 4)
    before, row = fingerprint(wide), wide.weight.data[2]
    row[[5, 6]] = row[[6, 5]]
    assert fingerprint(wide) != before


def _only_short(data=b""):
    assert len(data) < 2**14, "hashed again"
    return hashlib.new("sha256", data)


def test_a_model_in_files_is_hashed_once(tiny, tmp_path, monkeypatch):
    save(tiny, tmp_path / "model")
    first = LanguageModel.load(tmp_path / "model").fingerprint
    assert first == fingerprint(tiny)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", _only_short)
        assert fingerprint_of_files(tiny, tmp_path / "model") == first
    with torch.no_grad():
        tiny.lm_head.weight[3, 4] += 1
    save(tiny, tmp_path / "model")
    changed = LanguageModel.load(tmp_path / "model").fingerprint
    assert changed == fingerprint(tiny) != first


@pytest.mark.parametrize("damage", ["altered", "cut", "forged"])
def test_a_damaged_fingerprint_in_the_cache_is_computed_again(tiny, tmp_path, damage):
    save(tiny, tmp_path / "model")
    first = LanguageModel.load(tmp_path / "model").fingerprint
    (file,) = (cache_dir() / "fingerprints").iterdir()
    text = file.read_text()
    if damage == "forged":
        write_json(file, seal_json({"fingerprint": [first]}))
    else:
        file.write_text(text[:40] if damage == "cut" else text.replace(first, first[::-1]))
    assert fingerprint_of_files(tiny, tmp_path / "model") == first


def test_fingerprint_sees_dtype_and_not_layout_mode_or_gradients(tiny):
    before = fingerprint(tiny)
    weight = tiny.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.mT.contiguous().mT
    assert not weight.is_contiguous()
    tiny.train().requires_grad_(True)
    assert fingerprint(tiny) == before
    zero = torch.nn.Linear(3, 5, bias=False)
    torch.nn.init.zeros_(zero.weight)
    assert fingerprint(zero.half()) != fingerprint(zero.bfloat16())  # the same bits


def test_fingerprint_does_not_see_the_device_but_weights_must_be_on_one(tiny):
    if torch.cuda.is_available():
        assert fingerprint(tiny.bfloat16()) == fingerprint(tiny.to("cuda"))
    with raises(InputError, "offloaded_weights"):
        fingerprint(tiny.to("meta"))
