"""The help of every command, and docs/cli.md, which is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

import rebind as package
from rebind.cli.app import app

from .manual import manual

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def command_names(name: str, command) -> list[str]:
    inner = getattr(command, "commands", {})
    return [name, *(one for key, part in inner.items() for one in command_names(f"{name} {key}", part))]


COMMANDS = command_names("rebind", typer.main.get_command(app))


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == manual(), "the commands have changed: run `make docs`"


def test_the_document_has_every_command_as_plain_text():
    assert re.findall(r"^## (.*)$", manual(), re.MULTILINE) == COMMANDS
    assert not re.search(r"\[/?(bold|dim)\]|\\\[", manual())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(rebind, command):
    words = command.split()[1:]
    shown = rebind(*words, "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown.split("Example")[0], "something was cut off"
    assert not re.search(r"<(bool|str|list.*|Path|path)>", shown), "nobody types a type"
    assert re.search(r"--help +-h +Show this", shown)
    if command not in ("rebind", "rebind ledger", "rebind bench"):
        assert all(option in shown for option in ("--json", "--quiet", "--debug"))
        assert command in shown.split("Example")[-1], "the help ends with an example"


def test_a_group_alone_shows_its_help(rebind):
    for words in ((), ("ledger",), ("bench",)):
        assert "Usage: rebind" in rebind(*words, code=2).out


def test_versions_are_those_of_the_installed_packages(rebind):
    installed = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    assert rebind("--version").out == f"{', '.join([f'rebind {package.__version__}', *installed])}\n"


def test_one_spelling_per_concept():
    """The same option means the same thing, and takes the same kind of value, in every command."""
    text = manual()
    for option, metavar in re.findall(r"^  (?:-\w, )?(--[a-z-]+) ([A-Z=]+) ", text, re.MULTILINE):
        kinds = set(re.findall(rf"^  (?:-\w, )?{option} ([A-Z=]+) ", text, re.MULTILINE))
        assert kinds == {metavar} or option == "--layers", (option, kinds)  # numbers in a model, kinds in training
    assert "--n " not in text
    assert "gated-delta" not in text


def test_help_needs_no_torch():
    program = """
import sys
from rebind.cli.app import app
try:
    app(["edit", "--help"])
finally:
    heavy = sorted(name for name in ("torch", "transformers", "numpy") if name in sys.modules)
    assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "Write facts into a model" in ended.stdout
