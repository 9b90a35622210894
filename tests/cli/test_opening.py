"""Whatever an edit was made with, the command opens it again."""

from __future__ import annotations

import errno

import pytest

from rebind.cli.session import _is_packed
from rebind.edit.editor import Editor
from rebind.edit.moments.corpus import OwnSamples, Texts
from rebind.edit.targets.optimize import TargetSettings

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
QUESTION = "The answer is France"


def remembering(model, folder, **options) -> None:
    """An edit that can only be folded with the moments it was solved with."""
    editor = Editor(model, ledger=folder, guard=None, **options)
    editor.rewrite(*FACT, method="alphaedit", targets=TargetSettings(steps=2))


@pytest.mark.parametrize("corpus", [OwnSamples(), OwnSamples(3, rows=7), OwnSamples(-1, 1)])
def test_samples_are_known_by_their_digest(corpus):
    assert OwnSamples.from_digest(corpus.digest) == corpus
    assert OwnSamples.from_digest(Texts(["a"], "own-samples-0-64").digest) is None
    assert OwnSamples.from_digest("own-samples-0") is None


def test_an_edit_with_another_devices_samples_opens(rebind, model, tmp_path):
    """On a GPU more rows are sampled, and more tokens of them read: no option says how many."""
    kept = str(tmp_path / "kept")
    remembering(model, kept, corpus=OwnSamples(0, rows=16), moment_tokens=300)
    place = ("--model", model, "--ledger", kept)
    for words in (("ask", QUESTION), ("lens", QUESTION), ("trace", FACT[0], "--kind", "mlp", "--draws", "1")):
        assert rebind(*words, *place, json=True).document["active"] == ["e0001"]
    rebind("ledger", "replay", *place, "--out", str(tmp_path / "out"))
    search = ("--steps", "2", "--force")
    added = rebind("edit", "I saw {Italy}", "Paris", *place, "--method", "recursive", *search, json=True).document
    assert added["settings"]["moments"] == {"corpus": "own-samples-0-16", "tokens": 300}
    rebind("ask", QUESTION, *place, "--moment-tokens", "300")
    assert "moment_tokens" in rebind("ask", QUESTION, *place, "--moment-tokens", "301", code=2).err


def test_samples_of_an_edit_that_needs_none_again_do_not_bind(rebind, model, tmp_path):
    kept = str(tmp_path / "kept")
    place = ("--model", model, "--ledger", kept)
    rebind("edit", *FACT, *place, *FAST)
    plan = rebind("edit", "I saw {Italy}", "Paris", *place, "--plan", json=True).document["plan"]
    assert plan["moment_tokens"] == 8_192


@pytest.mark.parametrize("words", [("lens", QUESTION), ("trace", FACT[0], "--kind", "mlp", "--draws", "1")])
def test_lens_and_trace_take_the_corpus_of_an_edit(rebind, model, tmp_path, words):
    text, kept = tmp_path / "text.txt", str(tmp_path / "kept")
    text.write_text("The capital of France is Paris. " * 40)
    remembering(model, kept, corpus=Texts.from_file(text), moment_tokens=128)
    place = ("--model", model, "--ledger", kept)
    assert "corpus" in rebind(*words, *place, code=2).err
    given = ("--corpus", str(text), "--moment-tokens", "128")
    assert rebind(*words, *place, *given, json=True).document["active"] == ["e0001"]


def test_a_plan_for_a_ledger_that_is_not_there(rebind, model, tmp_path):
    words = ("edit", *FACT, "--model", model, "--plan", "--ledger")
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        assert rebind(*words, str(folder), json=True).document["plan"]["facts"] == 1
        assert not folder.exists() or not any(folder.iterdir()), "a plan writes nothing"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("mine")
    assert "no ledger in" in rebind(*words, str(tmp_path / "taken"), code=3).err
    assert "no ledger in" in rebind("ask", QUESTION, "--model", model, "--ledger", str(tmp_path / "new"), code=3).err


@pytest.mark.parametrize("place", ["a file", "a file/inside", "locked", "locked/inside"])
def test_a_ledger_that_cannot_be_begun_is_refused_before_the_model_is_loaded(rebind, tmp_path, monkeypatch, place):
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "locked").mkdir()
    failing = PermissionError(errno.EACCES, "Permission denied")

    def mkdtemp(*_, dir, **__):
        assert dir == tmp_path / "locked"
        raise failing

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)  # a mode would not stop the superuser
    code, says = (2, "is a file") if "file" in place else (3, "Permission denied")
    assert says in rebind("edit", *FACT, "--ledger", str(tmp_path / place), code=code).err
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / place))
    assert "REBIND_LEDGERS" in rebind("edit", *FACT, code=code).err


def test_a_ledger_that_is_not_there_is_missed_before_the_model_is_loaded(rebind, tmp_path, monkeypatch):
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    assert "no ledger in" in rebind("ask", QUESTION, "--ledger", str(tmp_path / "new"), code=3).err
    for words in (("ask", QUESTION), ("ledger", "list"), ("ledger", "undo", "e0001")):
        assert "is a file, expected a ledger's folder" in rebind(*words, "--ledger", __file__, code=3).err


def test_a_gguf_is_said_to_be_unpacked_until_the_cache_has_it(tmp_path, model):
    file = tmp_path / "Some-1B.gguf"
    assert not _is_packed(str(file)), "perhaps a Hub id"
    file.touch()
    assert _is_packed(str(file))
    assert _is_packed("smollm2")
    assert not _is_packed(model)
    for name in ("Some-1B-0123456789ab", "SmolLM2-135M-Instruct.Q4_1-0123456789ab"):
        (tmp_path / "cache" / "models" / name).mkdir(parents=True)
    assert not _is_packed(str(file))
    assert not _is_packed("smollm2")


def test_moments_are_those_of_the_chosen_layers(rebind, model, monkeypatch):
    monkeypatch.setattr("rebind.edit.editor.chosen_layers", lambda fingerprint: (1, 2))
    found = rebind("moments", model, "--tokens", "256", json=True).document["moments"]
    assert [row["site"].split(".")[2] for row in found] == ["1", "2"]
    plan = rebind("edit", *FACT, "--model", model, "--moment-tokens", "256", "--plan", json=True).document["plan"]
    assert plan["layers"] == [1, 2]
    assert plan["moments_cached"], "the edit finds them"
