"""How a command ends: what it says is so, and what it suggests can be pasted."""

from __future__ import annotations

import errno
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand
from typer.testing import CliRunner

from rebind.cli import NOT_BEGUN
from rebind.cli.app import app
from rebind.cli.ui.terminal import screen
from rebind.cli.ui.usage import Commands
from rebind.edit.editor import Editor
from rebind.edit.targets.store import KeptTargets
from rebind.errors import StorageError

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
        "measuring": ("rebind.cli.commands.edit", "_measure"),
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
    monkeypatch.setattr("rebind.edit.ledger.ledger.append_lines", raising(KeyboardInterrupt()))
    ended = rebind("edit", *FACT, "--model", model, *FAST, code=130)
    assert "nothing was left half done" in ended.err
    assert "e0001 is in the ledger" not in ended.err


def rich_ends(*_):
    try:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    except BrokenPipeError:
        raise SystemExit(1)  # noqa: B904


@pytest.mark.parametrize(
    ("ends", "code"),
    [(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")), 141), (rich_ends, 141), (raising(SystemExit(1)), 1)],
)
def test_a_reader_that_went_away_does_not_hide_an_edit(rebind, model, monkeypatch, ends, code):
    monkeypatch.setattr("rebind.cli.commands.edit._show", ends)
    assert "warning: edit e0001 is in the ledger" in rebind("edit", *FACT, "--model", model, *FAST, code=code).err


@pytest.mark.parametrize(("place", "named"), [("cache", True), ("out", False)])
def test_the_cache_is_named_where_it_is_what_failed(rebind, model, monkeypatch, tmp_path, place, named):
    problem = StorageError(f"cannot write {tmp_path / place / 'x'} (No space left on device): choose another folder")
    monkeypatch.setattr(Editor, "rewrite_many", raising(problem))
    ended = rebind("edit", *FACT, "--model", model, code=3).err
    assert ended.startswith(f"error: {problem}")
    assert ("REBIND_CACHE" in ended) is named


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor", "--json"]], ids=" ".join)
def test_a_reader_that_went_away_ends_it_quietly(words):
    program = "from rebind.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (141, "")


def test_an_interrupt_before_a_verb_is_at_work_is_one_line():
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from rebind.cli import main
main()
"""
    for words in ([], ["doctor", "--json"]):
        ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (130, f"{NOT_BEGUN}\n")
        assert (json.loads(ended.stdout) if words else ended.stdout) == (
            {"error": NOT_BEGUN, "code": 130} if words else ""
        )


@pytest.mark.parametrize("parser", [Commands, TyperCommand])
def test_an_interrupt_while_words_are_read_is_one_line(rebind, monkeypatch, parser):
    monkeypatch.setattr(parser, "make_context", raising(KeyboardInterrupt()), raising=False)
    plain = rebind("doctor", code=130)
    assert (plain.out, plain.err) == ("", f"{NOT_BEGUN}\n")
    told = rebind("doctor", code=130, json=True)
    assert (told.document, told.err) == ({"error": NOT_BEGUN, "code": 130}, f"{NOT_BEGUN}\n")


def test_a_second_interrupt_does_not_say_that_nothing_was_begun(rebind, model, monkeypatch):
    monkeypatch.setattr(Editor, "rewrite_many", raising(KeyboardInterrupt()))
    monkeypatch.setattr("rebind.cli.ui.terminal._stop", raising(KeyboardInterrupt()))
    assert rebind("edit", *FACT, "--model", model, code=130).err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize(
    ("words", "full", "code"),
    [
        (["--help"], "stdout", 3),
        (["--version"], "stdout", 3),
        (["edit", "--help"], "stdout", 3),
        ([], "stdout", 3),
        (["edti"], "stderr", 2),
        (["edti", "--json"], "stderr", 2),
        (["edti", "--json"], "stdout", 2),
        (["edit", "nowhere.jsonl"], "stderr", 2),
        (["edit", "nowhere.jsonl", "--json"], "stderr", 2),
    ],
)
def test_what_cannot_be_written_is_told_where_it_can_be(words, full, code):
    program = [sys.executable, "-c", "from rebind.cli import main; main()", *words]
    with Path("/dev/full").open("w") as disk:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        ended = subprocess.run(program, **streams, text=True, timeout=60)
    assert ended.returncode == code
    if full == "stdout":
        assert "Traceback" not in ended.stderr
        says = "No such command" if code == 2 else "error: the output cannot be written (No space left on device)"
        assert says in ended.stderr
    elif "--json" in words:
        assert json.loads(ended.stdout)["code"] == code


def test_an_interrupt_of_which_a_library_makes_another_error_is_one(capsys):
    def work():
        with screen(False, False, False):
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise ImportError("could not import module 'PreTrainedModel'")  # noqa: B904

    with pytest.raises(typer.Exit) as ended:
        work()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err.startswith("stopped: nothing was left half done")


def test_what_goes_wrong_while_an_interrupt_unwinds_is_told(capsys):
    def work():
        with screen(False, False, False):
            try:
                raise KeyboardInterrupt
            finally:
                raise FULL

    with pytest.raises(typer.Exit) as ended:
        work()
    assert ended.value.exit_code == 3
    assert "No space left on device" in capsys.readouterr().err


def test_a_suggested_command_may_begin_with_a_dash():
    with screen(False, False, False, " -m tiny") as shown:
        assert shown.command("ask", "-5 is", more=" --chat") == "rebind ask -m tiny --chat -- '-5 is'"
        assert shown.command("ask", "it is", more=" --chat") == "rebind ask 'it is' -m tiny --chat"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("edit", "--foo"), "No such option: --foo"),
        (("bogus",), "No such command 'bogus'"),
        (("ledger", "bogus"), "No such command 'bogus'"),
        (("edit", *FACT, "--steps", "0"), "'--steps'"),
    ],
)
def test_words_that_are_not_taken_are_told_as_json_too(rebind, words, says):
    ended = rebind(*words, code=2, json=True)
    assert says in ended.document["error"]
    assert ended.document["code"] == 2
    assert "Usage" in ended.err
    assert rebind(*words, code=2).out == ""


# Commands to be pasted


def suggested(text: str, label: str) -> list[str]:
    """The words of the command behind a label, without `rebind`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{label}: ")]
    return shlex.split(line.removeprefix(f"{label}: "))[1:]


def test_suggested_commands_are_about_the_same_model_and_ledger(rebind, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    place = ("--model", model, "--ledger", str(tmp_path / "else where"))
    made = rebind("edit", "It's {France}", "Rome", *place, "--dtype", "float64", *FAST).out
    asked = rebind(*suggested(made, "ask"), json=True).document
    assert (asked["active"], asked["ledger"]) == (["e0001"], place[-1])
    assert asked["answers"][0]["prompt"] == "It's France"
    undone = rebind(*suggested(made, "take it back"))
    assert active_in(rebind, place) == []
    redone = rebind(*suggested(undone.out, "the other way"))
    assert active_in(rebind, place) == ["e0001"]
    rebind(*suggested(redone.out, "the other way"))
    assert active_in(rebind, place) == []


def test_a_conflict_names_a_command_that_can_be_pasted(rebind, model, tmp_path):
    place = ("--model", model, "--ledger", str(tmp_path / "else where"))
    rebind("edit", *FACT, *place, *FAST)
    ended = rebind("edit", FACT[0], "Paris", *place, code=2)
    assert "force=True" not in ended.err
    assert "editor.undo" not in ended.err
    undo = ended.err.split("undo it first (")[1].split(")")[0]
    rebind(*shlex.split(undo)[1:])
    rebind("edit", FACT[0], "Paris", *place, *FAST)
    again = rebind("ledger", "redo", "e0001", *place, code=2).err
    rebind(*shlex.split(again.split("undo it first (")[1].split(")")[0])[1:])
    assert active_in(rebind, place) == []


def active_in(rebind, place) -> list[str]:
    return rebind("ledger", "list", *place, "--quiet").out.split()


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
    assert told.startswith("error: the output cannot be written (No space left on device)")
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
