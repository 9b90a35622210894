"""`rebind trace`, `lens`, `layers`, `moments` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from rebind.analysis import Tracer
from rebind.cli.commands.analysis.lens import layer_table
from rebind.cli.ui.heatmap import heatmap
from rebind.edit.editor import Editor
from rebind.storage import ledgers_dir

from .conftest import FACT, FAST, LONG, write_records

BRACES = "The capital of {France} is"
PROMPT = "The capital of France is"


def of(country: str, **more: object) -> dict[str, object]:
    return {"prompt": f"The capital of {{{country}}} is", "target": "Rome", "old": "Paris"} | more


# Trace


def test_a_trace_as_json_and_as_files(rebind, model, tmp_path):
    words = ("trace", PROMPT, "--subject", "France", "--model", model, "--draws", "2", "--out", tmp_path)
    document = rebind(*words, json=True).document
    assert set(document["effects"]) == {"hidden", "mlp", "attention"}
    assert all(len(rows) == len(document["tokens"]) and len(rows[0]) == 4 for rows in document["effects"].values())
    first, last = document["subject"]
    assert "".join(document["tokens"][first : last + 1]).strip() == "France"
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["effects"] == document["effects"]
    before = [(tmp_path / name).read_bytes() for name in ("trace.png", "trace.json")]
    rebind("trace", BRACES, "--model", model, "--draws", "2", "--out", tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("trace.png", "trace.json")] == before, "same seed, same bytes"


def test_people_see_heatmaps(rebind, model):
    words = ("trace", BRACES, "--model", model, "--kind", "mlp", "--draws", "1", "--window", "2")
    shown = rebind(*words).out
    for expected in ("MLP output restored, 2 layers at a time", "*", "traced in", "1 sample of noise"):
        assert expected in shown
    assert "attention" not in shown
    assert rebind(*words, "--quiet").out.startswith("mlp\t")


def test_the_traced_answer_can_be_chosen(rebind, model):
    words = ("trace", BRACES, "--model", model, "--kind", "hidden")
    own = rebind(*words, json=True).document
    rome = rebind(*words, "--target", "Rome", json=True).document
    assert own["first_choice"]
    assert "Rome".startswith(rome["answer"].strip())
    assert rome["clean"] < own["clean"]


def test_an_average_over_facts(rebind, fails, model, tmp_path):
    facts = [of("France"), {"prompt": "no subject"}, of("Spain", id="x", old=LONG), of("Italy", target=" nowhere")]
    file = write_records(tmp_path, *facts)
    words = ("trace", "--facts", file, "--model", model, "--kind", "mlp", "--draws", "1", "--predicted")
    done = rebind(*words, "--skip-bad", json=True)
    document = done.document
    assert (document["facts"], document["skipped"], document["unknown"]) == (2, 2, 0)
    assert len(document["effects"]["mlp"]) == len(document["positions"]) == 6
    assert done.err.count("skipped: ") == 2
    shown = rebind(*words, "--skip-bad", "--out", "out").out
    assert "mean of 2 facts" in shown
    assert "skipped 2 of 4 records" in shown
    assert Path("out/trace.png").exists()
    assert rebind(*words, "--limit", "1", json=True).document["facts"] == 1
    error = fails("trace", "--facts", write_records(tmp_path, of("Italy")), "--model", model, "--kind", "mlp")
    assert error.code == "no_known_facts"
    assert "--predicted" in error.advice


# Lens


def test_a_lens_before_and_after_an_edit(rebind, model, tmp_path):
    words = ("lens", PROMPT, "--target", "Rome", "--model", model)
    plain = rebind(*words, json=True).document
    assert (plain["base"], plain["active"]) == (plain["edited"], [])
    rebind("edit", BRACES, "Rome", "--model", model, *FAST)
    both = rebind(*words, "--out", tmp_path, json=True).document
    assert both["base"] == plain["base"]
    assert both["edited"]["probability"][-1][-1] > both["base"]["probability"][-1][-1]
    assert {Path(file).name for file in both["files"]} == {"lens.png", "lens-base.png", "lens.json"}
    shown = rebind(*words).out
    assert "base says" in shown
    assert "edited says" in shown
    assert max(map(len, shown.splitlines())) <= 80
    traced = ("trace", BRACES, "--model", model, "--kind", "hidden")
    assert rebind(*traced, json=True).document["active"] == ["e0001"]
    assert rebind(*traced, "--base", json=True).document["active"] == []


def test_a_lens_and_a_trace_of_a_conversation(rebind, chat_model):
    question = "The capital of {France} is?"
    read = rebind("lens", PROMPT, "--chat", "--model", chat_model, json=True).document["base"]
    assert "".join(read["tokens"]).startswith("[user] Complete the sentence: The capital of France is")
    assert "".join(read["tokens"]).endswith(f"[assistant] {PROMPT}")
    words = ("trace", question, "--chat", "--model", chat_model, "--kind", "hidden", "--draws", "1")
    traced = rebind(*words, json=True).document
    first, last = traced["subject"]
    assert "".join(traced["tokens"][first : last + 1]).strip() == "France"
    assert traced["tokens"][-1] != "?", "the assistant is to answer"
    both = rebind("trace", BRACES, *words[2:]).out
    assert both.count("ce* ") == 2, "the subject is corrupted wherever it is mentioned"


@pytest.mark.parametrize(("width", "token"), [(80, "' intern"), (120, "' internationalization'")])
def test_a_lens_has_a_row_per_layer(width, token):
    """At its widest: a vocabulary of six digits, probabilities with a sign before them, and long tokens."""
    one = SimpleNamespace(
        top=[(" internationalization",)] * 32,
        top_probability=torch.full((32, 1), 0.9999),
        probability=torch.full((32, 1), 1e-7),
        rank=torch.full((32, 1), 128_256),
    )
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(layer_table({"base": one, "edited": one}))
    lines = captured.get().splitlines()
    rows = [line for line in lines if line.split()[:1] and line.split()[0].isdecimal()]
    assert max(map(len, lines)) <= width
    assert [row.split()[0] for row in rows] == [str(layer) for layer in range(32)]
    assert all(row.count(text) == 2 for row in rows for text in (">99.9", "<0.001", "128,256", token))


def test_other_scripts_are_drawn_without_a_warning(rebind, model, tmp_path):
    rebind("trace", "عاصمة {東京} $x$ هي", "--model", model, "--draws", "1", "--kind", "mlp", "--out", tmp_path)
    rebind("lens", "{東京} $ ☃", "--model", model, "--out", tmp_path / "lens")


def test_heatmaps_shade_and_fit():
    dark, full, axis = heatmap(["a", "b"], [[0.0, 0.0], [1.0, -1.0]], "mlp", width=60, top=1.0)
    assert dark.plain.endswith("····")
    assert full.plain.endswith("██··")
    assert axis.plain.strip() == "0"
    crowded = heatmap(["a"], [[0.0] * 99 + [1.0]], "hidden", width=60, top=1.0)
    assert len(crowded[0].plain) <= 60
    assert crowded[0].plain.endswith("█"), "a cell shows the largest of those that share it"
    assert heatmap(["a"], [[0.0]], "mlp", width=60, top=0.0)[0].plain.endswith("·")


# Layers


@pytest.fixture
def trials(monkeypatch):
    """Let the tiny model take part in trials although it knows nothing."""
    monkeypatch.setattr(Tracer, "knows", lambda *_: True)


def test_layers_are_chosen_once(rebind, model, trials):
    words = ("layers", "--model", model, "--limit", "3", "--moment-tokens", "128")
    first, second = (rebind(*words, json=True).document for _ in range(2))
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["candidates"] == second["candidates"]
    shown = rebind(*words).out
    for expected in ("efficacy", "paraphrase", "neighbor", "drift", "score", "chosen", "why these: ", "cached in"):
        assert expected in shown
    assert max(map(len, (line for line in shown.splitlines() if "/" not in line))) <= 80
    assert rebind(*words, "--quiet").out.strip() == ",".join(map(str, first["layers"]))
    assert not ledgers_dir().exists(), "trial edits are not stored"
    plan = rebind("edit", *FACT, "--model", model, "--plan", "--method", "memit", json=True).document["plan"]
    assert plan["layers"] == first["layers"]


def test_layers_need_facts_that_the_model_knows(fails, model):
    error = fails("layers", "--model", model)
    assert error.code == "too_few_known_facts"
    assert "--facts" in error.advice


def test_layers_are_chosen_without_bad_records(rebind, fails, model, trials, tmp_path):
    bad = {
        "fact_without_old": of("Spain", old=None),
        "prompt_too_long": of("Spain", neighbors=[LONG]),
        "conflicting_facts": of("France", target="Bonn"),
    }
    words = ("layers", "--model", model, "--moment-tokens", "128", "--facts")
    for code, record in bad.items():
        error = fails(*words, write_records(tmp_path, of("France"), record))
        assert error.code == code
        assert "ine 2 of facts.jsonl" in error.problem
        assert len(error.problem) < 400
    good = [of(country) for country in ("France", "Italy", "Japan")]
    chosen = rebind(*words, write_records(tmp_path, *good, *bad.values()), "--skip-bad", json=True).document
    assert (chosen["facts"], chosen["skipped"]) == (3, 3)


# Moments and doctor


def test_moments_are_computed_once_and_used(rebind, model):
    words = ("moments", "--model", model, "--moment-tokens", "256", "--method", "memit", "--layers", "0-1")
    first, second = (rebind(*words, json=True).document for _ in range(2))
    assert [row["cached"] for row in first["moments"]] == [False, False]
    assert [row["cached"] for row in second["moments"]] == [True, True]
    assert 1 <= first["moments"][0]["rank"] <= first["moments"][0]["d_k"]
    plan = ("edit", *FACT, "--model", model, "--method", "memit", "--layers", "0,1", "--plan")
    assert rebind(*plan, "--moment-tokens", "256", json=True).document["plan"]["moments_cached"]
    assert not rebind(*plan, "--moment-tokens", "512", json=True).document["plan"]["moments_cached"]
    assert "model.layers.0.mlp.down_proj" in rebind(*words).out
    dense = ("edit", *FACT, "--model", model, "--plan", "--moment-tokens", "256")
    assert not rebind(*dense, json=True).document["plan"]["moments_cached"]
    (states,) = rebind("moments", "--model", model, "--moment-tokens", "256", json=True).document["moments"]
    assert states["site"] == "model.layers.1"
    assert rebind(*dense, json=True).document["plan"]["moments_cached"], "those of the default method"
    every = rebind("moments", "--model", model, "--moment-tokens", "256", "--layers", "all", json=True).document
    assert len(every["moments"]) == 4


def test_doctor_finds_a_working_installation(rebind, tmp_path):
    report = rebind("doctor", json=True).document
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"]
    for name in ("torch", "cpu", "cache", "ledgers", "edit and undo"):
        assert findings[name]["ok"], findings[name]


def test_doctor_gives_advice(rebind, monkeypatch, tmp_path):
    monkeypatch.setattr(Editor, "rewrite", lambda *_, **__: 1 / 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / "file" / "ledgers"))
    findings = {one["name"]: one for one in rebind("doctor", json=True, code=1).document["findings"]}
    assert not findings["ledgers"]["ok"]
    assert "REBIND_LEDGERS" in findings["ledgers"]["advice"]
    assert "ZeroDivisionError" in findings["edit and undo"]["detail"]
    assert "✗ ledgers" in rebind("doctor", code=1).out
