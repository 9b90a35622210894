"""Corpora: the same windows in the same order every time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rebind.edit.moments import OwnSamples, Texts
from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from tests import tiny
from tests.support import raises

START = 0


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return LanguageModel(tiny.llama(dtype=torch.float64), tiny.tokenizer(), name="tiny")


def rows_of(batches: Any) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch]


def test_a_text_file_is_packed_into_windows(tmp_path, model):
    path = tmp_path / "wiki.txt"
    path.write_text("\n\n".join(tiny.SENTENCES) + "\n\n\n", encoding="utf-8")
    corpus = Texts.from_file(path)
    assert list(corpus.documents) == tiny.SENTENCES
    rows = rows_of(corpus.windows(model, 16, itertools.count()))
    assert all(len(row) == 16 and row[0] == START for row in rows)
    packed = [token for row in rows for token in row[1:]]
    whole = [token for text in tiny.SENTENCES for token in (START, *tiny.tokenizer()(text).input_ids)]
    assert packed == whole[: len(packed)]
    assert len(whole) - len(packed) < 15  # only what fills no window is left out


def test_windows_from_the_middle_are_the_same_windows(model):
    corpus = tiny.texts(rows=3)
    whole = list(corpus.windows(model, 32, itertools.count()))
    assert len(whole) > 4
    for skip in (1, 4, len(whole)):
        assert rows_of(corpus.windows(model, 32, itertools.count(skip))) == rows_of(whole[skip:])


def test_a_short_document_is_one_short_window(model):
    assert len(rows_of(Texts(["The sea."], "short").windows(model, 64, itertools.count()))) == 1


@pytest.mark.parametrize(
    ("content", "code"),
    [(b" \n\n \n", "empty_corpus"), (b"\xff\xfe\x00", "unreadable_corpus"), (None, "unreadable_corpus")],
)
def test_files_that_are_no_corpus(tmp_path, content, code):
    path = tmp_path / "wiki.txt"
    if content is not None:
        path.write_bytes(content)
    with raises(InputError, code):
        Texts.from_file(path)


def test_documents_do_not_run_together_in_the_digest():
    assert Texts(["ab", "c"], "x").digest != Texts(["a", "bc"], "x").digest


def test_own_samples_follow_the_seed_and_resume(model):
    def rows(corpus: OwnSamples, skip: int, count: int) -> list[list[int]]:
        return rows_of(itertools.islice(corpus.windows(model, 12, itertools.count(skip)), count))

    first = rows(OwnSamples(5, rows=4), 0, 3)
    assert len(first) == 12
    assert all(len(row) == 12 and row[0] == START for row in first)
    assert rows(OwnSamples(5, rows=4), 0, 3) == first
    assert rows(OwnSamples(5, rows=4), 2, 1) == first[8:]
    assert rows(OwnSamples(6, rows=4), 0, 3) != first
    assert len({tuple(row) for row in first}) > 6, "rows and batches should differ"


def test_a_column_of_a_dataset_is_a_corpus():
    rows = [{"text": " One. ", "id": "1"}, {"text": "", "id": "2"}, {"text": "Two.", "id": "3"}]
    assert Texts.from_dataset(rows).documents == ["One.", "Two."]
    with raises(InputError, "empty_corpus"):
        Texts.from_dataset([])
