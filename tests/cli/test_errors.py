"""How a command ends: exit codes, error codes, and what an error says about an edit that is already written."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.edit.editor import Editor
from rebind.edit.ledger import Ledger
from rebind.errors import InputError, LedgerError, NumericalError, NumericalWarning, StorageError
from rebind.storage import ledgers_dir

from .conftest import FACT, FAST, LONG, QUESTION

FULL = OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")
MAIN = [sys.executable, "-c", "from rebind.cli import main; main()"]


def raising(problem):
    def fail(*_, **__):
        raise problem

    return fail


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("edit", "The capital of France is", "Rome"), "no_subject"),
        (("edit", "The {capital} of {France} is", "Rome"), "several_subjects"),
        (("edit", "The capital of {France} is", " "), "empty_text"),
        (("edit", "The capital of {France} is"), "missing_target"),
        (("edit", "nowhere.jsonl"), "file_not_found"),
        (("edit", __file__, "Rome"), "file_and_fact"),
        (("edit", __file__, "--subject", "Rome"), "file_and_fact"),
        (("edit", *FACT, "--out", f"{__file__}/out"), "file_in_the_way"),
        (("edit", *FACT, "--method", "memmit"), "unknown_method"),
        (("edit", *FACT, "--layers", "2,x"), "invalid_layers"),
        (("edit", *FACT, "--layers", "4-2"), "invalid_layers"),
        (("edit", *FACT, "--layers", "0-99999999999"), "invalid_layers"),
        (("edit", *FACT, "--layers", "1" * 5_000), "invalid_layers"),
        (("edit", *FACT, "--dtype", "int8"), "unknown_dtype"),
        (("edit", *FACT, "--steps", "0"), "usage"),
        (("edit", *FACT, "--clamp", "-1"), "usage"),
        (("edit", *FACT, "--keep-weight", "-1"), "usage"),
        (("edit", *FACT, "--contexts", "99999999999"), "usage"),
        (("edit", *FACT, "--framings", "start,rap"), "unknown_framing"),
        (("edit", *FACT, "--framings", " , "), "empty_list"),
        (("edit",), "usage"),
        (("edit", "--foo"), "usage"),
        (("edti",), "usage"),
        (("train", "--data", __file__, "--out", "\udcff"), "invalid_unicode"),
        (("studio", "--no-open", "--model", "no/such/folder"), "model_not_found"),
        (("ledger", "bogus"), "usage"),
        (("ask", ""), "empty_text"),
        (("ask", "x", "--top", "99999999999"), "usage"),
        (("ask", "x", "--model", "no/such/folder"), "model_not_found"),
        (("lens", " "), "empty_text"),
        (("lens", "It is", "--target", " "), "empty_text"),
        (("lens", "It is", "--out", f"{__file__}/in"), "file_in_the_way"),
        (("trace",), "prompt_or_facts"),
        (("trace", FACT[0], "--facts", "facts.jsonl"), "prompt_or_facts"),
        (("trace", "--facts", "facts.jsonl", "--target", "x"), "prompt_or_facts"),
        (("trace", FACT[0], "--kind", "heads"), "unknown_kind"),
        (("trace", FACT[0], "--noise", "inf"), "not_positive"),
        (("trace", FACT[0], "--draws", "99999999999"), "usage"),
        (("trace", FACT[0], "--seed", "4294967296"), "usage"),
        (("trace", FACT[0], "--target", ""), "empty_text"),
        (("layers", "--facts", "nowhere.jsonl"), "file_not_found"),
        (("ledger", "list"), "no_ledger"),
        (("ledger", "export"), "nothing_to_export"),
        (("ledger", "export", "--rank", "2", "--delta", "d.safetensors"), "nothing_to_export"),
        (("ledger", "export", "--delta", "d.safetensors"), "no_ledger"),
        (("eval", "--method", "memitt"), "unknown_method"),
        (("eval", "--protocol", "serial"), "unknown_protocol"),
        (("eval", "--facts", "nowhere.json"), "file_not_found"),
        (("eval", "--text", "nowhere.txt"), "unreadable_corpus"),
        (("eval", "--layers", "x"), "invalid_layers"),
        (("eval", "--seed", "4294967296"), "usage"),
        (("generate", "no/such/folder", "Once", "--seed", "4294967296"), "usage"),
        (("lab", "ttt-1d", "--seeds", "99999999999"), "usage"),
        (("lab", "ttt-1d", "seeds=99999999999"), "invalid_setting"),
        (("lab", "ttt-1d", "tokens=99999999999"), "invalid_setting"),
        (("eval", "compare", ".", ".."), "not_a_run_folder"),
        (("bench", "scan", "--dtype", "int8"), "unknown_dtype"),
        (("bench", "scan", "--threads", "99999999999"), "usage"),
        (("bench", "scan", "--seconds", "inf"), "usage"),
        (("bench", "scan", "--shapes", " "), "empty_list"),
        (("bench", "scan", "--only", "loop", "--rules", "delta"), "nothing_to_measure"),
        (("bench", "scan", "--out", __file__), "file_in_the_way"),
        (("train", "--data", "x", "--out", "y", "--set", "hidden_size"), "invalid_field"),
    ],
)
def test_invalid_input_is_refused_before_a_model_is_loaded(rebind, fails, words, code, monkeypatch):
    if code != "model_not_found":
        monkeypatch.setattr(Editor, "__init__", raising(AssertionError("too late")))
    error = fails(*words)
    assert error.code == code
    plain = rebind(*words, code=2)
    assert plain.out == ""
    assert plain.err.count("\n") == 1
    assert error.problem in plain.err
    assert not ledgers_dir().exists()


def test_invalid_input_that_needs_the_model(fails, model, edited):
    for words, code in (
        (("edit", *FACT, "--layers", "7"), "layers_out_of_range"),
        (("edit", *FACT, "--lam", "0", "--method", "memit"), "invalid_lambda"),
        (("edit", *FACT, "--lam", "7"), "lambda_not_used"),
        (("edit", *FACT, "--layers", "0,1"), "too_many_layers"),
        (("edit", *FACT, "--framings", "chat"), "framing_not_applicable"),
        (("edit", *FACT, "--keep", "Italy is in"), "keep_without_subject"),
        (("ask", "x", "--device", "cpu", "--device-map", "auto"), "device_and_device_map"),
        (("ask", "x", "--chat"), "unusable_chat_template"),
        (("lens", "x", "--chat"), "unusable_chat_template"),
        (("ask", LONG), "prompt_too_long"),
        (("lens", LONG), "prompt_too_long"),
        (("trace", LONG + "{France}"), "prompt_too_long"),
        (("ask", "x", "--device", "nowhere"), "device_unavailable"),
        (("moments", "--layers", "9"), "layers_out_of_range"),
        (("ledger", "show", "e0007"), "unknown_edit"),
        (("ledger", "undo", "e0007"), "unknown_edit"),
        (("ledger", "redo", "e0001"), "already_active"),
    ):
        assert fails(*words, "--model", model).code == code, words


def test_the_same_mistake_has_the_same_code_in_every_command(fails, model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    commands = (("ask", "x"), ("lens", "x"), ("trace", FACT[0]), ("ledger", "list"), ("ledger", "undo", "e0001"))
    for words in (*commands, ("ledger", "verify"), ("ledger", "replay", "--out", "x"), ("edit", *FACT, "--plan")):
        assert fails(*words, "--ledger", tmp_path / "other").code == "no_ledger"
        assert fails(*words, "--ledger", __file__).code == "no_ledger"
    assert fails("edit", *FACT, "--ledger", tmp_path / "other").code == "no_ledger"
    assert fails("edit", *FACT, "--ledger", __file__).code == "file_in_the_way"


def test_a_damaged_ledger_is_code_3_everywhere(rebind, fails, model, edited):
    log = Path(edited["ledger"]) / "log.jsonl"
    log.write_text(log.read_text().replace("Rome", "Bonn"))
    before = log.read_bytes()
    for words in (("ledger", "list"), ("ledger", "undo", "e0001"), ("ask", QUESTION), ("edit", *FACT, *FAST)):
        assert fails(*words, "--model", model, code=3).code == "ledger_damaged"
    report = rebind("ledger", "verify", "--model", model, json=True, code=1).document
    assert not report["intact"]
    assert "✗" in rebind("ledger", "verify", "--model", model, code=1).out
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("problem", "exit_code", "code"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyError("oops"), 1, "internal_error"),
        (NumericalError("Too\nstiff", code="stiff"), 3, "stiff"),
        (LedgerError("Damaged"), 3, "ledger_failure"),
        (StorageError("Full"), 3, "storage_failure"),
        (InputError("Wrong"), 2, "invalid_input"),
        (MemoryError(), 3, "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "out_of_memory"),
        (RuntimeError("selected index k out of range"), 1, "internal_error"),
        (PermissionError(13, "Permission denied", "/some/file"), 3, "io_failure"),
    ],
)
def test_whatever_is_raised_has_one_line_and_a_code(rebind, fails, model, monkeypatch, problem, exit_code, code):
    monkeypatch.setattr(Editor, "rewrite_many", raising(problem))
    words = ("edit", *FACT, "--model", model)
    error = fails(*words, code=exit_code)
    assert (error.code, error.err.count("\n"), error.edits) == (code, 1, None)
    assert "Traceback" in rebind(*words, "--debug", code=exit_code).err


def test_an_interrupt_that_a_library_turned_into_another_error(fails, model, monkeypatch):
    problem = ImportError("could not import module 'PreTrainedModel'")
    problem.__cause__ = KeyboardInterrupt()
    monkeypatch.setattr(Editor, "rewrite_many", raising(problem))
    assert fails("edit", *FACT, "--model", model, code=130).code == "interrupted"


def test_advice_is_spelled_in_options(fails, model, monkeypatch):
    settings = {"targets.steps": 60, "force": True, "layers": (1, 2), "moment_tokens": None, "guard": "x"}
    settings["targets.keep"] = 12.0
    advice = "Try {targets.steps}, {force}, {layers}, {moment_tokens}, {targets.keep} or {guard}"
    monkeypatch.setattr(Editor, "rewrite_many", raising(InputError("Too short", advice=advice, settings=settings)))
    error = fails("edit", *FACT, "--model", model)
    options = "--steps 60, --force, --layers 1,2, --moment-tokens, --keep-weight 12.0 or guard='x' (in Python)"
    assert error.advice == f"Try {options}"
    assert error.err == f"error: Too short. Try {options}.\n"


def test_rebinds_own_warnings_are_shown(rebind, model, monkeypatch):
    def warn(*_, **__):
        warnings.warn("added 1e-6 to its diagonal", NumericalWarning, stacklevel=1)
        warnings.warn("old argument", UserWarning, stacklevel=1)
        raise InputError("Enough")

    monkeypatch.setattr(Editor, "rewrite_many", warn)
    ended = rebind("edit", *FACT, "--model", model, code=2)
    assert ended.err == "warning: added 1e-6 to its diagonal\nerror: Enough.\n"


@pytest.mark.parametrize(
    ("problem", "exit_code"), [(KeyboardInterrupt(), 130), (FULL, 3), (KeyError("oops"), 1)], ids=repr
)
@pytest.mark.parametrize("moment", ["while saving", "right after the write"])
def test_an_error_says_that_an_edit_is_already_written(rebind, fails, model, monkeypatch, problem, exit_code, moment):
    append = Ledger.append

    def append_and_raise(ledger, edit):
        append(ledger, edit)
        raise problem

    with monkeypatch.context() as patch:
        if moment == "while saving":
            patch.setattr(Editor, "save", raising(problem))
        else:
            patch.setattr(Ledger, "append", append_and_raise)
        error = fails("edit", *FACT, "--model", model, *FAST, "--out", "out", code=exit_code)
    assert error.edits == ["e0001"]
    rebind(*shlex.split(error.err.split("To undo it: ")[1])[1:])
    assert rebind("ledger", "list", "--model", model, "--quiet").out == ""


def test_a_reader_that_is_gone_does_not_hide_an_edit(rebind, model, monkeypatch):
    monkeypatch.setattr("rebind.cli.ui.tables.print_answers", raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert "Edit e0001 is in the ledger" in rebind("edit", *FACT, "--model", model, *FAST, code=141).err


@pytest.mark.parametrize("words", [["--help"], ["--version"]], ids=" ".join)
def test_a_reader_that_is_gone_ends_a_command_quietly(words):
    with subprocess.Popen([*MAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize(
    ("words", "full", "code"),
    [
        (["--help"], "stdout", 3),
        (["--version"], "stdout", 3),
        (["edti", "--json"], "stderr", 2),
        (["edti"], "stderr", 2),
    ],
)
def test_output_that_cannot_be_written(words, full, code):
    with Path("/dev/full").open("w") as disk:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: disk}
        ended = subprocess.run([*MAIN, *words], **streams, text=True, timeout=60)
    assert ended.returncode == code
    if full == "stdout":
        assert ended.stderr.startswith("error: ")
        assert "Traceback" not in ended.stderr
    elif "--json" in words:
        assert json.loads(ended.stdout)["exit_code"] == code


def test_characters_that_a_terminal_lacks_are_replaced(model):
    words = ["edit", "The answer is {東京}", "naïve", "--model", model, *FAST]
    ended = CliRunner(charset="ascii").invoke(app, words)
    assert ended.exit_code == 0, ended.stderr
    assert "The answer is ??" in ended.stdout


def test_without_typer_it_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from rebind.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "pip install 'rebind[edit]'" in ended.stderr
