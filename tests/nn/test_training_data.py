"""From text to batches, and perplexities against the sums that define them."""

from __future__ import annotations

import socket
import sys
import time
from itertools import pairwise
from types import SimpleNamespace

import huggingface_hub.constants
import numpy as np
import pytest
import torch

from rebind.errors import InputError
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.training import DataConfig, OptimizerConfig, by_position, carried, sliding, tokenizers
from rebind.nn.training.data import Segments, prepare
from tests.nn.training_runs import corpus, text

ODD = "Zwölf Boxkämpfer\r\njagen  Viktor.\n\n\tÜber 日本 🙂\n"


@pytest.mark.parametrize("kind", ["bpe", "characters"])
def test_tokens_are_the_text(tmp_path, kind):
    content = text() + ODD * 3
    found = prepare(DataConfig(corpus(tmp_path, content), kind, vocabulary=400), tmp_path / "cache")
    ids = np.concatenate([found.train, found.held])
    assert ids[-1] == found.tokenizer.eos_token_id
    assert found.tokenizer.decode(ids[:-1]) == content
    assert len(found.held) == int(len(ids) * 0.05)


def test_a_long_file_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("rebind.nn.training.data.PIECE", 50)
    found = prepare(DataConfig(corpus(tmp_path), "characters"), tmp_path / "cache")
    assert found.tokenizer.decode(np.concatenate([found.train, found.held])[:-1]) == text()


def test_tokens_are_made_once_for_what_they_are_made_of(tmp_path, monkeypatch):
    config, cache = DataConfig(corpus(tmp_path), "characters"), tmp_path / "cache"
    first = prepare(config, cache)
    with monkeypatch.context() as patched:
        patched.setattr(tokenizers, "encode", lambda *given: pytest.fail("it was tokenized again"))
        again = prepare(config, cache)
    assert np.array_equal(first.train, again.train)
    assert first.digest == again.digest
    corpus(tmp_path, text(seed=1))
    other = prepare(config, cache)
    assert not np.array_equal(first.train, other.train)
    assert first.digest != other.digest


def test_a_tokenizer_and_a_held_text_can_be_given(tmp_path):
    made = prepare(DataConfig(corpus(tmp_path), "bpe", vocabulary=300), tmp_path / "cache").tokenizer
    made.save_pretrained(tmp_path / "given")
    other = tmp_path / "held.txt"
    other.write_text("the cat\n")
    config = DataConfig(corpus(tmp_path), str(tmp_path / "given"), validation=str(other))
    found = prepare(config, tmp_path / "cache")
    assert found.tokenizer.decode(found.held[:-1]) == "the cat\n"
    assert found.tokenizer.decode(found.train[:-1]) == text()
    assert found.tokenizer_digest == tokenizers.fingerprint(made)


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    class Rows(list):
        column_names = ("text",)
        _fingerprint = "f1"

    asked = []

    def load_dataset(name: str, split: str):
        asked.append((name, split))
        return Rows([{"text": "one cat"}, {"text": "two dogs"}] * 20)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = prepare(DataConfig("hf:some/stories:small", "characters"), tmp_path)
    assert asked == [("some/stories", "small")]
    assert found.tokenizer.decode(found.train[:17]) == "one cat<|end|>two dogs<|end|>"
    monkeypatch.setattr(Rows, "column_names", ("story",))
    with pytest.raises(InputError, match="columns story, expected one named text"):
        prepare(DataConfig("hf:some/stories"), tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        prepare(DataConfig("hf:some/stories"), tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b" \n\t\n", "is empty"), (b"\xff\xfe\x00", "is not UTF-8"), (None, "cannot be read")],
)
def test_a_corpus_that_is_none(tmp_path, content, says):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        prepare(DataConfig(str(path)), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_a_tokenizer_that_is_none(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot be had"):
        prepare(DataConfig(corpus(tmp_path), str(tmp_path / "empty")), tmp_path / "cache")


def test_a_tokenizer_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    made = prepare(DataConfig(corpus(tmp_path)), tmp_path / "cache").tokenizer
    made.save_pretrained(tmp_path / "fetched")
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "fetched")

    monkeypatch.setattr(tokenizers, "snapshot_download", fetch)
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("asked the network"))
    assert tokenizers.fingerprint(tokenizers.given("someone/words")) == tokenizers.fingerprint(made)
    [(name, allowed)] = asked
    assert name == "someone/words"
    assert not any("safetensors" in pattern or "py" in pattern for pattern in allowed)


