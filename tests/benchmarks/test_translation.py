"""The translation benchmark on an invented language: files, batches, a run that learns, and one that continues."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.translation import __main__ as translation
from benchmarks.translation import runs as translation_runs
from benchmarks.translation.data import END, PAD, Corpus, digest_of, read_pairs, read_splits, shared_tokenizer
from benchmarks.translation.runs import Run
from benchmarks.translation.training import Settings, Task, rate, valid_loss
from rebind.errors import InputError
from rebind.nn import RebindForSeq2SeqLM
from tests.support import raises

GERMAN = ["der", "große", "alte", "Mann", "Hund", "läuft", "springt", "über", "grüne", "Büsche"]
ENGLISH = ["the", "big", "old", "man", "dog", "runs", "jumps", "over", "green", "bushes"]
TINY = Settings(
    steps=250, tokens=512, rate=1e-2, warmup=20, vocabulary=400, hidden=32, layers=1, heads=2, ff=64, dropout=0.0,
    smoothing=0.0, favor=16, beams=2,
)  # fmt: skip


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Return sentences of three words, translated word by word."""
    draw = random.Random(seed)
    rows = [[draw.randrange(10) for _ in range(3)] for _ in range(count)]
    return [(" ".join(GERMAN[i] for i in row) + ".", " ".join(ENGLISH[i] for i in row) + ".") for row in rows]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, (split, count) in enumerate((("train", 400), ("val", 30), ("test_2016_flickr", 40))):
        for language, side in zip(("de", "en"), zip(*sentences(count, seed), strict=True), strict=True):
            text = ("\n".join(side) + "\n").encode()
            if split == "val":
                (folder / f"{split}.{language}").write_bytes(text)
            else:
                (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text))
    return folder


@pytest.fixture
def exact(monkeypatch) -> None:
    """Score the share of correct sentences in place of BLEU: sacrebleu may not be installed."""
    monkeypatch.setattr(translation, "require_sacrebleu", lambda: None)
    monkeypatch.setattr(translation_runs, "bleu", lambda got, true: 100 * sum(map(str.__eq__, got, true)) / len(true))


def options(data: Path, out: Path, *more: str) -> list[str]:
    chosen = [f"--{name}={value}" for name, value in vars(TINY).items()]
    return ["--data", str(data), "--out", str(out), "--device", "cpu", *chosen, *more]


def test_files_are_read_plain_or_compressed(data):
    assert read_pairs(data, "train") == sentences(400, 0)
    assert read_pairs(data, "val") == sentences(30, 1)
    (data / "val.en").write_text("one line\n")
    with raises(InputError, "uneven_sides"):
        read_pairs(data, "val")
    (data / "val.en").unlink()
    with raises(InputError, "no_data"):
        read_pairs(data, "val")


def test_the_tokenizer_is_trained_once_and_loses_nothing(tmp_path):
    pairs = sentences(50, 0)
    tokenizer = shared_tokenizer(pairs, 300, tmp_path)
    (path,) = tmp_path.glob("tokenizer-*.json")
    written = path.stat().st_mtime_ns
    again = shared_tokenizer(pairs, 300, tmp_path)
    assert path.stat().st_mtime_ns == written
    for text in (pairs[0][0], "Ünbekannt, 1234 — naïve 日本"):
        ids = again.encode(text).ids
        assert ids == tokenizer.encode(text).ids
        assert min(ids) > END
        assert tokenizer.decode(ids).strip() == text
    shared_tokenizer(pairs[1:], 300, tmp_path)
    assert len(list(tmp_path.glob("tokenizer-*.json"))) == 2  # other text, other tokenizer


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_hold_every_pair_once_within_their_tokens(shuffled, tmp_path):
    pairs = [(" ".join(GERMAN[: 1 + i % 10]), " ".join(ENGLISH[: 1 + i % 7])) for i in range(100)]
    corpus = Corpus.of(shared_tokenizer(pairs, 300, tmp_path), pairs, torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0) if shuffled else None
    seen = []
    for batch in corpus.batches(256, generator):
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert ids.numel() + labels.numel() <= 256
        assert ids.shape[1] % 8 == labels.shape[1] % 8 == 0
        assert torch.equal(mask, ids != PAD)
        for source, real, label in zip(ids, mask, labels, strict=True):
            seen.append((tuple(source[real].tolist()), tuple(label[label != -100].tolist())))
            assert seen[-1][0][-1] == seen[-1][1][-1] == END
    rows = zip(corpus.source.tolist(), corpus.target.tolist(), corpus.lengths.tolist(), strict=True)
    assert sorted(seen) == sorted((tuple(s[:m]), tuple(t[:n])) for s, t, (m, n) in rows)
    assert len({*seen}) == 70


def test_long_pairs_are_left_out_of_training(tmp_path):
    pairs = sentences(20, 0)
    tokenizer = shared_tokenizer(pairs, 300, tmp_path)
    lengths = Corpus.of(tokenizer, pairs, torch.device("cpu"), None).lengths.amax(1)
    limit = int(lengths.median())
    assert len(Corpus.of(tokenizer, pairs, torch.device("cpu"), limit)) == int((lengths <= limit).sum()) < 20
    with raises(InputError, "pairs_too_long"):
        Corpus.of(tokenizer, pairs, torch.device("cpu"), 1)


def test_the_rate_rises_and_falls():
    rates = [rate(step, TINY) for step in range(TINY.steps + 1)]
    assert rates[0] == 1 / 20
    assert rates[19] == max(rates) == 1
    assert rates[-1] == pytest.approx(0, abs=1e-6)


def test_the_validation_loss_is_the_mean_over_tokens(data, tmp_path):
    task = Task.of(read_splits(data), TINY, tmp_path, torch.device("cpu"))
    torch.manual_seed(0)
    model = RebindForSeq2SeqLM(TINY.config("linear", task.tokenizer.get_vocab_size())).eval()
    (whole,) = task.valid.batches(10**6)
    with torch.no_grad():
        expected = model(**whole).loss
    assert valid_loss(model, task.valid, 100) == pytest.approx(expected.item(), rel=1e-5)


def test_runs_learn_and_are_not_repeated(data, tmp_path, exact, monkeypatch, capsys):
    out = tmp_path / "results.json"
    arguments = options(data, out, "--kinds", "softmax", "dpfp", "--seeds")
    translation.main([*arguments, "1"])
    runs = json.loads(out.read_text())["runs"]
    assert [(result["kind"], result["seed"]) for result in runs] == [("softmax", 0), ("dpfp", 0)]
    assert min(result["bleu"] for result in runs) > 80
    calls = []

    def instead(kind, seed, *_):
        calls.append((kind, seed))
        return Run(kind, seed, 50.0, 1.0, 1, 1.0, 1.0, 1, 1)

    monkeypatch.setattr(translation, "run", instead)
    translation.main([*arguments, "2"])
    assert calls == [("softmax", 1), ("dpfp", 1)]
    assert json.loads(out.read_text())["runs"][:2] == runs
    assert "written to" in capsys.readouterr().out
    with raises(InputError, "other_settings"):
        translation.main([*arguments, "2", "--steps", "7"])

    content = json.loads(out.read_text())
    assert content["data"] == digest_of(read_splits(data))
    lines = (data / "val.en").read_text().splitlines()
    (data / "val.en").write_text("\n".join([*lines[:-1], "another sentence."]) + "\n")
    with raises(InputError, "other_data"):
        translation.main([*arguments, "2"])
