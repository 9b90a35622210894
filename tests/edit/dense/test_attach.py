"""A stored memory on a plain model: the same answers as in the editor, in any dtype, and off again without a trace."""

from __future__ import annotations

import errno
import hashlib
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import rebind
from rebind.edit.dense import files, hook, load_memory, save_memory
from rebind.edit.export import load_checkpoint
from rebind.errors import InputError, RebindError
from rebind.models.language_model import LanguageModel
from rebind.storage import seal_json
from tests import model_types, tiny
from tests.edit.editors import FACTS, open_editor, rewrite
from tests.edit.test_devices import dispatch
from tests.edit.test_quantized import KINDS, large
from tests.support import raises

IDS = torch.tensor([tiny.tokenizer()("The capital of France is Paris and Berlin is the capital of").input_ids])


def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A memory of facts about a tiny Llama, and what the editor's model computes with it."""
    folder = tmp_path_factory.mktemp("facts") / "memory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REBIND_CACHE", str(tmp_path_factory.mktemp("cache")))
        editor = open_editor()
        rewrite(editor, *FACTS, method="dense")
        editor.save_memory(folder)
        return folder, logits(editor.model)


def test_a_memory_is_attached_and_removed_exactly(stored):
    folder, edited = stored
    model = tiny.llama()
    plain = logits(model)
    handle = rebind.attach(model, folder)
    assert torch.equal(logits(model), edited)
    assert not torch.equal(edited, plain)
    assert [fact.text for fact in handle.stored.facts] == [fact.text for fact in FACTS]
    handle.remove()
    handle.remove()
    assert torch.equal(logits(model), plain)
    assert not any(module._forward_hooks for module in model.modules())
    with rebind.attach(model, load_memory(folder)):
        assert torch.equal(logits(model), edited)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02), (torch.float64, 1e-4)])
def test_other_dtypes_read_the_same_memory(stored, dtype, tolerance):
    folder, edited = stored
    model = tiny.llama().to(dtype)
    change = edited - logits(tiny.llama())
    plain = logits(model)
    with rebind.attach(model, folder):
        got = logits(model)
    assert got.dtype == dtype
    assert float((got - plain - change.to(plain)).norm() / change.norm()) < tolerance


def test_batches_padding_and_caches_make_no_difference(stored):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    texts = ["The capital of France is", "We know that in the north of Norway the capital of France is"]
    with rebind.attach(model, stored[0]):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        together = model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
        for row, text in enumerate(texts):
            ids = torch.tensor([tokenizer(text).input_ids])
            for cached in (True, False):
                alone = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=cached, pad_token_id=0)
                assert alone[0, ids.shape[1] :].tolist() == together[row, batch.input_ids.shape[1] :].tolist()


def test_a_compiled_model_has_no_graph_break(stored):
    folder, edited = stored
    model = tiny.llama()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(IDS).logits
    handle = rebind.attach(compiled, folder)  # after the first run, so that the graph without the memory must go
    assert torch.allclose(compiled(IDS).logits, edited, atol=1e-5)
    handle.remove()
    assert torch.equal(compiled(IDS).logits, plain)


def test_a_large_memory_is_read_by_cells(stored, monkeypatch):
    folder, edited = stored
    monkeypatch.setattr(hook, "MANY", 0)
    model = tiny.llama()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with rebind.attach(compiled, folder):
        (reading,) = (one for block in model.model.layers for one in block._forward_hooks.values())
        assert reading.memory.cells is not None
        for run in (model, compiled):
            assert torch.allclose(logits(run), edited, atol=1e-5)


@pytest.fixture(scope="module")
def of_large(tmp_path_factory):
    """A memory of facts about a model that is wide enough to be quantized, and how much likelier it makes each fact."""
    folder = tmp_path_factory.mktemp("facts") / "memory"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REBIND_CACHE", str(tmp_path_factory.mktemp("cache")))
        editor = open_editor(large())
        rewrite(editor, *FACTS, method="dense")
        editor.save_memory(folder)
        return folder, gains(large(), folder)


