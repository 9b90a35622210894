"""Whose a default ledger is: `rebind ledger` changes none that may be another model's."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
from pathlib import Path

import pytest

from rebind.cli import whose
from rebind.cli.places import ledgers_folder, place_of, stamp_of
from rebind.cli.whose import Kept
from rebind.edit.editor import Editor
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.ledger.log import digest_of
from rebind.errors import LedgerWarning
from tests import tiny
from tests.edit.writes import new_edit

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
QUESTION = "The answer is France"


def saved(folder: Path, seed: int = 0) -> str:
    tiny.llama(seed).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def ours(tmp_path) -> str:
    return saved(tmp_path / "ours" / "model")


@pytest.fixture
def theirs(tmp_path) -> str:
    """Another model in a folder of the same name."""
    return saved(tmp_path / "theirs" / "model", seed=1)


def edit(rebind, model: str, *more: str) -> Path:
    """The ledger that an edit is in."""
    return Path(rebind("edit", *FACT, "--model", model, *FAST, *more, json=True).document["ledger"])


def active(rebind, folder: Path) -> list[str]:
    return rebind("ledger", "list", "-l", str(folder), "--quiet").out.split()


def as_earlier(folder: Path) -> None:
    """Make a ledger without edits what an earlier version made: its header had no place, dtype or stamp."""
    header = json.loads((folder / "ledger.json").read_bytes())
    old = {name: header[name] for name in ("format", "model", "model_name", "created")}
    (folder / "ledger.json").write_text(json.dumps({**old, "digest": digest_of(old)}))


@pytest.fixture
def earlier(rebind, ours) -> Path:
    """A ledger of `ours` with an edit, made by an earlier version."""
    rebind("edit", *FACT, "--model", ours, "--layers", "77", *FAST, code=2)  # begins one, and writes nothing
    (folder,) = ledgers_folder().iterdir()
    as_earlier(folder)
    assert edit(rebind, ours) == folder
    assert "place" not in json.loads((folder / "ledger.json").read_bytes())
    return folder


def suggested(text: str) -> list[list[str]]:
    """The commands in a message."""
    return [shlex.split(part)[1:] for part in text.split("`") if part.startswith("rebind ledger ")]


@pytest.mark.parametrize("words", [("list",), ("show", "e0001"), ("verify",), ("undo", "e0001"), ("redo", "e0001")])
def test_a_ledger_is_not_another_models_of_the_same_name(rebind, ours, theirs, words, monkeypatch):
    folder = edit(rebind, ours)
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("loads the model"))
    ended = rebind("ledger", *words, "--model", theirs, code=2)
    assert f"no ledger of {theirs} in " in ended.err
    assert f"(of {ours}, float32, 1 active edit, made " in ended.err
    assert suggested(ended.err) == [["ledger", *words, "-m", theirs, "-l", str(folder)]]
    assert active(rebind, folder) == ["e0001"]


def test_each_model_of_one_name_has_the_command_it_was_told(rebind, ours, theirs):
    """Also the one that was edited first, when there was no other."""
    folders = [edit(rebind, model) for model in (ours, theirs)]
    rebind("ledger", "undo", "e0001", "--model", ours)
    assert [active(rebind, folder) for folder in folders] == [[], ["e0001"]]
    rebind("ledger", "undo", "e0001", "--model", theirs)
    assert active(rebind, folders[1]) == []


def test_a_place_is_the_same_however_it_is_written(rebind, ours, tmp_path, monkeypatch):
    edit(rebind, ours)
    (tmp_path / "link").symlink_to(ours)
    monkeypatch.chdir(tmp_path / "ours")
    for model in ("model", "./model/", "../ours/model", str(tmp_path / "link")):
        assert rebind("ledger", "list", "--model", model, "--quiet").out == "e0001\n"


@pytest.mark.parametrize("name", ["model", "renamed"])
def test_a_model_that_was_moved_keeps_its_ledger(rebind, ours, tmp_path, name):
    folder = edit(rebind, ours)
    (tmp_path / "elsewhere").mkdir()
    moved = str(shutil.move(ours, tmp_path / "elsewhere" / name))
    assert rebind("ask", QUESTION, "--model", moved, json=True).document["active"] == ["e0001"]
    out = tmp_path / "change.safetensors"
    assert rebind("ledger", "export", "--model", moved, "--delta", str(out), json=True).document["edits"] == ["e0001"]
    shown = rebind("edit", "I saw {Italy}", "Paris", "--model", moved, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    rebind(*shlex.split(undo.partition(": rebind ")[2]))
    assert active(rebind, folder) == ["e0001"]
    ended = rebind("ledger", "undo", "e0001", "--model", moved, code=2)
    assert f"no ledger of {moved} in " in ended.err
    rebind(*suggested(ended.err)[0])
    assert active(rebind, folder) == []


def test_a_copy_by_another_name_has_a_ledger_of_its_own(rebind, ours, tmp_path):
    edit(rebind, ours)
    copy = str(shutil.copytree(ours, tmp_path / "copy"))
    asked = rebind("ask", QUESTION, "--model", copy, json=True)
    assert (asked.document["active"], asked.err) == ([], "")


def test_an_earlier_versions_ledger_is_found_and_not_changed(rebind, ours, theirs, earlier):
    for model in (ours, theirs):  # whose it is cannot be known
        listed = rebind("ledger", "list", "--model", model, "--quiet")
        assert listed.out == "e0001\n"
        assert listed.err.startswith(f"warning: an earlier rebind made {earlier}, which does not say where its model")
        assert rebind("ledger", "verify", "--model", model).out.split()[-2:] == ["is", "whole"]
        for verb in ("undo", "redo"):
            refused = rebind("ledger", verb, "e0001", "--model", model, code=2).err
            assert "nothing was changed" in refused
            assert suggested(refused) == [["ledger", verb, "e0001", "-m", model, "-l", str(earlier)]]
    assert active(rebind, earlier) == ["e0001"]
    rebind(*suggested(rebind("ledger", "undo", "e0001", "--model", ours, code=2).err)[0])
    assert active(rebind, earlier) == []


def test_an_edit_to_an_earlier_versions_ledger_says_how_it_is_taken_back(rebind, ours, earlier):
    shown = rebind("edit", "I saw {Italy}", "Paris", "--model", ours, *FAST).out
    undo = next(line for line in shown.splitlines() if line.startswith("take it back: "))
    rebind(*shlex.split(undo.partition(": rebind ")[2]))
    assert active(rebind, earlier) == ["e0001"]


def test_an_earlier_versions_ledger_of_a_renamed_model_is_mentioned(rebind, ours, earlier, tmp_path):
    renamed = str(shutil.move(ours, tmp_path / "renamed"))
    asked = rebind("ask", QUESTION, "--model", renamed, json=True)
    assert asked.document["active"] == []
    assert f"-l {earlier} has its edits" in asked.err
    again = rebind("ask", QUESTION, "--model", renamed, "-l", str(earlier), json=True)
    assert (again.document["active"], again.err) == (["e0001"], "")


def test_an_earlier_versions_ledger_of_a_hub_id_is_known_by_it(rebind, tmp_path):
    """No folder's name has a slash."""
    folder = ledgers_folder() / "some--model-00000000"
    folder.mkdir(parents=True)
    told = {"format": "rebind-ledger-1", "model": "0" * 64, "model_name": "some/model", "created": "2026-01-01T00:00"}
    (folder / "ledger.json").write_text(json.dumps({**told, "digest": digest_of(told)}))
    (folder / "log.jsonl").touch()
    assert rebind("ledger", "list", "--model", "some/model", "--quiet").err == ""
    assert "no edit 'e0001'" in rebind("ledger", "undo", "e0001", "--model", "some/model", code=2).err
    same = str(tmp_path / "some--model")
    saved(Path(same))
    assert f"no ledger of {same} in " in rebind("ledger", "undo", "e0001", "--model", same, code=2).err


