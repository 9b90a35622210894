"""`rebind ledger`: what it finds, switches, compares, exports and replays."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rebind.cli.commands import ledger as ledger_command
from rebind.cli.options import LedgerOptions
from rebind.cli.session import find_ledger
from rebind.edit import DEFAULT_METHOD, export
from rebind.edit.editor import Editor
from rebind.edit.export.adapter import VLLM_RANKS
from rebind.edit.moments import OwnSamples, Texts
from rebind.edit.targets import TargetSettings
from rebind.errors import InputError
from rebind.storage import ledgers_dir
from tests import tiny
from tests.support import raises

from .conftest import FACT, FAST, QUESTION


def active(rebind, model) -> list[str]:
    return rebind("ledger", "list", "--model", model, "--quiet").out.split()


# Which ledger


def test_a_default_ledger_is_found_by_the_models_name_and_fingerprint(rebind, model, edited):
    folder = Path(edited["ledger"])
    assert folder.parent == ledgers_dir()
    assert folder.name == f"tiny-{edited['fingerprint'][:8]}"
    assert find_ledger(LedgerOptions(model)) == folder


def test_two_models_of_one_name_are_not_mixed_up(rebind, fails, model, edited, tmp_path):
    other = tmp_path / "other" / "tiny"
    tiny.llama(seed=1, num_hidden_layers=2, max_position_embeddings=128).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    shown = rebind("edit", *FACT, "--model", other, *FAST)
    error = fails("ledger", "list", "--model", model)
    assert error.code == "several_ledgers"
    assert "--ledger" in error.advice
    (undo,) = [line for line in shown.out.splitlines() if line.startswith("undo: ")]
    assert " --ledger " in undo
    assert rebind("ask", QUESTION, "--model", model, json=True).document["ledger"] == edited["ledger"]
    (ledgers_dir() / "tiny-chat-00000000").mkdir()
    (ledgers_dir() / "tiny-chat-00000000" / "ledger.json").write_text("{}")
    assert find_ledger(LedgerOptions("tiny-chat")).name == "tiny-chat-00000000"
    with raises(InputError, "no_ledger"):
        find_ledger(LedgerOptions("smollm2"))


@pytest.mark.parametrize("place", ["a file", "a file/inside", "locked", "locked/inside"])
def test_a_ledger_that_cannot_be_created_is_refused_before_the_model_is_loaded(fails, tmp_path, monkeypatch, place):
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "locked").mkdir()
    original = Path.mkdir

    def mkdir(path, *arguments, **options):
        if path.parent == tmp_path / "locked":
            raise PermissionError(errno.EACCES, "Permission denied")  # a mode would not stop the superuser
        original(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    expected = ("file_in_the_way", 2) if "file" in place else ("no_write_access", 3)
    assert fails("edit", *FACT, "--ledger", tmp_path / place, code=expected[1]).code == expected[0]
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / place))
    assert fails("edit", *FACT, code=expected[1]).code == expected[0]


def remember(model, folder, **options) -> tuple[str, ...]:
    """Write an edit that can only be applied with the moments it was solved with."""
    editor = Editor(model, ledger=folder, guard=None, **options)
    editor.rewrite(*FACT, method="alphaedit", targets=TargetSettings(steps=2))
    return ("--model", model, "--ledger", str(folder))


def test_an_edit_with_another_devices_samples_opens(rebind, fails, model, tmp_path):
    place = remember(model, tmp_path / "ledger", corpus=OwnSamples(0, rows=16), moment_tokens=300)
    for words in (("ask", QUESTION), ("lens", QUESTION), ("trace", FACT[0], "--kind", "mlp", "--draws", "1")):
        assert rebind(*words, *place, json=True).document["active"] == ["e0001"]
    search = ("--steps", "2", "--force")
    added = rebind("edit", "I saw {Italy}", "Paris", *place, "--method", "recursive", *search, json=True).document
    assert added["settings"]["moments"] == {"corpus": "own-samples-0-16", "tokens": 300}
    assert fails("ask", QUESTION, *place, "--moment-tokens", "301").code == "other_moments"


@pytest.mark.parametrize("words", [("lens", QUESTION), ("trace", FACT[0], "--kind", "mlp", "--draws", "1")])
def test_commands_take_the_corpus_of_an_edit(rebind, fails, model, tmp_path, words):
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 40)
    place = remember(model, tmp_path / "ledger", corpus=Texts.from_file(text), moment_tokens=128)
    assert fails(*words, *place).code == "other_moments"
    assert rebind(*words, *place, "--corpus", text, "--moment-tokens", "128", json=True).document["active"] == ["e0001"]


# List, show, undo, redo, diff


@pytest.mark.parametrize("columns", [80, 60])
def test_a_list_has_a_line_per_edit(rebind, model, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    rebind("edit", *FACT, "--model", model, *FAST)
    rebind("edit", "I {Italy}", "Paris", "--model", model, *FAST)
    rebind("ledger", "undo", "e0001", "--model", model)
    shown = rebind("ledger", "list", "--model", model).out
    rows = [line for line in shown.splitlines() if re.match(r" e000\d +(active|undone), forced ", line)]
    assert len(rows) == 2
    assert all(re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d  ", row) for row in rows) == (columns == 80)
    assert max(map(len, shown.splitlines())) <= columns
    listed = rebind("ledger", "list", "--model", model, json=True).document["edits"]
    assert [(row["id"], row["active"]) for row in listed] == [("e0001", False), ("e0002", True)]


def test_show_has_facts_scores_and_settings(rebind, model, edited):
    shown = rebind("ledger", "show", "e0001", "--model", model, json=True).document
    assert shown["settings"]["targets"]["steps"] == 3
    assert shown["settings"]["moments"]["tokens"] == 256
    assert shown["scores"]["drift"]["kl"] > 0
    people = rebind("ledger", "show", "e000", "--model", model).out
    for expected in ("e0001, active", f"{DEFAULT_METHOD} (forced)", "said", "start 0%", "drift", "versions", "steps 3"):
        assert expected in people
    assert rebind("ledger", "show", "e0001", "--model", model, "--quiet").out == "The answer is France → Rome\n"


def test_several_edits_are_switched_together_or_not_at_all(rebind, fails, model, monkeypatch):
    for subject in ("France", "Italy", "Spain"):
        rebind("edit", f"The answer is {{{subject}}}", "Rome", "--model", model, *FAST)
    assert fails("ledger", "undo", "e0001", "e0009", "--model", model).code == "unknown_edit"
    assert active(rebind, model) == ["e0001", "e0002", "e0003"]
    rebind("ledger", "undo", "e0001", "--model", model)
    assert fails("ledger", "undo", "e0002", "e0001", "--model", model).code == "already_undone"
    assert active(rebind, model) == ["e0002", "e0003"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        assert fails("ledger", "undo", "e0002", "e0003", "--model", model, code=3).code == "disk_full"
    assert active(rebind, model) == ["e0002", "e0003"]


def test_redo_does_not_contradict_an_active_edit(rebind, fails, model):
    place = ("--model", model)
    rebind("edit", *FACT, *place, *FAST)
    rebind("ledger", "undo", "e0001", *place)
    rebind("edit", FACT[0], "Paris", *place, *FAST)
    error = fails("ledger", "redo", "e0001", *place)
    assert error.code == "conflicting_edit"
    assert "--force" in error.advice
    rebind("ledger", "undo", "e0002", *place)
    assert fails("ledger", "redo", "e0001", "e0002", *place).code == "conflicting_edit"
    assert active(rebind, model) == []
    rebind("ledger", "redo", "e0001", *place)
    assert rebind("ledger", "redo", "e0002", "--force", *place).err.startswith("warning: ")
    assert active(rebind, model) == ["e0001", "e0002"]


def test_diff_compares_active_edits(rebind, model, edited, tmp_path):
    copy = shutil.copytree(edited["ledger"], tmp_path / "copy")
    rebind("edit", "I saw {Italy}", "Paris", "--model", model, *FAST)
    found = rebind("ledger", "diff", copy, "--model", model, json=True).document
    assert (found["only_here"], found["only_there"], found["both"]) == (["e0002"], [], ["e0001"])
    assert rebind("ledger", "diff", copy, "--model", model, "--quiet").out == "-e0002\n"
    assert "I saw Italy → Paris" in rebind("ledger", "diff", copy, "--model", model).out


# Compact and verify


def test_old_edits_are_compacted(rebind, fails, model, monkeypatch):
    place = ("--model", model)
    for subject in ("France", "Italy", "Spain"):
        rebind("edit", f"The answer is {{{subject}}}", "Rome", *place, *FAST)
    rebind("ledger", "undo", "e0002", *place)
    before = rebind("ask", QUESTION, *place, json=True).document
    assert fails("ledger", "compact", "--keep-last", "1", *place).code == "cannot_ask"
    assert fails("ledger", "compact", "--yes", *place).code == "compact_range"
    monkeypatch.setattr(ledger_command, "is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    asked = rebind("ledger", "compact", "--keep-last", "1", *place).out
    assert "1 active edit (e0001) will no longer be undoable" in asked
    assert "1 undone edit will be gone" in asked
    assert active(rebind, model) == ["e0001", "e0003"]
    done = rebind("ledger", "compact", "--keep-last", "1", "--yes", *place, json=True).document
    assert (done["sealed"], done["dropped"]) == (["e0001"], ["e0002"])
    assert done["bytes_after"] < done["bytes_before"]
    after = rebind("ask", QUESTION, *place, json=True).document
    assert after["answers"] == before["answers"]
    assert fails("ledger", "undo", "e0001", *place).code == "sealed_edit"
    assert "e0001, compacted" in rebind("ledger", "show", "e0001", *place).out
    listed = rebind("ledger", "list", *place, json=True).document["edits"]
    assert [(row["id"], row["compacted"]) for row in listed] == [("e0001", True), ("e0003", False)]
    (last,) = rebind("ledger", "list", "--last", "1", *place, json=True).document["edits"]
    assert last["id"] == "e0003"
    for words in ((), ("--full",)):
        assert rebind("ledger", "verify", *words, *place, json=True).document["intact"]
    assert rebind("ledger", "undo", "e0003", *place, json=True).document["active"] == ["e0001"]


def test_a_ledger_whose_creation_was_cut_short_can_be_used(rebind, fails, model, tmp_path):
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "log.jsonl").write_bytes(b"")
    (folder / f".rebind-{'0' * 12}.tmp").write_bytes(b"half")
    place = ("--model", model, "--ledger", folder)
    assert fails("ledger", "list", *place).code == "no_ledger"
    rebind("edit", *FACT, *place, *FAST)
    assert rebind("ledger", "list", *place, "--quiet").out == "e0001\n"


# Export and replay


def test_edits_are_exported_as_adapters_delta_and_checkpoint(rebind, fails, model, edited_weights, tmp_path):
    adapter, file, delta, whole = (tmp_path / name for name in ("adapter", "a.gguf", "delta.safetensors", "whole"))
    words = ("ledger", "export", "--model", model, "--peft", adapter, "--gguf", file, "--delta", delta)
    document = rebind(*words, "--checkpoint", whole, json=True).document
    for name, path in (("peft", adapter), ("gguf", file)):
        assert document[name]["path"] == str(path)
        assert document[name]["rank"] in VLLM_RANKS
        assert max(document[name]["errors"].values()) < 1e-6
    assert document["checkpoint"]["dtype"] == "float32"
    said = int(edited_weights["facts"][0]["after"]["exact"])
    for name in ("peft", "gguf", "checkpoint"):
        assert document[name]["check"] == {"facts": 1, "said": said, "said_in_editor": said}
    assert (adapter / "adapter_model.safetensors").exists()
    assert delta.exists()
    replayed = tmp_path / "replayed"
    replay = ("ledger", "replay", "--model", model, "--out", replayed)
    again = rebind(*replay, json=True).document
    assert again["facts"][0]["probability"] == pytest.approx(edited_weights["facts"][0]["after"]["probability"])
    base, *saved = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (model, whole, replayed))
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in base)
    changed = {name for name in base if not torch.equal(base[name], saved[0][name])}
    assert changed == {f"{site}.weight" for site in document["peft"]["errors"]}
    assert fails(*replay).code == "folder_not_empty"
    rebind(*replay, "--overwrite")
    rebind("ledger", "undo", "e0001", "--model", model)
    assert fails(*words, "--overwrite").code == "no_active_edits"


def test_an_export_says_how_exact_it_is_and_asks_the_facts_again(rebind, fails, model, edited_weights, tmp_path):
    words = ("ledger", "export", "--model", model, "--peft", tmp_path / "adapter", "--overwrite")
    people = " ".join(rebind(*words).out.split())
    assert re.search(r"✓ adapter .*: rank \d+, exact to float32", people)
    assert re.search(r"✓ asked again: [01] of 1 facts said", people)
    assert "1 edit, " in people
    assert "asked again" not in rebind(*words, "--no-check").out
    both = ("--gguf", tmp_path / "new.gguf", "--memory", tmp_path / "memory")
    assert fails("ledger", "export", "--model", model, *both).code == "no_dense_facts"
    assert not (tmp_path / "new.gguf").exists()
    document = rebind(*words, "--rank", "3", "--no-check", json=True).document
    assert (document["peft"]["rank"], document["peft"]["check"]) == (3, None)
    assert "vLLM pads this rank" in document["peft"]["description"]
    narrow = ("ledger", "export", "--model", model, "--checkpoint", tmp_path / "out", "--checkpoint-dtype", "bfloat16")
    assert rebind(*narrow, "--no-check", json=True).document["checkpoint"]["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_an_export_that_lost_facts_fails(rebind, model, edited_weights, tmp_path, monkeypatch):
    counts = iter([0, 1])  # in the export, in the editor
    monkeypatch.setattr(export, "count_said", lambda *_: next(counts))
    shown = rebind("ledger", "export", "--model", model, "--peft", tmp_path / "adapter", code=1).out
    assert "✗ asked again: 0 of 1 facts said, in the editor 1" in shown
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_an_export_checks_every_place_before_the_model_is_loaded(
    rebind, fails, model, edited_weights, tmp_path, monkeypatch
):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    rebind("ledger", "export", "--model", model, "--peft", tmp_path / "adapter")
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    new = tmp_path / "new"
    for words, code in (
        (("--peft", new, "--checkpoint", tmp_path / "other", "--overwrite"), "not_an_export"),
        (("--peft", new, "--checkpoint", model, "--overwrite"), "not_an_export"),
        (("--peft", tmp_path / "adapter", "--checkpoint", new), "folder_not_empty"),
        (("--checkpoint", tmp_path / "adapter", "--overwrite"), "not_an_export"),
        (("--peft", new, "--delta", f"{__file__}/delta.safetensors"), "file_in_the_way"),
        (("--peft", new, "--gguf", f"{__file__}/adapter.gguf"), "file_in_the_way"),
        (("--peft", new, "--checkpoint-dtype", "int4"), "unknown_dtype"),
        (("--checkpoint", new, "--rank", "8"), "nothing_to_export"),
    ):
        assert fails("ledger", "export", "--model", model, *words).code == code
        assert not new.exists()


@pytest.mark.parametrize("method", ["memit", "dense"])
def test_a_replay_answers_as_the_edit_did(rebind, chat_model, method):
    place = ("--model", chat_model)
    edit = rebind("edit", *FACT, *place, *FAST, "--method", method, json=True).document
    (fact,) = rebind("ledger", "replay", *place, "--out", "out", json=True).document["facts"]
    assert fact["probability"] == pytest.approx(edit["facts"][0]["after"]["probability"], rel=1e-3)


def test_facts_in_the_dense_memory_are_listed_undone_and_exported(rebind, fails, model, tmp_path):
    words = ("--model", model)
    report = rebind("edit", *FACT, *words, *FAST, "--method", "dense", json=True).document
    assert report["memory"]["rows"] > 0
    assert "of the tokens of other text" in rebind("ledger", "show", "e0001", *words).out
    assert "dense" in rebind("ledger", "list", *words).out
    saved = rebind("ledger", "export", *words, "--memory", tmp_path / "memory", json=True).document["memory"]
    assert saved["rows"] == report["memory"]["rows"]
    assert saved["check"]["said"] == saved["check"]["said_in_editor"]
    whole = tmp_path / "whole"
    for option in ("--delta", "--gguf", "--peft"):
        error = fails("ledger", "export", *words, "--checkpoint", whole, option, tmp_path / "weights")
        assert (error.code, whole.exists()) == ("only_dense_facts", False)
        assert "rebind consolidate" in error.advice
        assert "--memory" in error.advice
    shown = rebind("ledger", "export", *words, "--checkpoint", whole).out
    assert str(whole / "memory") in rebind("ask", QUESTION, "--model", whole).err, "its facts are not read"
    assert not rebind("ask", QUESTION, *words).err
    assert f"rebind.attach(model, {str(whole / 'memory')!r})" in shown
    card = (whole / "README.md").read_text()
    assert "lists the facts" in card
    assert "reveals the subjects" not in card, "no weight has changed"
    rebind("ledger", "verify", *words)
    rebind("ledger", "undo", "e0001", *words)
    rebind("ledger", "redo", "e0001", *words)


def test_a_consolidation_reports_what_moved_and_what_stayed(rebind, fails, model):
    words = ("--model", model)
    rebind("edit", *FACT, *words, *FAST, "--method", "dense")
    report = rebind("consolidate", *words, "--moment-tokens", "256", json=True).document
    assert len(report["moved"]) + len(report["stayed"]) == 1
    assert (report["id"] is None) == (not report["moved"])
    shown = rebind("consolidate", *words, "--moment-tokens", "256", "--budget", "1").out
    assert "rows left" in shown
    assert fails("consolidate", *words, "--method", "dense").code == "dense_consolidation"


def test_control_characters_of_a_fact_do_not_reach_the_terminal(rebind, model, tmp_path):
    fact = ("The answer is {\x1b[2JFrance}", "\u202eRome\x07")
    words = ("--model", model, *FAST, "--ledger", tmp_path / "ledger")
    printed = [rebind("edit", *fact, *words)]
    printed += [rebind("ledger", *one, "--ledger", tmp_path / "ledger") for one in (("list",), ("show", "e0001"))]
    for one in printed:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", one.out + one.err)
        assert "\\x1b[2J" in one.out
    document = rebind("ledger", "show", "e0001", "--ledger", tmp_path / "ledger", json=True).document
    assert document["facts"][0]["subject"] == "\x1b[2JFrance"
