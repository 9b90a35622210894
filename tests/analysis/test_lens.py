"""The lens shows what each layer would say; its last row is what the model says."""

from __future__ import annotations

import sys

import pytest
import torch

from rebind.analysis import Tracer, draw_lens, draw_trace, logit_lens
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from tests import tiny
from tests.analysis.test_tracing import family, language_model
from tests.support import assert_close, raises

PROMPT = "The capital of France is"


def lens_of(model, **options):
    return logit_lens(language_model(model), PROMPT, **options)


@pytest.mark.parametrize("name", ["gpt2", "gpt-j", "llama", "opt-post-norm", "gemma2", "cohere", "modernbert-decoder"])
def test_the_last_layer_is_what_the_model_says(name):
    """Final norms, projections, scales and soft caps included."""
    model = family(name)
    lens = lens_of(model)
    ids = torch.tensor([lens.prompt.ids])
    with torch.no_grad():
        expected = torch.softmax(model(input_ids=ids, use_cache=False).logits[0].double(), -1)
    assert lens.answer_id == int(expected[-1].argmax())
    assert_close(lens.probability[-1], expected[:, lens.answer_id], 1e-6)
    assert_close(lens.top_probability[-1], expected.max(-1).values, 1e-6)
    assert list(lens.top[-1]) == [tiny.tokenizer().decode([token]) for token in expected.argmax(-1).tolist()]
    assert lens.rank[-1, -1] == 1
    assert lens.appears is not None


def test_a_layer_is_read_through_the_final_norm_and_the_head():
    model = tiny.llama(dtype=torch.float64)
    lens = lens_of(model, target="Rome")
    with torch.no_grad():
        states = model(input_ids=torch.tensor([lens.prompt.ids]), use_cache=False, output_hidden_states=True)
        for layer in range(tiny.LAYERS - 1):  # the last of hidden_states is normed already
            expected = torch.softmax(model.lm_head(model.model.norm(states.hidden_states[layer + 1]))[0], -1)
            assert_close(lens.probability[layer], expected[:, lens.answer_id], 1e-6)
            assert lens.rank[layer].tolist() == ((expected > expected[:, [lens.answer_id]]).sum(-1) + 1).tolist()


def test_where_the_answer_appears():
    lens = lens_of(tiny.llama())
    depth = len(lens.rank)
    for column, expected in (([5, 1, 1, 1], 1), ([1, 1, 1, 1], 0), ([1, 1, 2, 1], 3), ([1, 1, 1, 2], None)):
        lens.rank[:, -1] = torch.tensor(column[:depth])
        assert lens.appears == expected


def test_another_models_answer_can_be_looked_for():
    lens = lens_of(tiny.llama(), answer_id=17)
    assert (lens.answer_id, lens.answer) == (17, tiny.tokenizer().decode([17]))


def test_a_figure_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    model = tiny.llama()
    lens, trace = lens_of(model), Tracer(language_model(model)).trace(Fact.parse("The capital of {France} is", "Rome"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw, result in ((draw_lens, lens), (draw_trace, trace)):
        with raises(InputError, "package_missing"):
            draw(result, tmp_path / "figure.png", title="title")


def test_a_prompt_longer_than_the_context_is_refused():
    with raises(InputError, "prompt_too_long"):
        logit_lens(language_model(tiny.llama()), "very " * 200)