def test_of_two_dtypes_each_ledger_is_named(rebind, ours):
    """As is what to type instead of the hint of the first, which was right when it was given."""
    plain, half = edit(rebind, ours), edit(rebind, ours, "--dtype", "bfloat16")
    ended = rebind("ledger", "undo", "e0001", "--model", ours, code=2).err
    for folder, dtype in ((plain, "float32"), (half, "bfloat16")):
        told = f"`rebind ledger undo e0001 -m {ours} -l {folder}` (of {ours}, {dtype}, 1 active edit, made 20"
        assert told in ended
    for words in suggested(ended):
        rebind(*words)
    assert active(rebind, plain) == active(rebind, half) == []
    assert "0 active edits" in rebind("ledger", "list", "--model", ours, code=2).err
    rebind("ledger", "redo", "e0001", "-l", str(half))
    change = str(ledgers_folder() / "change.safetensors")
    half_wanted = ("ledger", "export", "--model", ours, "--dtype", "bfloat16", "--delta", change)
    assert rebind(*half_wanted, json=True).document["edits"] == ["e0001"], "the dtype says which"


def test_a_ledger_in_another_dtype_says_which(rebind, ours):
    half = edit(rebind, ours, "--dtype", "bfloat16")
    for words in (("ask", QUESTION), ("edit", *FACT)):
        ended = rebind(*words, "--model", ours, "-l", str(half), code=2).err
        assert "was made for model in bfloat16 (" in ended
        assert "load it in bfloat16 (--dtype bfloat16)" in ended
    again = rebind("ask", QUESTION, "--model", ours, "-l", str(half), "--dtype", "bfloat16", json=True)
    assert again.document["active"] == ["e0001"]


