"""How a command ends: what it says is so."""

from __future__ import annotations

import errno
import io
import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from rebind.cli.__main__ import app
from rebind.cli.screen import screen
from rebind.edit.editor import Editor
from rebind.edit.kept import KeptTargets

from .conftest import FAST

FACT = ("The answer is {France}", "Rome")
FULL = OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")


def raising(problem):
    def fail(*_, **__):
        raise problem

    return fail


def written(rebind, model) -> list[str]:
    return rebind("ledger", "list", "--model", model, "--quiet").out.split()


@pytest.mark.parametrize("option", ["--paraphrase", "--neighbour"])
@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_prompts_that_cannot_be_asked_are_refused_before_the_work(rebind, model, option, plan, monkeypatch):
    monkeypatch.setattr(Editor, "rewrite_many", lambda *_, **__: pytest.fail("too late"))
    long = "The answer is" + " very" * 200
    ended = rebind("edit", *FACT, option, "It is", option, long, "--model", model, *FAST, *plan, code=2)
    assert f"a {option[2:]} cannot be asked" in ended.err
    assert "the model takes 128" in ended.err


@pytest.mark.parametrize(
    ("problem", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "stopped: edit e0001 is in the ledger"),
        (FULL, 3, "No space left on device"),
        (KeyError("oops"), 1, "unexpected KeyError"),
    ],
)
@pytest.mark.parametrize("place", ["measuring", "saving", "tidying"])
def test_what_ends_an_edit_that_is_written_says_so(rebind, model, monkeypatch, tmp_path, problem, code, says, place):
    owner, name = {
        "measuring": ("rebind.cli.edit", "_measure"),
        "saving": (Editor, "save"),
        "tidying": (KeptTargets, "clear"),  # inside the editor's verb: its caller has no id yet
    }[place]
    words = ("edit", *FACT, "--neighbour", "I saw", "--model", model, *FAST)
    with monkeypatch.context() as patch:
        where = (f"{owner}.{name}",) if isinstance(owner, str) else (owner, name)
        patch.setattr(*where, raising(problem))
        ended = rebind(*words, "--out", str(tmp_path / "out"), code=code)
        again = rebind(*words, "--out", str(tmp_path / "out"), code=code, json=True).document
    assert says in ended.err
    assert "run the same command again" not in ended.err
    assert ended.err.count("\n") == 1
    undo = ended.err.strip().split("to take it back: rebind ")[1].split()
    assert undo[:3] == ["ledger", "undo", "e0001"]
    assert again["edits"] == ["e0002"]
    assert written(rebind, model) == ["e0001", "e0002"]
    rebind(*undo)
    assert written(rebind, model) == ["e0002"]


def test_what_ends_an_edit_that_is_not_written_says_that(rebind, model, monkeypatch):
    rebind("edit", *FACT, "--model", model, *FAST)
    monkeypatch.setattr("rebind.edit.ledger.append_lines", raising(KeyboardInterrupt()))
    ended = rebind("edit", *FACT, "--model", model, *FAST, code=130)
    assert "nothing was left half done" in ended.err
    assert "e0001 is in the ledger" not in ended.err


@pytest.mark.parametrize("problem", [BrokenPipeError(errno.EPIPE, "Broken pipe"), SystemExit(1)])
def test_a_reader_that_went_away_does_not_hide_an_edit(rebind, model, monkeypatch, problem):
    monkeypatch.setattr("rebind.cli.edit._show", raising(problem))
    assert "warning: edit e0001 is in the ledger" in rebind("edit", *FACT, "--model", model, *FAST, code=1).err


class Full(io.StringIO):
    """A file on a disk without space: nothing is missed until it is flushed."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_result_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full())

    def work():
        with screen(True, False, False) as shown:
            shown.keep("e0001", None)
            shown.result({"id": "e0001"})

    with pytest.raises(typer.Exit) as ended:
        work()
    told = capsys.readouterr().err
    assert ended.value.exit_code == 3
    assert "No space left on device" in told
    assert told.endswith(
        "edit e0001 is in the ledger, do not run the command again; to take it back: rebind ledger undo e0001\n"
    )


def test_letters_that_a_terminal_lacks_are_replaced(model, rebind):
    words = ["edit", "The answer is {東京}", "naïve", "--model", model, *FAST]
    ended = CliRunner(charset="ascii").invoke(app, words)
    assert ended.exit_code == 0, ended.stderr
    assert "The answer is ??" in ended.stdout
    missing = CliRunner(charset="ascii").invoke(app, ["ask", "x", "--model", "東京/東京/東京"])
    assert missing.exit_code == 2, missing.stderr


def test_json_has_no_nan(capsys):
    with screen(True, False, False) as shown:
        shown.result({"a": float("nan"), "b": [1.5, (float("inf"), {"c": -float("inf")})], "d": "NaN", "e": True})
    told = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert told == {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True}
