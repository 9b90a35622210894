"""docs/cli.md is what the commands say of themselves."""

from __future__ import annotations

from pathlib import Path

import typer

from rebind.cli.app import app
from rebind.cli.manual import manual

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == manual(), "the commands have changed: run `make docs`"


def test_it_has_every_command_and_option():
    text = manual()

    def look(name: str, command) -> None:
        for inner, found in getattr(command, "commands", {}).items():
            look(f"{name} {inner}", found)
        if getattr(command, "commands", None):
            return
        assert f"\n## {name}\n" in text
        page = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert all(f"`{option}" in page for param in command.params for option in param.opts if option.startswith("-"))

    look("rebind", typer.main.get_command(app))


def test_markup_is_for_terminals():
    assert "[bold]" not in manual()
    assert "[/bold]" not in manual()


def test_defaults_that_are_folders_are_told():
    assert "| `--out DIR` | Folder of the results. Default: `runs/bench`. |" in manual()


def test_prose_behind_examples_ends():
    """What is typed is shown as code; the rest are sentences."""
    for page in manual().split("\n## ")[1:]:
        prose = page.split("```\n")[-1].strip().splitlines()
        assert all(line.endswith(".") for line in prose if line and not line.startswith("|")), prose