def test_edits_in_another_dtype_are_mentioned(rebind, ours):
    half = edit(rebind, ours, "--dtype", "bfloat16")
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert asked.document["active"] == []
    assert asked.err == (
        f"warning: the model in float32 has no edits, those in bfloat16 are in {half}: --dtype bfloat16 has them\n"
    )
    rebind("ledger", "undo", "e0001", "-l", str(half))
    assert rebind("ask", QUESTION, "--model", ours, json=True).err == ""


def test_edits_to_weights_that_lay_there_before_are_mentioned(rebind, ours):
    """As when a training goes on."""
    before = edit(rebind, ours)
    saved(Path(ours), seed=2)
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert asked.document["active"] == []
    assert asked.err.startswith(f"warning: the weights of {ours} are not those that {before} was made for")
    assert asked.err.count("\n") == 1
    assert rebind(*suggested(asked.err)[0], "--quiet").out == "e0001\n"
    now = edit(rebind, ours)
    asked = rebind("ask", QUESTION, "--model", ours, json=True)
    assert (asked.document["ledger"], asked.err) == (str(now), "")


def test_an_export_of_what_has_no_ledger_says_so(rebind, ours, theirs, tmp_path):
    out = ("--delta", str(tmp_path / "change.safetensors"))
    assert "no ledger of" in rebind("ledger", "export", "--model", theirs, *out, code=2).err
    edit(rebind, ours)
    assert "as it is loaded here" in rebind("ledger", "export", "--model", theirs, *out, code=2).err


def test_verify_says_what_it_cannot_see(rebind, ours):
    folder = edit(rebind, ours)
    rebind("ledger", "undo", "e0001", "--model", ours)
    lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "log.jsonl").write_bytes(b"".join(lines[:-1]))
    assert rebind("ledger", "verify", "--model", ours, json=True).document["sound"], "the undo is gone, and not missed"
    help = " ".join(rebind("ledger", "verify", "--help").out.split())
    assert "Not seen are undo and redo lines cut off whole at the log's end" in help


# Ledgers of models that are no longer where they lay


@pytest.mark.parametrize("name", ["model", "fresh"])
def test_a_fresh_copy_of_a_removed_model_is_told_whose_edits_it_has(rebind, ours, tmp_path, name):
    base = shutil.copytree(ours, tmp_path / "base")
    folder = edit(rebind, ours)
    shutil.rmtree(ours)
    copy = str(shutil.copytree(base, tmp_path / "copies" / name))
    asked = rebind("ask", QUESTION, "--model", copy, json=True)
    assert asked.document["active"] == ["e0001"]
    told = f"warning: the edits in {folder} were made to the same weights in {ours} and are used for {copy}: "
    assert asked.err.startswith(told)
    assert asked.err.count("\n") == 1
    assert "`rebind edit -l NEW`" in asked.err
    meant = rebind("ask", QUESTION, "--model", copy, "-l", str(folder), json=True)
    assert (meant.document["active"], meant.err) == (["e0001"], "")
    new = tmp_path / "new"
    assert edit(rebind, copy, "-l", str(new)) == new
    assert active(rebind, new) == active(rebind, folder) == ["e0001"]


