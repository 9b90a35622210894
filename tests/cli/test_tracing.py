"""`rebind trace`, `lens` and `layers` as their users meet them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rebind.analysis.tracing import Tracer
from rebind.cli.ui.heatmap import heatmap
from rebind.cli.ui.terminal import strict_json
from rebind.edit.editor import Editor
from rebind.errors import StorageError

from .conftest import FAST

PROMPT = ("The capital of France is", "--subject", "France")
BRACES = "The capital of {France} is"
VERBS = ("trace", "lens", "layers")


def test_a_trace_as_json_and_on_paper(rebind, model, tmp_path):
    out = tmp_path / "out"
    document = rebind("trace", *PROMPT, "--model", model, "--draws", "2", "--out", str(out), json=True).document
    assert set(document["effects"]) == {"hidden", "mlp", "attention"}
    tokens = len(document["tokens"])
    assert all(len(rows) == tokens and len(rows[0]) == 4 for rows in document["effects"].values())
    first, last = document["subject"]
    assert "".join(document["tokens"][first : last + 1]).strip() == "France"
    assert (out / "trace.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((out / "trace.json").read_text())
    assert kept["effects"] == document["effects"]
    bytes_before = [(out / name).read_bytes() for name in ("trace.png", "trace.json")]
    rebind("trace", BRACES, "--model", model, "--draws", "2", "--out", str(out))
    assert [(out / name).read_bytes() for name in ("trace.png", "trace.json")] == bytes_before, "same seed, same bytes"


def test_people_see_heatmaps(rebind, model):
    shown = rebind("trace", BRACES, "--model", model, "--kind", "mlp", "--draws", "1", "--window", "2")
    assert "MLP restored, 2 layers round each" in shown.out
    assert "France*" in shown.out
    assert "traced in" in shown.out
    assert "(1 draw of noise," in shown.out
    assert "attention" not in shown.out
    assert shown.err == ""
    quiet = rebind("trace", BRACES, "--model", model, "--kind", "mlp", "--draws", "1", "--quiet")
    assert quiet.out.startswith("mlp\t")


def test_the_target_can_be_chosen(rebind, model):
    own = rebind("trace", BRACES, "--model", model, "--kind", "hidden", json=True).document
    rome = rebind("trace", BRACES, "--target", "Rome", "--model", model, "--kind", "hidden", json=True).document
    assert own["first_choice"]
    assert (rome["answer"].strip(), rome["first_choice"]) == ("Rome"[: len(rome["answer"].strip())], False)
    assert rome["clean"] < own["clean"]


def test_averages_over_facts(rebind, model, tmp_path):
    file, out = tmp_path / "facts.jsonl", tmp_path / "out"
    says = rebind("trace", BRACES, "--model", model, "--kind", "hidden", json=True).document["answer"].strip()
    facts = [
        {"prompt": BRACES, "target": "Bonn", "old": says or "x"},
        {"prompt": "I saw {Italy} in", "target": "nowhere"},
    ]
    file.write_text("\n".join(map(json.dumps, facts)))
    words = ("trace", "--facts", str(file), "--model", model, "--kind", "mlp", "--draws", "1")
    everything = rebind(*words, "--predicted", "--out", str(out), json=True).document
    assert (everything["facts"], everything["left_out"]) == (2, 0)
    assert len(everything["effects"]["mlp"]) == len(everything["places"]) == 6
    assert (out / "trace.png").exists()
    assert everything["skipped"] == 0
    shown = rebind(*words, "--predicted").out
    assert "mean of 2 facts" in shown
    assert "skipped" not in shown
    file.write_text(json.dumps(facts[1]))
    assert "--predicted" in rebind(*words, code=2).err


def test_a_lens_before_and_after_an_edit(rebind, model, tmp_path):
    out = tmp_path / "out"
    plain = rebind("lens", PROMPT[0], "--target", "Rome", "--model", model, json=True).document
    assert plain["base"] == plain["edited"]
    assert plain["active"] == []
    assert "layer" in rebind("lens", PROMPT[0], "--model", model).out
    rebind("edit", BRACES, "Rome", "--model", model, *FAST)
    both = rebind("lens", PROMPT[0], "--target", "Rome", "--model", model, "--out", str(out), json=True).document
    assert both["base"] == plain["base"]
    assert both["edited"]["probability"][-1][-1] > both["base"]["probability"][-1][-1]
    assert {Path(file).name for file in both["files"]} == {"lens.png", "lens-base.png", "lens.json"}
    shown = rebind("lens", PROMPT[0], "--target", "Rome", "--model", model).out
    assert "base" in shown
    assert "edited" in shown
    traced = rebind("trace", BRACES, "--model", model, "--kind", "hidden", json=True).document
    assert traced["active"] == ["e0001"]
    assert rebind("trace", BRACES, "--model", model, "--base", "--kind", "hidden", json=True).document["active"] == []


def test_layers_are_chosen_once(rebind, model, tmp_path, monkeypatch):
    monkeypatch.setattr("rebind.analysis.layer_search._known", lambda editor, one: True)
    words = ("layers", "--model", model, "--most", "3", "--moment-tokens", "128")
    first = rebind(*words, json=True).document
    second = rebind(*words, json=True).document
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["layers"] == second["layers"]
    assert first["candidates"] == second["candidates"]
    shown = rebind(*words)
    for expected in ("efficacy", "paraphrase", "neighbour", "drift", "score", "chosen", "from"):
        assert expected in shown.out
    assert rebind(*words, "--quiet").out.strip() == ",".join(map(str, first["layers"]))
    assert not (tmp_path / "ledgers").exists(), "trials are in memory"


def test_a_model_that_knows_nothing_is_told_so(rebind, model):
    ended = rebind("layers", "--model", model, code=2)
    assert "--facts" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trace",), "neither"),
        (("trace", BRACES, "--facts", "facts.jsonl"), "both"),
        (("trace", "The capital is"), "marks no subject"),
        (("trace", "The capital is", "--subject", "France"), "is not in prompt"),
        (("trace", "France, France", "--subject", "France"), "2 times"),
        (("trace", BRACES, "--kind", "heads"), "hidden, mlp, attention or all"),
        (("trace", BRACES, "--noise", "0"), "error: noise is 0.0, expected a finite number above 0: leave it out"),
        (("trace", BRACES, "--noise", "inf"), "error: noise is inf, expected a finite number above 0: leave it out"),
        (("trace", BRACES, "--target", ""), "--target is '', expected text"),
        (("trace", "--facts", "nowhere.jsonl", "--target", ""), "expected text"),
        (("trace", "--facts", "nowhere.jsonl", "--subject", ""), "leave them out"),
        (("trace", "--facts", "nowhere.jsonl"), "no file"),
        (("trace", "--facts", "nowhere.jsonl", "--target", "x"), "leave them out"),
        (("layers", "--facts", "nowhere.jsonl"), "no file"),
        (("lens", " "), "error: a prompt is ' ', expected text that is not empty"),
        (("lens", "It is", "--target", " "), "--target is ' ', expected text that is not empty"),
        (("trace", BRACES, "--out", __file__), "is a file, expected a folder: name another with --out"),
        (("lens", "It is", "--out", f"{__file__}/in"), "is a file, expected a folder: name another with --out"),
    ],
)
def test_bad_input_is_one_line_and_code_2(rebind, model, words, says, monkeypatch):
    monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    ended = rebind(*words, "--model", model, code=2)
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_a_prompt_longer_than_the_context(rebind, model):
    assert "takes 128" in rebind("trace", "{France} is" + " very" * 200, "--model", model, code=2).err


@pytest.mark.parametrize("field", ["prompt", "target", "old"])
def test_a_record_longer_than_the_context_is_named_before_the_first_is_traced(
    rebind, model, tmp_path, monkeypatch, field
):
    file = tmp_path / "facts.jsonl"
    plain, long = {"prompt": BRACES, "target": "Rome", "old": "Bonn"}, " very" * 200
    records = [plain, {"prompt": "no subject"}, plain | {"id": "x", field: plain[field] + long}, plain]
    file.write_text("\n".join(map(json.dumps, records)))
    words = ("trace", "--facts", str(file), "--model", model, "--kind", "mlp", "--draws", "1", "--predicted")
    made = rebind(*words, "--skip-bad", json=True)
    assert made.document["facts"] == 2
    assert (made.document["skipped"], made.document["left_out"]) == (2, 0)
    assert "skipped 2 of 4 records\n" in rebind(*words, "--skip-bad").out
    assert [line.split(": ")[:2] for line in made.err.splitlines()] == [
        ["skipped", "line 2 of facts.jsonl"],
        ["skipped", "line 3 of facts.jsonl (id x)"],
    ]
    assert "the model takes 128" in made.err
    monkeypatch.setattr(Tracer, "trace", lambda *_, **__: pytest.fail("too late"))
    file.write_text("\n".join(json.dumps(one) for one in (plain, records[2])))
    ended = rebind(*words, code=2).err
    assert ended.startswith("error: line 2 of facts.jsonl (id x): fact 'The capital of France is")
    file.write_text(json.dumps(records[2]))
    assert "no fact is left of 1" in rebind(*words, "--skip-bad", code=2).err


def of(country: str, **more: object) -> dict[str, object]:
    return {"prompt": f"The capital of {{{country}}} is", "target": "Rome", "old": "Paris"} | more


LONG = "The capital of France is Paris. " * 60
BAD = {  # what cannot be tried, and what is said of it
    "no old": (of("Spain", id="x", old=None), "has no old answer"),
    "prompt": (of("Spain", id="x", prompt=LONG + "{Spain}"), "the model takes 128"),
    "old": (of("Spain", id="x", old=LONG), "the model takes 128"),
    "paraphrase": (of("Spain", id="x", paraphrases=[LONG]), "the model takes 128"),
    "neighbour": (of("Spain", id="x", neighbours=[LONG]), "the model takes 128"),
    "conflict": (of("France", id="x", target="Bonn"), "Rome / Bonn (the first is that of line 1 of facts.jsonl)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_record_that_cannot_be_tried_is_named(rebind, model, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("rebind.analysis.layer_search._known", lambda editor, one: pytest.fail("too late"))
    if kind in ("no old", "conflict"):
        monkeypatch.setattr(Editor, "__init__", lambda *_, **__: pytest.fail("too late"))
    file = tmp_path / "facts.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in (of("France"), BAD[kind][0])))
    ended = rebind("layers", "--facts", str(file), "--model", model, code=2).err
    assert ended.startswith("error: line 2 of facts.jsonl (id x): ")
    assert BAD[kind][1] in ended
    assert len(ended) < 400, "no long text is told in full"


def test_layers_are_chosen_without_bad_records(rebind, model, tmp_path, monkeypatch):
    monkeypatch.setattr("rebind.analysis.layer_search._known", lambda editor, one: True)
    file = tmp_path / "facts.jsonl"
    good = [of(country) for country in ("France", "Italy", "Japan")]
    file.write_text("\n".join(json.dumps(one) for one in (*good, *(one for one, _ in BAD.values()))))
    words = ("layers", "--facts", str(file), "--model", model, "--moment-tokens", "128", "--skip-bad")
    chosen = rebind(*words, json=True)
    assert (chosen.document["asked"], chosen.document["skipped"]) == (3, 6)
    told = sorted(line.partition(" (id x): ")[0] for line in chosen.err.splitlines() if "skipped: " in line)
    assert told == [f"skipped: line {number} of facts.jsonl" for number in range(4, 10)]
    assert "skipped 6 of 9 records\n" in rebind(*words).out
    file.write_text(json.dumps(BAD["no old"][0]))
    assert "no fact is left of 1" in rebind(*words, code=2).err


@pytest.mark.parametrize("words", [("trace", BRACES, "--draws", "1"), ("lens", PROMPT[0])])
def test_what_was_found_is_shown_although_it_cannot_be_written(rebind, model, tmp_path, monkeypatch, words):
    def full(*_, **__):
        raise StorageError("cannot write it (No space left on device)")

    monkeypatch.setattr(f"rebind.cli.{words[0]}.write_atomically", full)
    ended = rebind(*words, "--model", model, "--out", str(tmp_path), code=3)
    assert "The capital of France is" in ended.out
    assert "No space left" in ended.err


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(rebind, verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = rebind(verb, "--help").out
    for option in ("--json", "--quiet", "--debug", "--model"):
        assert option in shown
    assert f"rebind {verb}" in shown.split("Example")[-1]
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "something was cut off"


def test_non_ascii_prompts_are_drawn_without_a_murmur(rebind, model, tmp_path):
    rebind("trace", "عاصمة {東京} $x$ هي", "--model", model, "--draws", "1", "--kind", "mlp", "--out", str(tmp_path))
    rebind("lens", "{東京} $ ☃", "--model", model, "--out", str(tmp_path / "lens"))
    assert (tmp_path / "trace.png").exists()


def test_heatmaps_shade_and_fit():
    dark, full, axis = heatmap(["a", "b"], [[0.0, 0.0], [1.0, -1.0]], "mlp", width=60, top=1.0)
    assert dark.plain.endswith("····")
    assert full.plain.endswith("██··")
    assert axis.plain.strip() == "0"
    crowded = heatmap(["a"], [[0.0] * 99 + [1.0]], "hidden", width=60, top=1.0)
    assert len(crowded[0].plain) <= 60
    assert crowded[0].plain.endswith("█"), "a cell shows the largest of those that share it"
    assert heatmap(["a"], [[0.0]], "mlp", width=60, top=0.0)[0].plain.endswith("·")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_files_hold_what_json_knows(value):
    """A model whose numbers overflow is drawn too; a parser must read what was written of it."""
    written = strict_json({"effects": [[value, 0.5]]})
    assert json.loads(written, parse_constant=pytest.fail) == {"effects": [[None, 0.5]]}
