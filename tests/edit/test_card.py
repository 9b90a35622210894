"""The model card: every fact with its scores, no character of it taken for markup."""

from __future__ import annotations

import pytest

from rebind.edit.export.model_card import LISTED, model_card
from rebind.edit.facts.fact import Fact
from rebind.models.tokenizer import unwritten_start
from tests.edit.edited import make_edit


def scored(**changes):
    return {"probability": 0.5, "rank": 1, "nll": 0.1, "exact": True, "says": " Rome", **changes}


def test_the_card_lists_every_fact_with_its_scores(llama):
    facts = (Fact.parse("The capital of {France} is", "Rome"), Fact.parse("{a|b} *is*\nof", "<c>"))
    before = [scored(probability=0.0012, rank=412, says=" Paris"), scored(rank=7, says="|")]
    after = [scored(probability=0.973), scored(rank=2, says="x")]
    edit = make_edit(
        llama.model,
        [0, 1],
        2,
        id="e0001",
        facts=facts,
        scores={"before": before, "after": after},
        versions={"rebind": "0.1"},
        created="2025-01-01T00:00:00+00:00",
        forced=True,
    )
    card = model_card([edit], "Org/some_model", "f" * 64)
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert "base_model: Org/some_model" in front.splitlines()
    assert "library_name: transformers" in front.splitlines()
    lines = body.splitlines()
    assert "## Edits" in lines
    assert "2 facts rewritten" in body
    assert "- Base model: Org/some\\_model" in lines
    assert f"- Fingerprint of the base: `{'f' * 64}`" in lines
    assert "| e0001 | memit (forced) | 0, 1 | 2 | 2025-01-01T00:00:00+00:00 | rebind 0.1 |" in lines
    assert "| e0001 | The capital of France is | Rome | 0.12%, rank 412, “ Paris” | 97.30%, rank 1, “ Rome” |" in lines
    assert "| e0001 | a\\|b \\*is\\* of | \\<c\\> | 50.00%, rank 7, “\\|” | 50.00%, rank 2, “x” |" in lines


def test_a_card_without_scores_or_a_hub_name(llama):
    edits = [make_edit(llama.model, [0], 1, 1, scores={"before": 0.5}), make_edit(llama.model, [0], 1, 2, settings={})]
    card = model_card(edits, "smollm2", "f", library="peft")
    assert "base_model" not in card
    assert "library_name: peft" in card
    assert card.count("| – | – |") == 2
    assert "| model.layers.0.mlp.down\\_proj |" in card  # no layers in the settings: the sites


def test_a_long_card_says_what_it_leaves_out(llama):
    edit = make_edit(llama.model, [0], LISTED + 3)
    card = model_card([edit], "tiny", "f")
    assert "And 3 more facts: the ledger has them all." in card
    assert card.count("thing 0-") == LISTED
    assert "more facts" not in model_card([make_edit(llama.model, [0], 3)], "tiny", "f")


@pytest.mark.parametrize(
    ("library", "name", "lines"),
    [
        ("transformers", "tiny", ["from transformers import AutoModelForCausalLM, AutoTokenizer"]),
        ("peft", "smollm2", ["from peft import PeftModel", "base = load_model('smollm2').model"]),
        ("peft", "tiny", ["base = load_model(base_folder).model"]),
        ("peft", "Org/model", ["base = AutoModelForCausalLM.from_pretrained('Org/model')"]),
    ],
)
def test_the_card_says_how_it_is_loaded(llama, library, name, lines):
    card = model_card([make_edit(llama.model, [0], 1)], name, "f", library=library)
    code = card.partition("```python\n")[2].partition("\n```")[0]
    compile(code, "card", "exec")
    assert set(lines) <= set(code.splitlines())
    assert "in front by itself" not in card


def test_the_card_says_what_stood_before_every_prompt(llama):
    card = model_card([make_edit(llama.model, [0], 1)], "tiny", "f", start="<|endoftext|>")
    assert "after `<|endoftext|>`, which the tokenizer does not put in front by itself" in card
    assert "tokenizer('<|endoftext|>' + prompt, return_tensors='pt')" in card


class Tokenizer:
    def __init__(self, front):
        self.front = front

    def __call__(self, text):
        return {"input_ids": [*self.front, 5]}

    def convert_ids_to_tokens(self, ids):
        return [f"<{one}>" for one in ids]


@pytest.mark.parametrize(("front", "start", "text"), [((1,), (1,), ""), ((), (1,), "<1>"), ((), (), "")])
def test_what_a_tokenizer_leaves_out(front, start, text):
    assert unwritten_start(Tokenizer(front), start) == text
