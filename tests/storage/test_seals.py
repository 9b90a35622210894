"""Seals tell whether a file is as it was written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from rebind.errors import StorageError
from rebind.storage import check_json, open_tensors, read_sealed_json, seal_json, seal_tensors, seals, write_json
from tests.support import raises


def check_tensors(file):
    with open_tensors(file) as (opened, metadata):
        assert set(opened.keys()) == set(TENSORS)
        return metadata


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int32), "empty": torch.empty(0)}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(seal_tensors(save(TENSORS, metadata={"note": "é"})))
    return tmp_path / "file"


def test_sealed_tensors_are_safetensors(file):
    loaded = load(file.read_bytes())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert check_tensors(file) == {"note": "é"}


def test_every_flipped_bit_of_tensors_is_noticed(file):
    data = file.read_bytes()
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        if data[at : at + 1] != b" ":  # one of the spaces behind the header may become another kind of space
            with pytest.raises(ValueError, match="digest|safetensors"):
                check_tensors(file)


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64, save(TENSORS), b"\x08" + bytes(7) + b"[[[[]]]]"])
def test_what_has_no_seal_is_refused(file, data):
    file.write_bytes(data)
    with pytest.raises(ValueError, match="digest|safetensors"):
        check_tensors(file)


def test_a_link_to_tensors_is_not_read(file):
    link = file.with_name("link")
    link.symlink_to(file)
    with raises(StorageError, "symbolic_link"):
        check_tensors(link)


def test_sealed_json(tmp_path):
    path, value = tmp_path / "value.json", {"b": [1, 2.5, None], "a": {"x": "é"}, "c": (1,)}
    write_json(path, seal_json(value))
    assert read_sealed_json(path) == {**value, "c": [1]}
    for name in ("a", "b", "c"):
        altered = {**json.loads(path.read_text()), name: "other"}
        with pytest.raises(ValueError, match="digest|safetensors"):
            check_json(altered)
    assert read_sealed_json(tmp_path / "nothing") is None
    write_json(path, value)
    assert read_sealed_json(path) is None


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(file, monkeypatch):
    original = seals.check_tensors

    def replace(path):
        metadata = original(path)
        file.write_bytes(seal_tensors(save({"a": torch.zeros(1)})))
        return metadata

    monkeypatch.setattr(seals, "check_tensors", replace)
    with pytest.raises(ValueError, match="replaced"):
        check_tensors(file)
