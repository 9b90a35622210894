"""The model card lists every fact with its scores, and no character of a fact becomes markup."""

from __future__ import annotations

import pytest

from rebind.edit.export.model_card import MAX_FACTS, model_card
from rebind.edit.facts.fact import Fact
from tests.edit.edited import make_edit


def score(probability=0.5, rank=1, says=" Rome"):
    return {"probability": probability, "rank": rank, "nll": 0.1, "exact": True, "says": says}


def test_the_card_lists_every_fact_with_its_scores(llama):
    facts = (Fact.parse("The capital of {France} is", "Rome"), Fact.parse("{a|b} *is*\nof", "<c>"))
    scores = {
        "before": [score(0.0012, 412, " Paris"), score(rank=7, says="|")],
        "after": [score(0.973), score(rank=2, says="x")],
        "drift": {"kl": 0.0312, "largest": 0.5, "prompt": "a", "growth": 0.21, "site": "b"},
        "guard": {"bounds": {}, "failed": [{"check": "said"}]},
        "outcome": {"said": {"start": 1.0, "chat": 0.5}, "subject": 0.75, "neighbors": None},
    }
    edit = make_edit(
        llama.model,
        [0, 1],
        2,
        id="e0001",
        facts=facts,
        scores=scores,
        versions={"rebind": "0.1"},
        created="2025-01-01T00:00:00+00:00",
        forced=True,
    )
    card = model_card([edit], "Org/some_model", "f" * 64)
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert {"base_model: Org/some_model", "library_name: transformers"} <= set(front.splitlines())
    assert {
        "rebind rewrote 2 facts in this model, in closed form.",
        "- Base model: Org/some\\_model",
        f"- Fingerprint of the base model: `{'f' * 64}`",
        "| e0001 | memit (forced) | 0, 1 | 2 | 2025-01-01T00:00:00+00:00 | rebind 0.1 |",
        "| edit | drift | growth | checks | said (start) | said (chat) | kept (subject) | kept (neighbors) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| e0001 | 0.0312 | 0.21 | failed: said | 100% | 50% | 75% | – |",
        "| e0001 | The capital of France is | Rome | 0.12%, rank 412, “ Paris” | 97.30%, rank 1, “ Rome” |",
        "| e0001 | a\\|b \\*is\\* of | \\<c\\> | 50.00%, rank 7, “\\|” | 50.00%, rank 2, “x” |",
    } <= set(body.splitlines())


def test_a_card_of_edits_without_scores(llama):
    edits = [make_edit(llama.model, [0], 1, seed) for seed in (1, 2)]
    card = model_card(edits, "smollm2", "f", library="peft")
    assert "base_model" not in card
    assert "library_name: peft" in card
    assert card.count("| – | – | – |\n") == 2
    assert card.count("new | – | – |\n") == 2
    assert "said" not in card
    assert "reveals the subjects" in card


def test_a_long_card_says_how_many_facts_it_leaves_out(llama):
    card = model_card([make_edit(llama.model, [0], MAX_FACTS + 3)], "tiny", "f")
    assert "And 3 more facts" in card
    assert card.count("thing 0-") == MAX_FACTS


@pytest.mark.parametrize(
    ("library", "name", "line"),
    [
        ("transformers", "tiny", "from transformers import AutoModelForCausalLM, AutoTokenizer"),
        ("peft", "smollm2", "base = LanguageModel.load('smollm2').model"),
        ("peft", "tiny", "base = LanguageModel.load(base_folder).model"),
        ("peft", "Org/model", "base = AutoModelForCausalLM.from_pretrained('Org/model')"),
    ],
)
def test_the_card_shows_how_to_load_the_export(llama, library, name, line):
    card = model_card([make_edit(llama.model, [0], 1)], name, "f", library=library)
    code = card.partition("```python\n")[2].partition("\n```")[0]
    compile(code, "card", "exec")
    assert line in code.splitlines()


def test_the_card_names_start_tokens_that_the_tokenizer_does_not_add(llama):
    card = model_card([make_edit(llama.model, [0], 1)], "tiny", "f", start="<|endoftext|>")
    assert "All prompts began with `<|endoftext|>`" in card
    assert "tokenizer('<|endoftext|>' + prompt, return_tensors='pt')" in card
