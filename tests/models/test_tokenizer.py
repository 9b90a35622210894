"""Tokenizers: the model's own or another, a fast one, and what stands before a prompt."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from rebind.errors import InputError
from rebind.models.load import load_model
from rebind.models.tokenizer import continued, start_ids
from tests.edit.saved import make_tokenizer
from tests.tiny import tokenizer as byte_tokenizer


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    other = make_tokenizer(front=["<a>", "<b>"])
    assert load_model(folder, other).tokenizer is other
    other.save_pretrained(tmp_path / "other")
    assert load_model(folder, tmp_path / "other").start == (1, 2)
    with pytest.raises(InputError, match="there is no tokenizer folder 'gpt2', expected a local folder"):
        load_model(folder, "gpt2")


def test_a_folder_without_a_tokenizer(tiny, tmp_path):
    tiny.save_pretrained(tmp_path / "m")
    with pytest.raises(InputError, match=r"m has no tokenizer that can be loaded .*pass tokenizer="):
        load_model(tmp_path / "m")


def test_a_slow_tokenizer_is_refused(folder):
    class Slow(PreTrainedTokenizer):
        vocab_size = 3

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(InputError, match=r"slow one \(Slow\), expected a fast one"):
        load_model(folder, Slow())


@pytest.mark.parametrize(
    ("tokenizer", "start"),
    [
        (make_tokenizer(), []),
        (make_tokenizer(front=["<s>"]), ["<s>"]),
        (make_tokenizer(front=["<s>"], back=["</s>"]), ["<s>"]),
        (make_tokenizer(back=["</s>"]), []),
        (make_tokenizer(front=["<s>", "<lang>"]), ["<s>", "<lang>"]),
        (make_tokenizer(extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (make_tokenizer(back=["</s>"], extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (make_tokenizer(unk="<|endoftext|>"), ["<|endoftext|>"]),  # GPT-2: the unknown token too
        (make_tokenizer(front=["<s>"], unk="<|endoftext|>"), ["<s>"]),
    ],
    ids=["none", "bos", "bos-eos", "eos", "two", "endoftext", "eos-endoftext", "gpt2", "bos-endoftext"],
)
def test_start_ids(tokenizer, start):
    assert start_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(start))


def test_a_continuation_keeps_its_first_space():
    """Llama 2's decoder strips the space of whatever it is given first."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    trained = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>"], show_progress=False)
    inner.train_from_iterator(["The capital of France is Paris, and the sea is blue."] * 3, trained)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<s>")
    prompt = tokenizer("The capital of France is", add_special_tokens=False).input_ids
    whole = tokenizer("The capital of France is Paris, and", add_special_tokens=False).input_ids
    assert tokenizer.decode(whole[len(prompt) :]) == "Paris, and"
    assert continued(tokenizer, prompt, whole[len(prompt) :]) == " Paris, and"
    assert continued(tokenizer, prompt, []) == ""
    assert continued(tokenizer, [tokenizer.bos_token_id], whole) == "The capital of France is Paris, and"
    assert continued(tokenizer, [], whole) == "The capital of France is Paris, and"


def test_half_a_letter_is_told_as_half_a_letter():
    tokenizer = byte_tokenizer()
    ids = tokenizer("é", add_special_tokens=False).input_ids
    assert len(ids) == 2
    assert continued(tokenizer, ids[:1], ids[1:]) == "\N{REPLACEMENT CHARACTER}"
    assert continued(tokenizer, tokenizer("a", add_special_tokens=False).input_ids, ids) == "é"
