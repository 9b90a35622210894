"""Shell completion: the names are those of the library, and the shell gets them without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rebind.bench.contenders import RULES
from rebind.cli import completion
from rebind.cli.app import app
from rebind.edit.methods import METHODS
from rebind.edit.targets.framings import FRAMINGS
from rebind.lab.catalogue import EXPERIMENTS
from rebind.nn.lm.config import KINDS, PRESETS

COMPLETE = """
import sys
from rebind.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("copied", "names"),
    [
        (completion.METHODS, METHODS),
        (completion.FRAMINGS, FRAMINGS),
        (completion.BENCH_RULES, RULES),
        (completion.KINDS, KINDS),
        (completion.PRESETS, PRESETS),
        (completion.EXPERIMENTS, EXPERIMENTS),
    ],
)
def test_the_names_are_those_of_the_library(copied, names):
    assert sorted(copied) == sorted(names)


@pytest.fixture
def complete(monkeypatch, capsys):
    """Complete a command line as bash does."""

    def run(line: str) -> list[str]:
        monkeypatch.setenv("_REBIND_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit) as end:
            app()
        monkeypatch.delenv("_REBIND_COMPLETE")
        assert end.value.code == 0
        return capsys.readouterr().out.split()

    return run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rebind led", ["ledger"]),
        ("rebind ledger und", ["undo"]),
        ("rebind edit --method r", ["rome", "recursive"]),
        ("rebind edit --framings start,c", ["start,chat"]),
        ("rebind train --layers delta,ttt", ["delta,ttt-linear", "delta,ttt-mlp"]),
        ("rebind train --preset schlag", ["schlag-small", "schlag-medium"]),
        ("rebind lab h", ["hopfield"]),
        ("rebind bench scan --rules kda,so", ["kda,softmax"]),
        ("rebind ask --dtype f", ["float64", "float32", "float16"]),
    ],
)
def test_names_are_completed(complete, line, expected):
    assert complete(line) == expected


def test_models_of_the_hubs_cache_are_completed(complete, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--Qwen--Qwen3-0.6B").mkdir()
    assert complete("rebind ask -m ") == ["smollm2", "Qwen/Qwen3-0.6B"]
    assert complete("rebind ask --model Q") == ["Qwen/Qwen3-0.6B"]


def test_ids_of_edits_are_completed(rebind, complete, edited, model, tmp_path):
    assert complete(f"rebind ledger undo --model {model} e") == [edited["id"]]
    (folder,) = (tmp_path / "ledgers").iterdir()
    assert complete(f"rebind ledger show --ledger {folder} e0") == [edited["id"]]
    assert complete(f"rebind ledger show --ledger {folder} x") == []
    assert complete("rebind ledger show --ledger /nowhere e") == []


def test_the_shell_waits_for_no_torch():
    shell = {"_REBIND_COMPLETE": "complete_bash", "COMP_WORDS": "rebind edit --method a", "COMP_CWORD": "3"}
    run = [sys.executable, "-c", COMPLETE]
    ended = subprocess.run(run, env={**os.environ, **shell}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, ["alphaedit"]), ended.stderr
