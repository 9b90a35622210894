"""Models as save_pretrained writes them, with a tokenizer of letters: for the tests of loading."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(front=(), back=(), extra=(), unk="<unk>"):
    """One token a letter; `front` and `back` are put around every text."""
    names = list(dict.fromkeys([unk, *front, *back, *extra]))
    vocab = {token: i for i, token in enumerate([*names, *LETTERS, "Ġ"])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if front or back:
        template = " ".join([*front, "$A", *back])
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, vocab[token]) for token in dict.fromkeys([*front, *back])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unk)


def save(model, target):
    """The model and a tokenizer that begins every text with <s>."""
    model.save_pretrained(target)
    make_tokenizer(front=["<s>"]).save_pretrained(target)
    return target
