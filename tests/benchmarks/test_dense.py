"""The benchmark of the dense memory, on a tiny model."""

from __future__ import annotations

import torch

from benchmarks.dense import Comparison, Text, nearest_key, rows_of
from benchmarks.framings import Bench
from rebind.edit import Fact
from tests import tiny
from tests.edit.editors import open_editor

TEXT = "\n".join([*tiny.SENTENCES, *tiny.SENTENCES])
FACTS = [
    Fact.parse(
        f"The capital of {{{subject}}} is",
        "Rome",
        old="Paris",
        paraphrases=[f"{subject} has the capital"],
        neighbors=["The capital of Italy is"],
    )
    for subject in ("France", "Spain", "Norway")
]


def chat_editor():
    tokenizer = tiny.tokenizer()
    editor = open_editor()
    template = "{% for turn in messages %}[{{ turn['role'] }}] {{ turn['content'] }}\n{% endfor %}"
    editor.language_model.tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tiny.END)
    editor.language_model.tokenizer.chat_template = template
    return editor


def test_every_method_has_rows_and_leaves_the_model_as_it_was():
    editor = chat_editor()
    bench = Bench(editor, [], FACTS, "")
    text = Text.split(editor, TEXT, FACTS, 200)
    assert "France" in text.mentioning
    assert "France" not in text.other
    base = tiny.weights(editor.model)
    comparison = Comparison(bench, FACTS, FACTS, text, batch=2)
    rows = list(rows_of(comparison, ["base", "dense", "memit", "grace"], [0.8], [0.5]))
    assert [row["method"] for row in rows] == ["base", "dense", "dense, τ 0.8", "memit", "grace, 0.5"]
    assert {"EA start", "S plain", "perplexity other", "same subject", "EA first batch"} <= set(rows[2])
    assert {"fires", "rows", "undo", "undo one", "phases"} <= set(rows[1])
    assert tiny.weights(editor.model) == base
    assert not editor.ledger.active


def test_only_states_near_a_key_change():
    editor = open_editor()
    ids = torch.tensor([tiny.tokenizer()("The capital of France is").input_ids])
    plain = editor.model(ids).logits
    states = editor.model(ids, output_hidden_states=True).hidden_states[2][0]
    for radius, same in ((0.0, True), (1e-3, False)):
        with nearest_key(editor.language_model, 1, states[2:3], torch.ones(1, tiny.HIDDEN), radius):
            assert torch.equal(editor.model(ids).logits, plain) is same
