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
    return Setup(editor.language_model.trunk, 1, editor.fact_prompts(FACTS), TargetSettings(steps=8, enough=5.2))


def test_every_search_finds_the_same(setup):
    expected = setup.find()
    steps = find_targets(setup.trunk, setup.layer, setup.facts, setup.settings).steps
    assert 0 < int(steps.min()) < int(steps.max()), "some facts are done before others"
    for name, call in (searches(setup) | searches_one_by_one(setup)).items():
        assert difference(call(), expected) < 1e-9, name


@pytest.mark.parametrize(
    ("off", "tokens", "blocks", "heads"),
    [({}, "suffix", 0, "few"), ({"whole": True}, "all", 0, "few"), ({"below": True}, "suffix", 1, "few")],
)
def test_a_plain_trunk_does_the_work(setup, off, tokens, blocks, heads):
    """Or the rows would compare a thing with itself."""
    widths, ran = [], []
    first, last = setup.trunk.blocks[0], setup.trunk.blocks[-1]
    hooks = [
        last.register_forward_hook(lambda _, __, out: widths.append((out[0] if isinstance(out, tuple) else out).shape)),
        first.mlp.register_forward_hook(lambda *_: ran.append(1)),
    ]
    Setup(setup.trunk, setup.layer, setup.facts, TargetSettings(steps=3, enough=0.0)).find(Plain(setup.trunk, **off))
    for hook in hooks:
        hook.remove()
    suffix = max(request.size[2] for request in setup.facts)
    assert (widths[-1][1] > suffix) is (tokens == "all")
    assert (len(ran) > 3) is bool(blocks)


def test_logits_everywhere_are_asked_of_every_token(setup):
    head, shapes = setup.trunk.model.get_output_embeddings(), []
    handle = head.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    setup.find(Plain(setup.trunk, everywhere=True))
    handle.remove()
    assert all(len(shape) == 3 and shape[0] > 1 for shape in shapes)


def test_finished_facts_stay(setup):
    rows = []
    handle = setup.trunk.blocks[-1].register_forward_hook(
        lambda _, __, out: rows.append(len(out[0] if isinstance(out, tuple) else out))
    )
    setup.find()
    assert rows[-1] < rows[0]
    rows.clear()
    with finished_stay():
        setup.find()
    handle.remove()
    assert set(rows) == {rows[0]}


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
