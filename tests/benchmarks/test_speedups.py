"""The search without each speed-up finds the same targets: what is timed against each other is the same work."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.speedups import __main__ as speedups
from benchmarks.speedups import searches as speedup_searches
from benchmarks.speedups.plain_trunk import Plain
from benchmarks.speedups.searches import Setup, finished_stay, searches, searches_one_by_one, target_rows
from benchmarks.speedups.timing import Timer, difference
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.targets import TargetSettings, find_targets
from rebind.edit.targets.objective import prepare_batches
from tests import tiny

FACTS = [
    Fact.parse("The capital of {France} is", "Rome"),
    Fact.parse("In the north of {Norway} the sun", "fell before"),
    Fact.parse("{Dante} and the old", "sea"),
]


@pytest.fixture
def editor() -> Editor:
    model = tiny.llama(dtype=torch.float64)
    return Editor(model, tiny.tokenizer(), corpus=tiny.texts(), moment_tokens=256, guard=None)


@pytest.fixture
def setup(editor) -> Setup:
    return Setup(
        editor.language_model.trunk, 1, editor.fact_prompts(FACTS), TargetSettings(steps=8, rate=0.3, enough=5.5)
    )


def test_every_search_finds_the_same(setup):
    expected = setup.find()
    steps = find_targets(setup.trunk, setup.layer, setup.facts, setup.settings).steps
    assert 0 < int(steps.min()) < int(steps.max()), "some facts are done before others"
    for name, call in (searches(setup) | searches_one_by_one(setup)).items():
        assert difference(call(), expected) < 1e-9, name


@pytest.mark.parametrize(
    ("off", "whole", "below"), [({}, False, False), ({"whole": True}, True, False), ({"below": True}, False, True)]
)
def test_a_plain_trunk_does_the_work(setup, off, whole, below):
    """Or the rows would compare a thing with itself."""
    suffix = max(len(one) for fact in setup.facts for one in fact.suffixes)
    widths, first_block = [], setup.trunk.blocks[0]

    def count_runs(steps: int) -> int:
        """Return how often the first block runs in a search."""
        runs: list[int] = []
        handle = first_block.mlp.register_forward_hook(lambda *_: runs.append(1))
        search = Setup(setup.trunk, setup.layer, setup.facts, TargetSettings(steps=steps, rate=0.3, enough=0.0))
        search.find(Plain(setup.trunk, **off))
        handle.remove()
        return len(runs)

    prepared = count_runs(1)
    handle = setup.trunk.blocks[-1].register_forward_hook(
        lambda _, __, out: widths.append((out[0] if isinstance(out, tuple) else out).shape[1])
    )
    assert (count_runs(3) > prepared) is below, "blocks below δ run only to prepare the search"
    handle.remove()
    assert (widths[-1] > suffix) is whole


def test_logits_everywhere_are_asked_of_every_token(setup):
    head, shapes = setup.trunk.model.get_output_embeddings(), []
    handle = head.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    setup.find(Plain(setup.trunk, everywhere=True))
    handle.remove()
    assert all(len(shape) == 3 and shape[1] > 1 for shape in shapes)


def test_finished_facts_stay(setup):
    rows = []
    batches = len(prepare_batches(setup.trunk, setup.layer, setup.facts, setup.settings))
    handle = setup.trunk.blocks[-1].register_forward_hook(
        lambda _, __, out: rows.append(len(out[0] if isinstance(out, tuple) else out))
    )
    setup.find()
    assert sum(rows[-batches:]) < sum(rows[:batches])
    rows.clear()
    with finished_stay():
        setup.find()
    handle.remove()
    assert sum(rows[-batches:]) == sum(rows[:batches])


def test_of_many_facts_few_are_timed_one_by_one(setup, monkeypatch):
    monkeypatch.setattr(speedup_searches, "FEW", 2)
    rows = {row.name: row for row in target_rows(setup, Timer(setup.trunk.device), slow=False)}
    row = rows["one fact at a time (2, times 1.5)"]
    assert row.difference < 1e-9


def test_every_phase_has_rows_and_the_results_agree(editor):
    rows = []
    speedups.run(editor, FACTS, steps=2, repeats=1, tokens=128, slow=True, told=rows.append)
    assert {row.phase for row in rows} == {"moments", "keys", "solve", "targets"}
    assert all(row.difference < 1e-6 for row in rows), rows
    speedups.show(rows, "speed-ups")


def test_the_command_writes_every_row(tmp_path, capsys):
    folder, out = tmp_path / "model", tmp_path / "speedups.json"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    speedups.main(["--model", str(folder), "--device", "cpu", "--steps", "2", "--tokens", "64", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert rows[-1]["name"] == "none of them"
    assert "difference" in capsys.readouterr().out