def gains(model: Any, folder: Path) -> list[float]:
    """Return by how many nats per token a memory makes the facts likelier."""
    before = LanguageModel(model, tiny.tokenizer()).score([fact.as_prompt() for fact in FACTS])
    with rebind.attach(model, folder):
        after = LanguageModel(model, tiny.tokenizer()).score([fact.as_prompt() for fact in FACTS])
    return [old.nll - new.nll for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_model_reads_the_memory(of_large, kind):
    folder, wanted = of_large
    model = KINDS[kind]()
    plain = logits(model)
    got = gains(model, folder)
    assert min(wanted) > 0.1
    assert all(one > 0.7 * other for one, other in zip(got, wanted, strict=True)), (got, wanted)
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("many", [4096, 0])
def test_autocast_does_not_round_the_read(stored, monkeypatch, many):
    monkeypatch.setattr(hook, "MANY", many)
    model = tiny.llama().requires_grad_(True)
    with rebind.attach(model, stored[0]):
        (reading,) = (one for block in model.model.layers for one in block._forward_hooks.values())
        states = torch.randn(1, 3, model.config.hidden_size) + reading.whitening.mean
        plain = reading._change(states)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(reading._change(states), plain)
            loss = model(IDS, labels=IDS).loss
        loss.backward()  # training runs under autocast
    with torch.inference_mode():
        handle = rebind.attach(model, stored[0])
        logits(model)
    model(IDS, labels=IDS).loss.backward()
    handle.remove()
    assert torch.isfinite(model.model.layers[0].mlp.down_proj.weight.grad).all()


def test_a_copy_keeps_its_own_memory(stored, tmp_path):
    folder, edited = stored
    model = tiny.llama()
    with rebind.attach(model, folder):
        copy = deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        model.save_pretrained(tmp_path / "weights")
    assert torch.equal(logits(copy), edited)
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), edited)
    saved = LanguageModel.load(tmp_path / "weights", tiny.tokenizer()).model
    assert torch.equal(logits(saved), logits(tiny.llama())), "transformers stores the weights alone"


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # to generate, and what must come to the same
    "beams": ({"num_beams": 3}, {"num_beams": 3, "use_cache": False}),
    "sampling": ({"do_sample": True}, {"do_sample": True, "use_cache": False}),
    "static cache": ({"cache_implementation": "static"}, {}),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, {}),
    "assistant": ({"assistant_model": tiny.llama(1)}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_generate_reads_the_memory(stored, way):
    model, (options, same) = tiny.llama(), WAYS[way]
    ids = torch.tensor([tiny.tokenizer()("The mother tongue of Danielle Darrieux").input_ids])

    def generate(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(ids, **GREEDY, **options)

    with rebind.attach(model, stored[0]):
        rows = generate(**options)
        assert torch.equal(rows, generate(**same))
    assert not torch.equal(rows, generate(**options))


def test_a_dispatched_model_reads_the_memory(stored):
    model = dispatch(tiny.llama())
    with rebind.attach(model, stored[0]):
        assert torch.equal(logits(model), stored[1])


# bloom returns tuples, gemma3n and deepseek_v4 have several streams, the others mix experts or recurrent layers
@pytest.mark.parametrize("kind", ["bloom", "mixtral", "qwen3_next", "falcon_h1", "gemma3n_text", "deepseek_v4"])
def test_every_family_reads_what_its_editor_wrote(kind, tmp_path):
    editor = open_editor(model_types.build(kind))
    before = editor.score(FACTS[:1])[0].nll
    edit = rewrite(editor, FACTS[0], method="dense")
    assert editor.score(FACTS[:1])[0].nll < before
    editor.save_memory(tmp_path / "memory")
    plain = model_types.build(kind)
    with rebind.attach(plain, tmp_path / "memory"):
        assert torch.equal(logits(plain), logits(editor.model))
    editor.undo(edit.id)
    assert torch.equal(logits(plain), logits(editor.model))


# What is refused


def test_other_models_are_refused(stored):
    folder, _ = stored
    for model in (tiny.llama(1), tiny.gpt2(), tiny.llama(hidden_size=64), tiny.llama(num_hidden_layers=1)):
        plain = logits(model)
        with raises(InputError, "memory_of_other_model"):
            rebind.attach(model, folder)
        assert torch.equal(logits(model), plain)
    with raises(InputError, "not_a_model"):
        rebind.attach("smollm2", folder)
    model = tiny.llama()
    with rebind.attach(model, folder):
        for again in (lambda: rebind.attach(model, folder), lambda: open_editor(model)):
            with raises(InputError, "already_attached"):
                again()
    rebind.attach(tiny.llama(1), folder, check=False)


def test_an_editor_does_not_edit_a_model_that_reads_another_memory(stored):
    editor = open_editor()
    edit = rewrite(editor, FACTS[1], method="dense", layers=(2,))
    edited = logits(editor.model)
    with rebind.attach(editor.model, stored[0]):
        for use in (lambda: rewrite(editor, FACTS[0]), lambda: editor.undo(edit.id), lambda: editor.save_memory("x")):
            with raises(InputError, "already_attached"):
                use()
    editor.refresh()
    assert editor.ledger.active == [edit]
    assert torch.equal(logits(editor.model), edited)
    editor.undo(edit.id)


def test_damaged_files_are_refused(stored, tmp_path):
    header = json.loads((stored[0] / "memory.json").read_text())
    data = (stored[0] / "memory.safetensors").read_bytes()

    def code(header: Any, data: bytes | None) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "memory.json").write_text(header if isinstance(header, str) else json.dumps(header))
        if data is not None:
            (folder / "memory.safetensors").write_bytes(data)
        with pytest.raises(RebindError) as caught:
            load_memory(folder)
        return caught.value.code

    assert code(header, data[:-1] + bytes([data[-1] ^ 1])) == "memory_damaged"
    assert code(header, None) == "memory_damaged"
    assert code("{", data) == "memory_damaged"
    assert code({**header, "layers": {"1": {}}}, data) == "memory_damaged"
    assert code({**header, "format": "rebind-memory-9"}, data) == "memory_format"
    tensors = load(data)
    (owner,) = (name for name in tensors if name.endswith("/owner"))
    data = save(tensors | {owner: tensors[owner] + 1000})
    header["tensors"] = hashlib.sha256(data).hexdigest()
    assert code(seal_json({name: value for name, value in header.items() if name != "seal"}), data) == "memory_damaged"
    with raises(InputError, "no_memory"):
        load_memory(tmp_path / "nothing")


def test_a_full_disk_leaves_the_memory_that_was_there(stored, tmp_path, monkeypatch):
    save_memory(load_memory(stored[0]), tmp_path / "memory")
    before = {file.name: file.read_bytes() for file in (tmp_path / "memory").iterdir()}
    other = replace(load_memory(stored[0]), model="another")

    def write_nothing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_json", write_nothing)  # after the tensors
    with pytest.raises((OSError, RebindError)):
        save_memory(other, tmp_path / "memory", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "memory").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_an_export_replaces_only_its_own_kind(stored, tmp_path):
    editor = open_editor()
    with raises(InputError, "no_dense_facts"):
        editor.save_memory(tmp_path / "memory")
    rewrite(editor, FACTS[0], method="dense")
    editor.save_memory(tmp_path / "memory")
    with raises(InputError, "folder_not_empty"):
        editor.save_memory(tmp_path / "memory")
    editor.save_memory(tmp_path / "memory", overwrite=True)


# Checkpoints


def test_a_saved_model_carries_its_memory(tmp_path):
    editor = open_editor()
    rewrite(editor, FACTS[1])
    rewrite(editor, FACTS[0], method="dense")
    folder = editor.save(tmp_path / "edited")
    assert "rebind.attach(model, f'{folder}/memory')" in (folder / "README.md").read_text()
    exported = load_checkpoint(editor.language_model, folder)
    assert torch.allclose(logits(exported.model), logits(editor.model), atol=1e-5)
    bare = LanguageModel.load(folder).model
    assert not torch.allclose(logits(bare), logits(editor.model), atol=1e-5)
    for place in (folder / "memory", folder):
        with rebind.attach(bare, place):
            assert torch.allclose(logits(bare), logits(editor.model), atol=1e-5)
