"""From text to batches, and perplexities against the sums that define them."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rebind.errors import InputError, StorageError
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.training import (
    DataConfig,
    OptimizerConfig,
    carried_perplexity,
    data,
    sliding_perplexity,
)
from rebind.nn.training.data import SegmentBatches, prepare_text
from tests.nn.training_runs import corpus, text
from tests.support import raises

UNUSUAL = "Zwölf Boxkämpfer\r\njagen  Viktor.\n\n\tÜber 日本 🙂\n"


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_tokens_are_the_text(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(data, "PIECE", 50)  # a long file is read in pieces
    content = text() + UNUSUAL * 3
    prepared = prepare_text(DataConfig(corpus(tmp_path, content), kind, vocabulary=400), tmp_path / "cache")
    ids = np.concatenate([prepared.train, prepared.validation])
    assert ids[-1] == prepared.tokenizer.eos_token_id
    assert prepared.tokenizer.decode(ids[:-1]) == content
    assert len(prepared.validation) == int(len(ids) * 0.05)


def test_a_text_is_tokenized_once(tmp_path, monkeypatch):
    config, cache = DataConfig(corpus(tmp_path), "characters"), tmp_path / "cache"
    first = prepare_text(config, cache)
    with monkeypatch.context() as patch:
        patch.setattr(data, "np", SimpleNamespace(memmap=np.memmap, dtype=np.dtype))  # nothing to tokenize with
        again = prepare_text(config, cache)
    assert np.array_equal(first.train, again.train)
    assert first.digest == again.digest
    corpus(tmp_path, text(seed=1))
    other = prepare_text(config, cache)
    assert not np.array_equal(first.train, other.train)
    assert first.digest != other.digest


def test_another_tokenizer_and_validation_text(tmp_path):
    trained = prepare_text(DataConfig(corpus(tmp_path), "bpe", vocabulary=300), tmp_path / "cache").tokenizer
    trained.save_pretrained(tmp_path / "tokenizer")
    other = tmp_path / "validation.txt"
    other.write_text("the cat\n")
    config = DataConfig(corpus(tmp_path), str(tmp_path / "tokenizer"), validation=str(other))
    prepared = prepare_text(config, tmp_path / "cache")
    assert prepared.tokenizer.decode(prepared.validation[:-1]) == "the cat\n"
    assert prepared.tokenizer.decode(prepared.train[:-1]) == text()
    assert data.tokenizer_fingerprint(prepared.tokenizer) == data.tokenizer_fingerprint(trained)


@pytest.mark.parametrize("damage", ["cut", "altered", "without its digest"])
def test_damaged_tokens_in_the_cache_are_made_again(tmp_path, damage):
    config = DataConfig(corpus(tmp_path), "characters")
    whole = np.array(prepare_text(config, tmp_path / "cache").train)
    (file,) = (tmp_path / "cache").glob("tokens-*/tokens.bin")
    data = bytearray(file.read_bytes())
    data[4] ^= 1
    if damage == "without its digest":
        file.with_name(".rebind-digests.json").unlink()
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else data)
    assert np.array_equal(prepare_text(config, tmp_path / "cache").train, whole)


def test_a_disk_that_fills_while_a_tokenizer_is_written_is_reported(tmp_path, monkeypatch):
    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(StorageError) as caught:
        prepare_text(DataConfig(corpus(tmp_path)), tmp_path / "cache")
    assert caught.value.code == "disk_full"
    assert not list((tmp_path / "cache").glob("*"))


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    class Rows(list):
        column_names = ("text",)
        _fingerprint = "f1"

    def load_dataset(name: str, split: str):
        assert (name, split) == ("some/stories", "small")
        return Rows([{"text": "one cat"}, {"text": "two dogs"}] * 20)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prepared = prepare_text(DataConfig("hf:some/stories:small", "characters"), tmp_path)
    assert prepared.tokenizer.decode(prepared.train[:17]) == "one cat<|end|>two dogs<|end|>"
    monkeypatch.setattr(Rows, "column_names", ("story",))
    for module in (sys.modules["datasets"], None):  # without a column of text, and without the package
        monkeypatch.setitem(sys.modules, "datasets", module)
        assert code_of(DataConfig("hf:some/stories:small"), tmp_path) == "dataset_not_loaded"


def test_texts_and_tokenizers_that_cannot_be_read(tmp_path):
    assert code_of(DataConfig(str(tmp_path / "missing.txt")), tmp_path / "cache") == "unreadable_text"
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    assert code_of(DataConfig(str(tmp_path / "bad.txt")), tmp_path / "cache") == "not_utf8"
    assert not list((tmp_path / "cache").glob("tok*"))
    (tmp_path / "empty.txt").touch()
    config = DataConfig(corpus(tmp_path), validation=str(tmp_path / "empty.txt"))
    assert code_of(config, tmp_path / "cache") == "text_too_short"
    (tmp_path / "empty").mkdir()
    assert code_of(DataConfig(corpus(tmp_path), str(tmp_path / "empty")), tmp_path / "cache") == "tokenizer_not_loaded"


def code_of(config: DataConfig, cache) -> str:
    with pytest.raises(InputError) as caught:
        prepare_text(config, cache)
    return caught.value.code


def test_a_tokenizer_of_the_hub_is_downloaded_without_weights_and_code(tmp_path, monkeypatch):
    trained = prepare_text(DataConfig(corpus(tmp_path)), tmp_path / "cache").tokenizer
    trained.save_pretrained(tmp_path / "downloaded")

    def download(name, allow_patterns):
        assert name == "someone/words"
        assert not any("safetensors" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(data, "snapshot_download", download)
    assert data.tokenizer_fingerprint(data.load_tokenizer("someone/words")) == data.tokenizer_fingerprint(trained)


# Batches


def first_segments(batches: SegmentBatches, steps: int) -> list[int]:
    return [int(row[0]) // 10 for step in range(steps) for row in batches.batch(step).inputs]


def test_an_epoch_has_every_segment_once():
    tokens = np.arange(101, dtype=np.uint16)  # ten segments of ten
    order = first_segments(SegmentBatches(tokens, 10, 4, seed=3), 5)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert order != first_segments(SegmentBatches(tokens, 10, 4, seed=4), 5)


def test_a_batch_is_a_function_of_the_step():
    tokens = np.arange(101, dtype=np.uint16)
    in_order, alone = SegmentBatches(tokens, 10, 4), SegmentBatches(tokens, 10, 4)
    batches = [in_order.batch(step) for step in range(9)]
    for step in (8, 0, 5):
        assert torch.equal(alone.batch(step).inputs, batches[step].inputs)
    assert torch.equal(batches[0].targets, batches[0].inputs + 1)


def test_lanes_go_through_the_text():
    segments = SegmentBatches(np.arange(62, dtype=np.uint16), 5, 2, lanes=True)  # twelve segments: two lanes of six
    batches = [segments.batch(step) for step in range(7)]
    lanes = torch.cat([batch.inputs for batch in batches[:6]], dim=1).tolist()
    assert lanes == [list(range(30)), list(range(30, 60))]
    assert [batch.starts for batch in batches] == [True, False, False, False, False, False, True]


# Perplexity


@pytest.fixture(scope="module")
def model() -> RebindForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        config = RebindConfig(vocab_size=11, layer_kinds="gated_delta", initializer_range=0.3, dropout=0.2, **shape)
        return RebindForCausalLM(config).double().train()


def random_ids(count: int) -> torch.Tensor:
    return torch.randint(11, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stride", [1, 3, 7, 0])
@pytest.mark.parametrize("count", [2, 7, 8, 9, 30])
def test_sliding_perplexity_is_its_definition(model, stride, count):
    ids, length = random_ids(count), 7
    total, scored = 0.0, 0
    while scored < count - 1:  # a window ends at `end`, and scores the tokens that none before it has scored
        end = min(scored + ((stride or length) if scored else length), count - 1)
        window = ids[max(end - length, 0) : end + 1]
        total += token_losses(model, window)[-(end - scored) :].sum().item()
        scored = end
    measured = sliding_perplexity(model, ids, length, stride=stride, rows=2)
    assert measured.tokens == count - 1
    assert measured.loss == pytest.approx(total / (count - 1), abs=1e-12)
    assert measured.perplexity == pytest.approx(np.exp(measured.loss))
    assert model.training


@pytest.mark.parametrize("count", [2, 8, 9, 30])
def test_carried_perplexity_is_one_long_pass(model, count):
    ids = random_ids(count)
    measured = carried_perplexity(model, ids, 7)
    assert measured.loss == pytest.approx(token_losses(model, ids).mean().item(), abs=1e-10)
    assert measured.tokens == count - 1


def test_too_few_tokens_for_a_perplexity(model):
    for measure, ids in (
        (sliding_perplexity, torch.tensor([1])),
        (carried_perplexity, torch.tensor([1])),
    ):
        with raises(InputError, "text_too_short"):
            measure(model, ids, 4)
    with raises(InputError, "invalid_stride"):
        sliding_perplexity(model, torch.arange(10), 4, stride=9)


def test_the_learning_rate_climbs_and_falls():
    config = OptimizerConfig(learning_rate=2.0, warmup=4, final_fraction=0.1)
    rates = [config.learning_rate_at(step, 100) for step in range(101)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(earlier > later for earlier, later in pairwise(rates[4:]))
    assert rates[100] == pytest.approx(0.2)


@torch.no_grad()
def token_losses(model: RebindForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token but the first, in one pass."""
    model.eval()
    logits = model(ids[None, :-1]).logits[0]
    model.train()
    return -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
