"""The cost of an edit on random models: every phase is told, and memory and facts are what they should be."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import growth
from rebind.edit.facts.conflicts import conflicts


def test_invented_facts_are_about_different_subjects():
    facts = growth.invented(1000)
    assert len({fact.subject for fact in facts}) == 1000
    assert not conflicts(facts)
    assert len({(fact.text, fact.target) for fact in facts}) == len(facts)


@pytest.mark.parametrize("shape", ["135M", "1B", "3B", "8B"])
def test_shapes_have_the_size_they_are_named_after(shape):
    with torch.device("meta"):
        model = growth.build(shape, "meta", torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    named = float(shape[:-1]) * {"M": 1e6, "B": 1e9}[shape[-1]]
    assert named <= size * 1.01
    assert size < 1.3 * named


@pytest.mark.filterwarnings("ignore::rebind.memory.solve.NumericalWarning")
def test_a_run_tells_every_phase(tmp_path):
    out = tmp_path / "growth.json"
    arguments = ["--shapes", "tiny", "--n", "1", "3", "--device", "cpu", "--steps", "2", "--tokens", "256"]
    growth.main([*arguments, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["facts"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row["phases"]) == set(growth.PHASES)
        assert sum(row["phases"].values()) == pytest.approx(row["seconds"], rel=0.2)
        assert set(row["once"]) == set(growth.ONCE)
