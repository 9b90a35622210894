"""Recorded decoding. Without a GPU a recording is the call itself, on the tensors that a graph would use."""

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
from tests.support import assert_close, raises

KINDS = ["linear-sum", "dpfp-delta", "delta", "gated_delta", "longhorn", "ttt-linear"]


def _model(kind="gated_delta", device="cpu"):
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
def recordings(monkeypatch):
    """Recordings, recordings as calls, which like those of a GPU follow two warm-up runs."""
    calls = []

    def record(call, warm_up):
        for _ in range(warm_up):
            call()
        calls.append(call)
        return call

    monkeypatch.setattr(decoding, "record_graph", record)
    monkeypatch.setattr(decoding, "can_record", lambda token: True)
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beams", [1, 3])
def test_recorded_generation_is_the_same(recordings, kind, beams):
    model = _model(kind)
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    expected = model.generate(**_prompts(), **settings)
    with recorded_decoding(model):
        for _ in range(2):
            assert torch.equal(model.generate(**_prompts(), **settings), expected)
    assert len(recordings) == 1
    assert torch.equal(model.generate(**_prompts(), **settings), expected)
    assert "forward" not in vars(model)


@torch.no_grad()
def test_conversations_stay_separate(recordings):
    """Two caches in turn, both of which continue after the recordings are gone."""
    model = _model()
    tokens = torch.randint(1, 40, (2, 9), generator=torch.Generator().manual_seed(2))
    whole = [model(row[None]).logits for row in tokens]
    with recorded_decoding(model):
        caches = [model(row[None, :4], use_cache=True).past_key_values for row in tokens]
        for position in range(4, 8):
            for row, cache, true in zip(tokens, caches, whole, strict=True):
                logits = model(row[None, position : position + 1], past_key_values=cache).logits
                assert_close(logits[:, 0], true[:, position], 1e-12)
        assert caches[0].tokens_seen == 8
    for row, cache, true in zip(tokens, caches, whole, strict=True):
        assert_close(model(row[None, 8:], past_key_values=cache).logits[:, 0], true[:, 8], 1e-12)
    assert len(recordings) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"output_hidden_states": True}, {"attention_mask": torch.tensor([[1, 1, 1, 0]])}],
    ids=["hidden states", "masked token"],
)
def test_a_token_that_is_not_replayed_leaves_no_memory_behind(recordings, options):
    """It continues in the tensors of the recording, into which the next cache is copied."""
    model, token = _model(), torch.tensor([[3]])

    def talk():
        one, other = (model(torch.tensor([[1, first]]), use_cache=True).past_key_values for first in (5, 6))
        model(token, past_key_values=one)
        model(token, past_key_values=one, **options)
        model(token, past_key_values=other)
        return model(token, past_key_values=one).logits

    expected = talk()
    with recorded_decoding(model):
        assert_close(talk(), expected, 1e-12)
    assert recordings


@torch.no_grad()
@pytest.mark.parametrize("recorded", [True, False])
def test_a_copy_of_a_cache_continues_independently(recordings, recorded):
    model, token = _model(), torch.tensor([[3]])
    with recorded_decoding(model) if recorded else nullcontext():
        cache = model(torch.tensor([[1, 5]]), use_cache=True).past_key_values
        model(token, past_key_values=cache)
        words = {7: copy.copy(cache), 8: cache}
        logits = [model(torch.tensor([[word]]), past_key_values=each).logits for word, each in words.items()]
    for word, out in zip(words, logits, strict=True):
        assert_close(out[:, -1], model(torch.tensor([[1, 5, 3, word]])).logits[:, -1], 1e-12)
    assert bool(recordings) == recorded


def test_a_replaced_forward_is_restored(recordings):
    model, ids = _model(), torch.tensor([[1, 2]])
    with recorded_decoding(model), recorded_decoding(model):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert "forward" not in vars(model)
    original = model.forward
    model.forward = replacement = lambda *args, **kwargs: original(*args, **kwargs)
    with recorded_decoding(model):
        model(ids, None, None, None, ids)  # labels by position
    assert model.forward is replacement


def test_recordings_of_inference_mode_work_outside_of_it(recordings):
    model, ids = _model(), torch.tensor([[1, 2]])
    with recorded_decoding(model):
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)


@torch.no_grad()
def test_logits_are_not_overwritten_by_the_next_token(recordings):
    model, token = _model(), torch.tensor([[3]])
    with recorded_decoding(model):
        cache = model(torch.tensor([[1, 2]]), use_cache=True).past_key_values
        first = model(token, past_key_values=cache).logits
        copied = first.clone()
        model(token + 1, past_key_values=cache)
    assert torch.equal(first, copied)


@torch.no_grad()
def test_each_batch_size_has_a_recording(recordings):
    model = _model()
    with recorded_decoding(model):
        for rows in (1, 2, 1):
            model.generate(torch.ones(rows, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)
        cache = model(torch.ones(2, 3, dtype=torch.long), use_cache=True).past_key_values
        with pytest.raises(ShapeError) as caught:
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert caught.value.code == "state_of_other_batch"
    assert len(recordings) == 2


def test_other_calls_run_without_a_recording(recordings):
    model, ids = _model(), torch.tensor([[1, 2, 3]])
    with recorded_decoding(model):
        cache = model(ids, use_cache=True).past_key_values
        model(ids, labels=ids).loss.backward()
        model(ids[:, :1], past_key_values=cache)  # with gradients
        with torch.no_grad():
            model(ids[:, :2], past_key_values=cache)
            model(ids[:, :1], past_key_values=cache, output_hidden_states=True)
            model(ids[:, :1], past_key_values=cache, return_dict=False)
            model(ids[:, :1], attention_mask=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert not recordings


def test_attention_is_refused():
    with raises(InputError, "growing_state"), recorded_decoding(_model("attention")):
        pass


def test_a_model_that_cannot_be_recorded_decodes_with_a_warning(recordings, monkeypatch):
    def fail(call, warm_up):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(decoding, "record_graph", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = _model()
    expected = model.generate(**_prompts(), max_new_tokens=5, do_sample=False)
    with recorded_decoding(model), pytest.warns(CudaGraphWarning, match="not permitted"):
        assert torch.equal(model.generate(**_prompts(), max_new_tokens=5, do_sample=False), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_generation_on_a_gpu_is_the_same(kind):
    model = _model(kind, "cuda")
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**_prompts("cuda"), **settings)
    with warnings.catch_warnings(), recorded_decoding(model):
        warnings.simplefilter("error", CudaGraphWarning)
        assert torch.equal(model.generate(**_prompts("cuda"), **settings), expected)
