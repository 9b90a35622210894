"""What goes wrong around an editor: readers, interrupts, ledgers that vanish, families that cannot be run in pieces."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rebind.edit.editor import Editor
from rebind.edit.ledger import fold as weights_module
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.moments.collect import config_digest
from rebind.errors import InputError, LedgerError
from rebind.models.sites import find_sites
from rebind.models.trunk import Tokens, Trunk
from tests import tiny
from tests.edit.test_editor import FACTS, open_editor, rewrite, two_contexts  # noqa: F401
from tests.edit.writes import new_edit
from tests.families import WIDE_HEADS, Family, build

# Ledgers


def test_a_reader_beside_an_append_takes_nothing_from_it(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger", "f" * 64)
    problems: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                _ = ledger.active, ledger.edits
        except BaseException as problem:
            problems.append(problem)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for number in range(30):
            ledger.append(new_edit(number))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not problems
    assert len(ledger.edits) == 30
    assert ledger.verify() == []


def test_a_ledger_that_vanishes_leaves_no_edit_in_the_weights(tmp_path, monkeypatch):
    editor = open_editor(ledger=tmp_path / "ledger")
    base, append = tiny.weights(editor.model), Ledger.append

    def vanish(ledger: Ledger, edit: Any) -> Any:
        shutil.rmtree(tmp_path / "ledger")
        return append(ledger, edit)

    monkeypatch.setattr(Ledger, "append", vanish)
    with pytest.raises(LedgerError):
        rewrite(editor, FACTS[0], layers=[1])
    assert tiny.weights(editor.model) == base


def test_a_ledger_that_cannot_be_folded_is_not_gone_on_with(tmp_path):
    editor, other = open_editor(ledger=tmp_path / "a"), open_editor(ledger=tmp_path / "b")
    rewrite(other, FACTS[0], layers=[1])
    file = tmp_path / "b" / "edits" / "e0001.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    before = tiny.weights(editor.model)
    with pytest.raises(LedgerError, match="altered"):
        editor.use(Ledger.open(tmp_path / "b"))
    assert editor.ledger.path == tmp_path / "a"
    assert tiny.weights(editor.model) == before
    rewrite(editor, FACTS[1], layers=[1])


def test_what_is_shipped_is_what_the_ledger_says_now(tmp_path):
    """Also of edits that another editor wrote since."""
    ours, theirs = (open_editor(ledger=tmp_path / "ledger") for _ in range(2))
    rewrite(theirs, FACTS[0], layers=[1])
    folder = ours.save(tmp_path / "out")
    assert "Rome" in (folder / "README.md").read_text()
    name = theirs.ledger.active[0].sites[0]
    assert torch.equal(
        load_file(folder / "model.safetensors")[f"{name}.weight"], theirs.model.get_parameter(f"{name}.weight")
    )
    again = open_editor(ledger=tmp_path / "ledger")
    rewrite(theirs, FACTS[1], layers=[1])
    assert next(iter(again.changes().values())).rank == 2


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_between_sites_leaves_all_of_them_written(monkeypatch, at):
    editor = open_editor()
    base = tiny.weights(editor.model)
    edit = rewrite(editor, FACTS[0], layers=[0, 1])
    own, calls = weights_module.write_memory, []

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        own(*args)

    monkeypatch.setattr(weights_module, "write_memory", interrupted)
    with pytest.raises(KeyboardInterrupt):
        editor.undo(edit.id)
    assert not editor.ledger.active
    assert tiny.weights(editor.model) == base


@pytest.mark.parametrize("at", ["folded", "_write"])
def test_an_interrupt_after_the_append_leaves_the_edit_in_place(monkeypatch, at):
    """Before anything is written back, or while it is."""
    editor, twin = open_editor(), open_editor()
    rewrite(twin, FACTS[0], layers=[1])
    append, own = Ledger.append, getattr(weights_module.Weights, at)
    due: list[int] = []

    def appended(ledger: Ledger, edit: Any) -> Any:
        due.append(1)
        return append(ledger, edit)

    def interrupted(*args: Any) -> Any:
        if due:
            due.clear()
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr(Ledger, "append", appended)
    monkeypatch.setattr(weights_module.Weights, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rewrite(editor, FACTS[0], layers=[1])
    assert len(editor.ledger.active) == 1
    assert tiny.weights(editor.model) == tiny.weights(twin.model)


# Moments


def test_moments_are_of_a_config_too(tmp_path):
    """The same weights with other positions or another eps have other keys."""
    changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rms_norm_eps": 1.0}
    plain, other = open_editor(), open_editor(tiny.llama(**changed))
    assert plain.fingerprint == other.fingerprint
    site = plain.sites[0].name
    assert plain.recipe().path(site) != other.recipe().path(site)
    assert plain.recipe().path(site) == open_editor().recipe().path(site)


def test_a_config_is_the_same_wherever_and_however_a_model_is_loaded(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    again.config.pad_token_id = 3
    assert config_digest(again.config) == config_digest(model.config) == config_digest(tiny.llama().config)


def test_windows_of_a_corpus_fit_the_context():
    editor = open_editor(tiny.gpt2(n_positions=40))
    rewrite(editor, FACTS[0], layers=[1])


# Families


def family(config: str, **options: Any) -> Any:
    told = {**WIDE_HEADS, "vocab_size": len(tiny.tokenizer()), "max_position_embeddings": 128}
    return build(Family(config, "", {**told, "bos_token_id": 0, "eos_token_id": 0, **options}))


def test_recurrent_layers_are_refused():
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    model = family("Lfm2Config", num_hidden_layers=4, layer_types=kinds, block_auto_adjust_ff_dim=False)
    with pytest.raises(InputError, match="Lfm2ForCausalLM has recurrent layers, .* expected attention in all of them"):
        find_sites(model)


def test_models_without_a_cache_are_refused():
    model = build(Family("OpenAIGPTConfig", "", {"vocab_size": 380, "n_embd": 32, "n_layer": 3, "n_head": 4}))
    editor = Editor(model, tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=400, guard=None)
    with pytest.raises(InputError, match="leaves no cache of keys and values"):
        rewrite(editor, FACTS[0], layers=[1])


def test_blocks_whose_keys_others_read_are_not_skipped():
    kinds = ["sliding_attention", "full_attention"] * 4
    shared = {"layer_types": kinds, "num_kv_shared_layers": 4, "sliding_window": 16, "global_head_dim": 12}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tiny.tokenizer())}
    model = family("Gemma4TextConfig", num_hidden_layers=8, **shared, **per_layer)
    trunk = Trunk(model, list(model.model.layers))
    tokens = Tokens.left_padded([[5, 6, 7, 8]], trunk.device)
    where = torch.tensor([[0, 3]])
    expected = model(tokens.ids).logits[0, 3]
    found = trunk.logits(tokens, where, start=(1, trunk.after(1, tokens)))[0]
    assert torch.allclose(found, expected.to(found), atol=1e-4)
    with pytest.raises(InputError, match="blocks from 4 on read keys that block 2 makes.*choose layers below 2"):
        trunk.logits(tokens, where, start=(2, trunk.after(2, tokens)))
