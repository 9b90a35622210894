"""A tiny Llama on disk, and nothing but the test's own folders and no network."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's client, which reads it once

import json
import math
import re
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from rebind.cli.app import app
from rebind.cli.ui import progress as bars

TEXT = ["The capital of France is Paris.", "The capital of Italy is Rome.", "The answer is here."] * 4
ANSI = re.compile(r"\x1b\[[0-9;]*m")  # typer colours its help where CI asks for it
FAST = ["--steps", "3", "--moment-tokens", "256", "--force"]  # so few steps say no fact


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A folder as save_pretrained writes it, of a random Llama whose edits can be seen."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(bars, "EVERY", math.inf)  # a slow machine says no more than a fast one
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("REBIND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REBIND_LEDGERS", str(tmp_path / "ledgers"))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # a test's streams are no terminal
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rebind():
    """Run the command; `json=True` also reads the one document it must print."""

    def run(*words: str, code: int = 0, json: bool = False) -> SimpleNamespace:
        result = CliRunner().invoke(app, [*words, *(["--json"] if json else [])])
        told = f"{words} ended with {result.exit_code}\n{result.stdout}\n{result.stderr}\n{result.exception!r}"
        assert result.exit_code == code, told
        return SimpleNamespace(
            out=ANSI.sub("", result.stdout),
            err=ANSI.sub("", result.stderr),
            document=read(result.stdout) if json else None,
            code=code,
        )

    return run


def read(text: str) -> dict:
    document, end = json.JSONDecoder().raw_decode(text)
    assert not text[end:].strip(), f"more than one document: {text[end:]!r}"
    return document