def test_a_tokenizer_of_the_hub_offline_is_one_line(tmp_path, monkeypatch, capfd):
    def lost(*given, **named):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to hear it again"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        InputError, match=r"tokenizer 'nonesuch' cannot be had \(.*\), expected bpe, characters"
    ) as told:
        tokenizers.given("nonesuch")
    assert "\n" not in str(told.value)
    assert capfd.readouterr() == ("", "")


# Batches


def test_an_epoch_has_every_segment_once():
    tokens = np.arange(101, dtype=np.uint16)  # ten segments of ten
    segments = Segments(tokens, 10, 4, seed=3)
    drawn = [int(row[0]) // 10 for step in range(5) for row in segments.batch(step).inputs]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert drawn != [
        int(row[0]) // 10 for step in range(5) for row in Segments(tokens, 10, 4, seed=4).batch(step).inputs
    ]


def test_a_batch_is_a_function_of_the_step():
    tokens = np.arange(101, dtype=np.uint16)
    forwards, alone = Segments(tokens, 10, 4), Segments(tokens, 10, 4)
    batches = [forwards.batch(step) for step in range(9)]
    for step in (8, 0, 5):
        assert torch.equal(alone.batch(step).inputs, batches[step].inputs)
    assert torch.equal(batches[0].targets, batches[0].inputs + 1)


def test_lanes_go_through_the_text():
    segments = Segments(np.arange(62, dtype=np.uint16), 5, 2, lanes=True)  # twelve segments: two lanes of six
    batches = [segments.batch(step) for step in range(7)]
    assert torch.cat([batch.inputs for batch in batches[:6]], dim=1).tolist() == [
        list(range(30)),
        list(range(30, 60)),
    ]
    assert [batch.begins for batch in batches] == [True, False, False, False, False, False, True]


# Perplexity


@pytest.fixture(scope="module")
def model() -> RebindForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        made = RebindConfig(vocab_size=11, layer_kinds="gated_delta", initializer_range=0.3, dropout=0.2, **options)
        return RebindForCausalLM(made).double().train()


@pytest.mark.parametrize("stride", [1, 3, 7, 0])
@pytest.mark.parametrize("count", [2, 7, 8, 9, 30])
def test_sliding_is_its_definition(model, stride, count):
    ids = torch.randint(11, (count,), generator=torch.Generator().manual_seed(1))
    length = 7
    total, done = 0.0, 0
    while done < count - 1:  # a window ends at `end`, and scores what none before it has
        end = min(done + ((stride or length) if done else length), count - 1)
        window = ids[max(end - length, 0) : end + 1]
        total += _scores(model, window)[-(end - done) :].sum().item()
        done = end
    measured = sliding(model, ids, length, stride=stride, rows=2)
    assert measured.tokens == count - 1
    assert measured.loss == pytest.approx(total / (count - 1), abs=1e-12)
    assert measured.perplexity == pytest.approx(np.exp(measured.loss))
    assert model.training


@pytest.mark.parametrize("count", [2, 8, 9, 30])
def test_carried_is_one_long_pass(model, count):
    ids = torch.randint(11, (count,), generator=torch.Generator().manual_seed(1))
    measured = carried(model, ids, 7)
    assert measured.loss == pytest.approx(_scores(model, ids).mean().item(), abs=1e-10)
    assert measured.tokens == count - 1


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_by_position_is_the_mean_of_windows(model, rows):
    ids = torch.randint(11, (33,), generator=torch.Generator().manual_seed(1))
    windows = torch.stack(
        [_scores(model, ids[first : first + 8]) for first in range(0, 28, 7)]
    )  # the rest is no window
    torch.testing.assert_close(by_position(model, ids, 7, rows=rows), windows.mean(0), rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="33 tokens hold no window of 33"):
        by_position(model, ids, 33)


def test_one_token_has_no_perplexity(model):
    for measure in (sliding, carried):
        with pytest.raises(InputError, match="two or more"):
            measure(model, torch.tensor([1]), 4)
    with pytest.raises(InputError, match="stride is 9"):
        sliding(model, torch.arange(10), 4, stride=9)


def test_the_rate_climbs_and_falls():
    rates = [OptimizerConfig(rate=2.0, warmup=4, final=0.1).rate_at(step, 100) for step in range(101)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[100] == pytest.approx(0.2)


@torch.no_grad()
def _scores(model: RebindForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """The loss of each token but the first, in one pass."""
    model.eval()
    logits = model(ids[None, :-1]).logits[0]
    model.train()
    return -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