def kept(name: str, place: str, *, edits: int = 1, model: str = "a" * 64, **more: str) -> Path:
    """A default ledger made by hand."""
    folder = ledgers_folder() / f"{name}-{model[:8]}"
    ledger = Ledger.open(folder, model, model_name=name, place=place, **more)
    for number in range(edits):
        ledger.append(new_edit(number))
    return folder


def test_of_ledgers_of_lost_models_one_with_edits_is_taken(tmp_path):
    kept("a", str(tmp_path / "a"), edits=0)
    full = kept("b", str(tmp_path / "b"))
    with pytest.warns(LedgerWarning, match=f"the edits in {full} were made to the same weights in {tmp_path / 'b'}"):
        assert whose.ledger_of("new", "a" * 64, str(tmp_path / "new")) == full


def test_of_several_ledgers_of_lost_models_none_is_taken(tmp_path):
    kept("a", str(tmp_path / "a"), edits=0)
    full = [kept(name, str(tmp_path / name)) for name in "bc"]
    with pytest.warns(LedgerWarning) as told:
        assert whose.ledger_of("new", "a" * 64, str(tmp_path / "new")) == ledgers_folder() / "new-aaaaaaaa"
    (text,) = [str(one.message) for one in told]
    assert text.startswith("2 ledgers have edits to these weights, and none of them is used")
    for folder, name in zip(full, "bc", strict=True):
        assert f"`-l {folder}` (of {tmp_path / name}, 1 active edit, made " in text


def test_one_begun_for_nothing_is_nobodys(tmp_path, recwarn):
    kept("a", str(tmp_path / "a"), edits=0)
    assert whose.ledger_of("new", "a" * 64, str(tmp_path / "new")) == ledgers_folder() / "new-aaaaaaaa"
    assert not recwarn.list


# Places that other weights were put into


def test_edits_of_other_weights_in_the_same_place_are_not_changed(rebind, ours, tmp_path):
    folder = edit(rebind, ours)
    moved = str(shutil.move(ours, tmp_path / "model-v1"))
    saved(Path(ours), seed=1)  # with files of the same names and sizes
    for verb in ("undo", "redo"):
        refused = rebind("ledger", verb, "e0001", "--model", ours, code=2).err
        assert f"the weights in {ours} are not those that {folder} was made for, and nothing was changed" in refused
        assert suggested(refused) == [["ledger", verb, "e0001", "-m", ours, "-l", str(folder)]]
    assert active(rebind, folder) == ["e0001"]
    assert rebind("ledger", "list", "--model", ours, "--quiet").out == "e0001\n", "it may be looked at"
    asked = rebind("ask", QUESTION, "--model", moved, json=True)
    assert asked.document["active"] == ["e0001"], "the weights have not gone, they were moved"
    assert f"in {ours} and are used for {moved}" in asked.err
    rebind("ledger", "undo", "e0001", "-m", ours, "-l", str(folder))
    assert active(rebind, folder) == []


def test_weights_that_were_put_back_are_the_same(rebind, ours, tmp_path):
    """As are those that a change was exported beside: times and other files have no say."""
    folder = edit(rebind, ours)
    copy = shutil.copytree(ours, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(ours)
    shutil.move(copy, ours)
    rebind("ledger", "export", "--model", ours, "--delta", ours)
    assert (Path(ours) / "delta.safetensors").exists()
    rebind("ledger", "undo", "e0001", "--model", ours)
    assert active(rebind, folder) == []


def test_a_stamp_tells_weights_apart(tmp_path):
    def stamp() -> str:
        return stamp_of(str(tmp_path / "model"))

    assert stamp() == stamp_of("some/model") == stamp_of("smollm2") == ""
    saved(tmp_path / "model")
    seen = {stamp()}
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    seen.add(stamp())
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) * 5 // 16] ^= 1
    weights.write_bytes(data)
    seen.add(stamp())
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    seen.add(stamp())
    shutil.rmtree(tmp_path / "model")
    for step in ("1", "2"):  # as a training goes on
        saved(tmp_path / "model" / "checkpoints" / step)
        seen.add(stamp())
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").write_bytes(b"GGUF")
    seen.add(stamp())
    (tmp_path / "model").write_bytes(b"GGUf")
    seen.add(stamp())
    assert len(seen) == 8


