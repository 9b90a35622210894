"""Tokenizers: that of the model or another one, start tokens, and the text of a continuation."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.load import load_tokenizer
from rebind.models.prompts import decode_continuation, start_tokens
from tests.support import raises
from tests.tiny import letter_tokenizer
from tests.tiny import tokenizer as byte_tokenizer


def test_a_tokenizer_from_elsewhere(folder, tmp_path):
    letter_tokenizer(front=["<a>", "<b>"]).save_pretrained(tmp_path / "other")
    assert LanguageModel.load(folder, tmp_path / "other").start == (1, 2)


class Slow(PreTrainedTokenizer):
    vocab_size = 3

    def get_vocab(self):
        return {"a": 0}


@pytest.mark.parametrize(
    ("tokenizer", "code"),
    [("no/such/folder", "unreadable_tokenizer"), (Slow(), "slow_tokenizer"), (None, "unreadable_tokenizer")],
)
def test_tokenizers_that_cannot_be_used(tokenizer, code, tmp_path):
    with raises(InputError, code):
        load_tokenizer(tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "start"),
    [
        (letter_tokenizer(), []),
        (letter_tokenizer(front=["<s>"]), ["<s>"]),
        (letter_tokenizer(front=["<s>"], back=["</s>"]), ["<s>"]),
        (letter_tokenizer(back=["</s>"]), []),
        (letter_tokenizer(front=["<s>", "<lang>"]), ["<s>", "<lang>"]),
        (letter_tokenizer(extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (letter_tokenizer(back=["</s>"], extra=["<|endoftext|>"]), ["<|endoftext|>"]),
        (letter_tokenizer(unk="<|endoftext|>"), ["<|endoftext|>"]),  # GPT-2: also the unknown token
        (letter_tokenizer(front=["<s>"], unk="<|endoftext|>"), ["<s>"]),
    ],
    ids=["none", "bos", "bos-eos", "eos", "two", "endoftext", "eos-endoftext", "gpt2", "bos-endoftext"],
)
def test_start_ids(tokenizer, start):
    assert start_tokens(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(start))


def test_a_continuation_keeps_its_first_space():
    """The decoder of Llama 2 strips the space of the first token."""
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
    assert decode_continuation(tokenizer, prompt, whole[len(prompt) :]) == " Paris, and"
    assert decode_continuation(tokenizer, prompt, []) == ""
    assert decode_continuation(tokenizer, [tokenizer.bos_token_id], whole) == "The capital of France is Paris, and"
    assert decode_continuation(tokenizer, [], whole) == "The capital of France is Paris, and"

    tokenizer = byte_tokenizer()  # half a character stays half a character
    ids = tokenizer("é", add_special_tokens=False).input_ids
    assert len(ids) == 2
    assert decode_continuation(tokenizer, ids[:1], ids[1:]) == "\N{REPLACEMENT CHARACTER}"
    assert decode_continuation(tokenizer, tokenizer("a", add_special_tokens=False).input_ids, ids) == "é"
