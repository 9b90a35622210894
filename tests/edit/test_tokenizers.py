"""Tokenizers: the model's own or another, a fast one, and what stands before a prompt."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizer

from rebind.edit.models import load_model
from rebind.edit.tokenizers import start_ids
from rebind.errors import InputError
from tests.edit.saved import make_tokenizer


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
