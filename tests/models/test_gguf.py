"""GGUF files are converted once, again when the file is another one, and never in part."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.load import content_digest
from rebind.models.weights.fingerprint import fingerprint
from rebind.storage import cache_dir
from tests.families import HEADS, HIDDEN, INNER, LAYERS, VOCAB, tokens
from tests.support import raises
from tests.tiny import LETTERS

load = LanguageModel.load


def write_gguf(path, model, without=None):
    """Write a model as llama.cpp stores a Llama (with interleaved rotary halves) and a byte-level BPE vocabulary."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    vocab = ["<|endoftext|>", "<s>", "</s>", *LETTERS, "ab", "cd"]
    vocab += [f"<{i}>" for i in range(VOCAB - len(vocab))]
    writer.add_token_list(vocab)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocab) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        for heads, end in ((HEADS, "q_proj.weight"), (2, "k_proj.weight")):
            if name.endswith(end):
                split = data.reshape(heads, 2, data.shape[0] // heads // 2, data.shape[1])
                data = np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)
        if name != without:
            writer.add_tensor(names.get_name(name, (".weight",)), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(tiny, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny)
    return path


def refused(code, file):
    with raises(InputError, code) as caught:
        load(file)
    return caught.value


def test_a_gguf_is_converted_once(tiny, gguf_file, capfd):
    first = load(gguf_file)
    assert capfd.readouterr().err == ""
    assert (first.name, first.start) == ("tiny", (0,))
    assert first.fingerprint == fingerprint(tiny)
    assert torch.equal(first.model(tokens()).logits, tiny(tokens()).logits)
    (home,) = (cache_dir() / "models").iterdir()
    assert home.name.startswith("tiny-")
    assert "quantization_config" not in json.loads((home / "config.json").read_text())
    converted = (home / "model.safetensors").stat().st_mtime_ns
    again = load(str(gguf_file))
    assert (home / "model.safetensors").stat().st_mtime_ns == converted
    assert again.fingerprint == first.fingerprint
    assert again.tokenizer("abba", add_special_tokens=False) == first.tokenizer("abba", add_special_tokens=False)
    (home / "model.safetensors").write_bytes(b"half")
    assert str(home) in refused("unreadable_model", gguf_file).advice


def test_another_file_of_that_name_is_another_model_and_a_failed_conversion_leaves_nothing(tiny, gguf_file, tmp_path):
    load(gguf_file)
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:-4] + b"\0\0\0\0")
    assert load(gguf_file).fingerprint != fingerprint(tiny)
    assert len(list((cache_dir() / "models").iterdir())) == 2
    gguf_file.write_bytes(data[: len(data) // 3])
    refused("unreadable_model", gguf_file)
    write_gguf(tmp_path / "part.gguf", tiny, without="model.layers.1.mlp.down_proj.weight")
    refused("missing_weights", tmp_path / "part.gguf")
    assert len(list((cache_dir() / "models").iterdir())) == 2


def test_the_digest_covers_every_byte_and_not_the_time(tmp_path):
    file = tmp_path / "m.gguf"
    body = b"GGUF" + bytes(3 << 20)
    middle = len(body) // 2
    changed = [body[:-1] + b"x", body[:9] + b"x" + body[10:], body[:middle] + b"x" + body[middle + 1 :], body + b"\0"]
    digests = []
    for time, data in enumerate([body, body, *changed]):
        file.write_bytes(data)
        os.utime(file, (time, time))
        digests.append(content_digest(file))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\3\4 a zip", b"\x80\x02 a pickle"])
def test_a_file_that_is_not_gguf(tmp_path, data):
    (tmp_path / "model.gguf").write_bytes(data)
    refused("not_gguf", tmp_path / "model.gguf")