def test_a_place_that_may_not_be_looked_at_has_no_other_weights(ours, monkeypatch):
    ledger = Kept(kept("model", ours, stamp="0" * 64), {"place": ours, "stamp": "0" * 64})
    assert ledger.replaced
    assert ledger.gone
    monkeypatch.setattr(Path, "iterdir", denied)
    assert not ledger.replaced
    assert not ledger.gone


def test_a_ledger_without_a_stamp_is_known_by_its_place_alone(rebind, ours):
    folder = kept("model", ours)
    rebind("ledger", "undo", "e0001", "--model", ours)
    assert active(rebind, folder) == []
    one = Kept(folder, json.loads((folder / "ledger.json").read_bytes()))
    assert not one.gone
    shutil.rmtree(ours)
    assert one.gone


# Places by another name


def test_a_ledger_is_found_by_its_place_whatever_its_name(rebind, tmp_path, recwarn):
    real, link = tmp_path / "real.gguf", tmp_path / "link.gguf"
    real.write_bytes(b"GGUF")
    link.symlink_to(real)
    folder = kept("real", str(real))
    shutil.copytree(folder, folder.with_name(folder.name + ".bak"))  # a copy of a ledger is no rival
    for model in (real, link):
        assert rebind("ledger", "list", "--model", str(model), "--quiet").out == "e0001\n"
        assert whose.ledger_of(model.stem, "a" * 64, place_of(str(model))) == folder
        assert [one.folder for one in whose.ledgers_at(str(model))] == [folder]
        whose.require_some_ledger(str(model))
    assert not recwarn.list
    rebind("ledger", "undo", "e0001", "--model", str(link))
    assert active(rebind, folder) == []


def test_a_ledger_of_a_removed_folder_is_found_by_where_it_was(rebind, ours):
    folder = edit(rebind, ours)
    shutil.rmtree(ours)
    assert rebind("ledger", "list", "--model", ours, "--quiet").out == "e0001\n"
    rebind("ledger", "undo", "e0001", "--model", f"{ours}/../model/")
    assert active(rebind, folder) == []
    ended = rebind("ledger", "list", "--model", f"{ours}-2", code=2).err
    assert f"no ledger of {ours}-2 in " in ended
    assert f"(of {ours}, float32, 0 active edits, made " in ended


# Ledgers that may not be read


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("words", [("ledger", "list"), ("ledger", "undo", "e0001"), ("ask", QUESTION)])
def test_a_folder_of_ledgers_that_may_not_be_read_is_told(rebind, ours, words, monkeypatch):
    edit(rebind, ours)
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    original = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: denied() if path == ledgers_folder() else original(path))
    ended = rebind(*words, "--model", ours, code=3).err
    assert ended.startswith(f"error: cannot read {ledgers_folder()} (Permission denied), expected the folder that")
    assert ended.count("\n") == 1
    assert "REBIND_LEDGERS" in ended


def test_another_ledger_that_may_not_be_read_is_no_hindrance(rebind, ours, theirs, monkeypatch):
    folder = edit(rebind, ours)
    closed = edit(rebind, theirs)
    shutil.rmtree(theirs)
    for name in ("stat", "read_bytes"):
        original = getattr(Path, name)

        def guarded(path, *given, original=original, **named):
            return denied() if path == closed / "log.jsonl" else original(path, *given, **named)

        monkeypatch.setattr(Path, name, guarded)
    one = Kept(closed)
    assert (one.has_edits, one.active) == (False, 0)
    ended = rebind("ledger", "list", "--model", f"{ours}-2", code=2).err
    assert f"(of {theirs}, float32, 0 active edits, made " in ended
    assert rebind("ledger", "list", "--model", ours, "--quiet").out == "e0001\n"
    assert active(rebind, folder) == ["e0001"]


def test_where_a_ledger_does_not_say_its_dtype_it_may_be_another(rebind, ours):
    before = kept("model", ours, model="b" * 64)
    asked = rebind("ask", QUESTION, "--model", ours, json=True).err
    assert f"are not those that {before} was made for, or it was loaded in another dtype (of {ours}, 1 act" in asked
    other = kept("model", ours, model="c" * 64, dtype="float32")
    shutil.rmtree(before)
    asked = rebind("ask", QUESTION, "--model", ours, json=True).err
    assert f"are not those that {other} was made for (of {ours}, float32, 1 act" in asked
