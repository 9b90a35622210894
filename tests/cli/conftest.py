"""A tiny Llama on disk, a way to run commands, and nothing but the test's own folders and no network."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's client, which reads it once

import json
import re
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from rebind.cli.app import app
from tests import tiny

ANSI = re.compile(r"\x1b\[[0-9;]*m")  # typer colors its help where CI asks for it
FAST = ("--steps", "3", "--moment-tokens", "256", "--force")  # the model cannot say a fact after so few steps
FACT = ("The answer is {France}", "Rome")
QUESTION = "The answer is France"
TEMPLATE = "{% for turn in messages %}[{{ turn['role'] }}] {{ turn['content'] }}\n{% endfor %}"
LONG = "The capital of France is Paris. " * 60  # longer than the context


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A model folder as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny.llama(max_position_embeddings=128).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    """The same model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    tiny.llama(max_position_embeddings=128).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / "ledgers"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rebind():
    """Run a command and check its exit code; with `json=True`, read the one document that it must print."""

    def run(*words: object, code: int = 0, json: bool = False) -> SimpleNamespace:
        result = CliRunner().invoke(app, [*map(str, words), *(["--json"] if json else [])])
        details = f"{words} ended with {result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert result.exit_code == code, details
        out, err = ANSI.sub("", result.stdout), ANSI.sub("", result.stderr)
        return SimpleNamespace(out=out, err=err, document=read(out) if json else None)

    return run


@pytest.fixture
def fails(rebind):
    """Run a command that fails, check its exit code, and return the error's fields."""

    def run(*words: object, code: int = 2) -> SimpleNamespace:
        ended = rebind(*words, code=code, json=True)
        assert ended.document["exit_code"] == code
        assert "Traceback" not in ended.err
        assert ended.err.splitlines()[-1].startswith("error: ")
        return SimpleNamespace(**ended.document["error"], err=ended.err, edits=ended.document.get("edits"))

    return run


@pytest.fixture
def edited(rebind, model) -> dict:
    """Write one fact into the default ledger."""
    return rebind("edit", *FACT, "--model", model, *FAST, json=True).document


@pytest.fixture
def edited_weights(rebind, model) -> dict:
    """Write one fact into the weights, with the default ledger."""
    return rebind("edit", *FACT, "--model", model, *FAST, "--method", "memit", json=True).document


def read(text: str) -> dict:
    document, end = json.JSONDecoder().raw_decode(text)
    assert not text[end:].strip(), f"more than one document: {text[end:]!r}"
    return document


def write_records(folder, *records: dict) -> str:
    """Write one record per line."""
    file = folder / "facts.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)
