"""Decoding by recordings. Without a GPU a recording is the call itself, on the tensors that a graph would use."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch

from rebind.errors import CudaGraphWarning, InputError, ShapeError
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.lm import decoding
from rebind.nn.lm.decoding import recorded_decoding
from tests.support import assert_close

KINDS = ["linear-sum", "dpfp-delta", "delta", "gated-delta", "longhorn", "ttt-linear"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _model(kind="gated-delta", device="cpu"):
    torch.manual_seed(0)
    config = RebindConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, layer_kinds=kind, pad_token_id=0
    )
    return RebindForCausalLM(config).double().eval().to(device)


def _prompts(device="cpu"):
    ids = torch.randint(1, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = 0
    return {"input_ids": ids.to(device), "attention_mask": (ids != 0).long().to(device)}


@pytest.fixture
def played(monkeypatch):
    """Recordings that were made: calls that begin as a graph's would, after two runs."""
    made = []

    def graph(once, warm):
        for _ in range(warm):
            once()
        made.append(once)
        return once

    monkeypatch.setattr(decoding, "replay_of", graph)
    monkeypatch.setattr(decoding, "_on_gpu", lambda token: True)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_generated_is_the_same(played, kind, beams):
    model = _model(kind)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = model.generate(**_prompts(), **settings)
    with recorded_decoding(model):
        assert torch.equal(model.generate(**_prompts(), **settings), expected)
        assert torch.equal(model.generate(**_prompts(), **settings), expected)
    assert len(played) == 1
    assert torch.equal(model.generate(**_prompts(), **settings), expected)
    assert "forward" not in vars(model)


@torch.no_grad()
def test_conversations_do_not_meet(played):
    """Two caches in turn, one of which goes on after the recordings are over."""
    model = _model()
    tokens = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    whole = [model(row[None]).logits for row in tokens]
    with recorded_decoding(model):
        caches = [model(row[None, :4], use_cache=True).past_key_values for row in tokens]
        for at in range(4, 8):
            for row, cache, true in zip(tokens, caches, whole, strict=True):
                said = model(row[None, at : at + 1], past_key_values=cache).logits
                assert_close(said[:, 0], true[:, at], 1e-12)
        assert caches[0].seen == 8
    for row, cache, true in zip(tokens, caches, whole, strict=True):
        assert_close(model(row[None, 8:], past_key_values=cache).logits[:, 0], true[:, 8], 1e-12)
    assert len(played) == 1


@torch.no_grad()
@pytest.mark.parametrize("way", ["hidden states", "a masked token"])
def test_a_token_that_is_not_replayed_leaves_no_memory_behind(played, way):
    """It goes on in the recording's own tensors, which the next cache is written into."""
    model, token = _model(), torch.tensor([[3]])
    odd = {"output_hidden_states": True} if way == "hidden states" else {"attention_mask": torch.tensor([[1, 1, 1, 0]])}

    def talk():
        one, other = (model(torch.tensor([[1, first]]), use_cache=True).past_key_values for first in (5, 6))
        model(token, past_key_values=one)
        model(token, past_key_values=one, **odd)
        model(token, past_key_values=other)
        return model(token, past_key_values=one).logits

    expected = talk()
    with recorded_decoding(model):
        assert_close(talk(), expected, 1e-12)
    assert played


@torch.no_grad()
@pytest.mark.parametrize("recorded", [True, False])
def test_a_copy_of_a_cache_that_goes_on_leaves_the_cache_as_it_was(played, recorded):
    model, token = _model(), torch.tensor([[3]])
    with recorded_decoding(model) if recorded else nullcontext():
        cache = model(torch.tensor([[1, 5]]), use_cache=True).past_key_values
        model(token, past_key_values=cache)
        other = copy.copy(cache)
        found = [model(torch.tensor([[word]]), past_key_values=one).logits for word, one in ((7, other), (8, cache))]
    for one, word in zip(found, (7, 8), strict=True):
        assert_close(one[:, -1], model(torch.tensor([[1, 5, 3, word]])).logits[:, -1], 1e-12)
    assert bool(played) == recorded


def test_what_shadowed_forward_before_does_so_again(played):
    model = _model()
    given = torch.tensor([[1, 2]])
    with recorded_decoding(model), recorded_decoding(model):
        model.generate(given, max_new_tokens=3, do_sample=False)
    assert "forward" not in vars(model)
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    shadow = model.forward
    with recorded_decoding(model):
        model(given, None, None, None, given)  # labels by their place
    assert model.forward is shadow


def test_recorded_in_inference_mode_and_used_without(played):
    model, given = _model(), torch.tensor([[1, 2]])
    with recorded_decoding(model):
        with torch.inference_mode():
            expected = model.generate(given, max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(given, max_new_tokens=3, do_sample=False), expected)


@torch.no_grad()
def test_a_token_too_few_is_refused_as_ever(played):
    model = _model()
    with recorded_decoding(model):
        cache = model(torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values
        model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
        with pytest.raises(ShapeError):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


@torch.no_grad()
def test_logits_stay_when_the_next_token_comes(played):
    model = _model()
    token = torch.tensor([[3]])
    with recorded_decoding(model):
        cache = model(torch.tensor([[1, 2]]), use_cache=True).past_key_values
        first = model(token, past_key_values=cache).logits
        kept = first.clone()
        model(token + 1, past_key_values=cache)
    assert torch.equal(first, kept)


@torch.no_grad()
def test_each_batch_size_has_a_recording(played):
    model = _model()
    with recorded_decoding(model):
        for rows in (1, 2, 1):
            model.generate(torch.ones(rows, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert len(played) == 2


def test_what_is_not_a_token_of_a_cache_runs_as_it_is(played):
    model = _model()
    ids = torch.tensor([[1, 2, 3]])
    with recorded_decoding(model):
        cache = model(ids, use_cache=True).past_key_values
        model(ids, labels=ids).loss.backward()
        model(ids[:, :1], past_key_values=cache)  # with gradients
        with torch.no_grad():
            model(ids[:, :2], past_key_values=cache)
            model(ids[:, :1], past_key_values=cache, output_hidden_states=True)
            model(ids[:, :1], past_key_values=cache, return_dict=False)
            model(ids[:, :1], attention_mask=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert not played


def test_attention_is_refused():
    with pytest.raises(InputError, match="the memory of attention grows"), recorded_decoding(_model("attention")):
        pass


def test_what_cannot_be_recorded_is_decoded_all_the_same(played, monkeypatch):
    def fails(once, warm):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(decoding, "replay_of", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = _model()
    expected = model.generate(**_prompts(), max_new_tokens=5, do_sample=False)
    with recorded_decoding(model), pytest.warns(CudaGraphWarning, match="not permitted"):
        found = model.generate(**_prompts(), max_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_what_is_generated_is_the_same(kind):
    model = _model(kind, "cuda")
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**_prompts("cuda"), **settings)
    with warnings.catch_warnings(), recorded_decoding(model):
        warnings.simplefilter("error", CudaGraphWarning)
        assert torch.equal(model.generate(**_prompts("cuda"), **settings), expected)
