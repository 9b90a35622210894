"""Second moments of keys: those of a plain loop, cached, resumed after a kill, and never mistaken for others."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from rebind.edit.moments import Moments, OwnSamples, SecondMoment, Texts, config_digest, tokenizer_digest
from rebind.edit.progress import Progress
from rebind.errors import InputError
from rebind.models.language_model import LanguageModel
from rebind.models.sites import module_at
from tests import tiny
from tests.support import assert_close, raises

START = (0,)


class Killed(BaseException):
    """As abrupt as a signal."""


def language_model(model: Any = None, **options: Any) -> LanguageModel:
    return LanguageModel(model or tiny.llama(dtype=torch.float64, **options), tiny.tokenizer(), name="tiny")


@pytest.fixture
def model() -> LanguageModel:
    return language_model()


def site_names(model: LanguageModel) -> list[str]:
    return [model.sites[layer].name for layer in (0, 2)]


def moments_of(model: LanguageModel, folder: Path, tokens: int = 700, **options: Any) -> Moments:
    corpus = options.pop("corpus", None) or tiny.texts(rows=3)
    on_tokens = options.pop("on_tokens", None)
    progress = Progress() if on_tokens is None else Progress(moments=on_tokens)
    return Moments(model, corpus, tokens, folder=folder, progress=progress, **{"width": 32, **options})


def collect(model: LanguageModel, folder: Path, *args: Any, **options: Any) -> dict[str, SecondMoment]:
    return moments_of(model, folder, *args, **options).collect(site_names(model))


def assert_same(got: dict[str, SecondMoment], expected: dict[str, SecondMoment]) -> None:
    assert got.keys() == expected.keys()
    for site, moment in expected.items():
        assert torch.equal(got[site].total, moment.total)
        assert got[site].tokens == moment.tokens


def plain_moments(moments: Moments) -> dict[str, SecondMoment]:
    """Whole forward passes, a hook, one window at a time."""
    model, left = moments.model.model, moments.tokens
    keys: dict[str, list[Tensor]] = {site: [] for site in site_names(moments.model)}
    rows = (row for batch in moments.corpus.windows(moments.model, moments.width, count()) for row in batch)
    for row in rows:
        if left <= 0:
            break
        left -= len(row)
        is_text = ~torch.isin(row, torch.tensor(START))
        handles = [
            module_at(model, site).register_forward_pre_hook(
                lambda _, args, rows=rows, is_text=is_text: rows.append(args[0][0, is_text])
            )
            for site, rows in keys.items()
        ]
        with torch.no_grad():
            model(input_ids=row.unsqueeze(0))
        for handle in handles:
            handle.remove()
    joined = {site: torch.cat(rows) for site, rows in keys.items()}
    return {site: SecondMoment(torch.einsum("ni,nj->ij", rows, rows), len(rows)) for site, rows in joined.items()}


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(1, {}), (100, {}), (700, {}), (10**9, {}), (144, {"corpus": OwnSamples(0, rows=4), "width": 12})],
)
def test_a_moment_is_the_plain_mean(model, tmp_path, tokens, options):
    moments = moments_of(model, tmp_path, tokens, **options)
    got, expected = moments.collect(site_names(model)), plain_moments(moments)
    for site, moment in got.items():
        assert moment.tokens == expected[site].tokens
        assert moment.total.dtype == torch.float64
        assert_close(moment.mean(), expected[site].mean(), 1e-6)
    if tokens == 10**9:  # all of the corpus
        assert 3000 < moment.tokens < 4000


def test_start_tokens_inside_a_window_are_left_out(model, tmp_path):
    texts = Texts(["The capital of France is Paris. " * 3, "I saw Rome. " * 6], "two", rows=2)
    ids = torch.cat(list(texts.windows(model, 24, count())))
    inside = torch.isin(ids[:, len(START) :], torch.tensor(START)).sum()
    assert inside > 0
    for moment in collect(model, tmp_path, ids.numel(), corpus=texts, width=24).values():
        assert moment.tokens == ids.numel() - len(ids) * len(START) - inside


@dataclass(frozen=True)
class CountedTexts(Texts):
    """Counts the batches that are read."""

    batches = 0

    def windows(self, *arguments: Any) -> Any:
        for batch in Texts.windows(self, *arguments):
            CountedTexts.batches += 1
            yield batch


def test_no_more_text_is_read_than_needed(model, tmp_path):
    corpus = CountedTexts(tiny.texts().documents, "counted", rows=3)
    first = collect(model, tmp_path, 2 * 3 * 32, corpus=corpus)
    assert CountedTexts.batches == 2
    again = collect(model, tmp_path, 2 * 3 * 32, corpus=corpus)
    assert CountedTexts.batches == 2, "the second call reads the cache"
    assert_same(again, first)


def test_only_missing_sites_are_computed(model, tmp_path):
    both = collect(model, tmp_path / "a")
    first, second = site_names(model)
    moments_of(model, tmp_path / "b").collect([first])
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "b").iterdir()}
    assert_same(moments_of(model, tmp_path / "b").collect([first, second]), both)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())


# Kills and damage


@pytest.mark.parametrize("seconds", [-1.0, 1e9])  # save after each batch, or only when the run is killed
def test_a_killed_run_resumes(model, tmp_path, seconds):
    whole = collect(model, tmp_path / "whole")
    seen: list[int] = []

    def kill(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 4:
            raise Killed

    with pytest.raises(Killed):
        collect(model, tmp_path / "killed", on_tokens=kill, checkpoint_seconds=seconds)
    assert [file.suffix for file in (tmp_path / "killed").iterdir()] == [".partial"]
    resumed: list[int] = []
    again = collect(model, tmp_path / "killed", on_tokens=lambda done, _: resumed.append(done))
    assert resumed[0] > seen[-1], "a finished batch was computed again"
    assert len(seen) + len(resumed) == -(-700 // (3 * 32))
    assert_same(again, whole)
    assert not list((tmp_path / "killed").glob("*.partial"))


def test_partial_sums_that_a_kill_left_beside_the_results_are_removed_after_a_day(model, tmp_path):
    def kill(done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        collect(model, tmp_path, on_tokens=kill)
    (left,) = tmp_path.glob("*.partial")
    data = left.read_bytes()
    collect(model, tmp_path)
    for age, is_there in ((3600, True), (90_000, False)):
        left.write_bytes(data)
        os.utime(left, (time.time() - age,) * 2)
        collect(model, tmp_path)
        assert left.exists() is is_there


@pytest.mark.parametrize("damage", ["truncated", "flipped bit", "garbage", "empty", "other tensor"])
@pytest.mark.parametrize("kind", ["finished", "partial"])
def test_a_damaged_file_is_computed_again(model, tmp_path, damage, kind):
    def kill(done: int, total: int) -> None:
        raise Killed

    if kind == "finished":
        collect(model, tmp_path / "damaged")
    else:
        with pytest.raises(Killed):
            collect(model, tmp_path / "damaged", on_tokens=kill)
    file = sorted((tmp_path / "damaged").iterdir())[0]
    data = file.read_bytes()
    contents = {"truncated": data[: len(data) // 2], "garbage": b"not safetensors", "empty": b""}
    contents["flipped bit"] = data[:-2] + bytes([data[-2] ^ 1]) + data[-1:]
    file.write_bytes(contents[damage] if damage in contents else save({"something": torch.zeros(2)}))
    assert_same(collect(model, tmp_path / "damaged"), collect(model, tmp_path / "whole"))


# What a moment depends on


def test_every_input_changes_the_file(model, tmp_path):
    site = "site"
    samples = [OwnSamples(seed, rows) for seed, rows in ((0, 64), (1, 64), (0, 7))]
    paths = [
        moments_of(model, tmp_path).path(site),
        moments_of(model, tmp_path).path("other"),
        moments_of(language_model(tiny.llama(1)), tmp_path).path(site),
        moments_of(language_model(rms_norm_eps=1.0), tmp_path).path(site),
        moments_of(LanguageModel(model.model, tiny.tokenizer(), start=()), tmp_path).path(site),
        moments_of(model, tmp_path, 701).path(site),
        moments_of(model, tmp_path, width=33).path(site),
        moments_of(model, tmp_path, corpus=Texts(["other"], "tiny", rows=3)).path(site),
        moments_of(model, tmp_path, corpus=tiny.texts(rows=4)).path(site),
        *(moments_of(model, tmp_path, corpus=corpus).path(site) for corpus in samples),
    ]
    assert len(set(paths)) == len(paths)
    assert moments_of(language_model(), tmp_path).path(site) == paths[0]


def test_a_config_is_the_same_however_a_model_is_loaded(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    again.config.pad_token_id = 3
    assert config_digest(again.config) == config_digest(model.config)
    assert tokenizer_digest(tiny.tokenizer(), (0,)) != tokenizer_digest(tiny.tokenizer(), ())


# Failures


def test_nan_keys_are_an_error_and_leave_no_file(model, tmp_path):
    module_at(model.model, model.sites[1].name).weight.data.fill_(torch.nan)
    with raises(InputError, "keys_not_finite"):
        collect(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_empty_corpus_is_an_error(model, tmp_path):
    with raises(InputError, "empty_corpus"):
        collect(model, tmp_path, corpus=Texts([], "nothing"))


def test_bfloat16_keys_are_summed_in_a_wider_dtype(tmp_path):
    """A sum in bfloat16 would stop growing after 256 equal terms."""
    narrow, wide = (
        next(iter(collect(language_model(tiny.llama(dtype=dtype)), tmp_path / str(dtype), 3000).values())).mean()
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert float((narrow - wide).norm() / wide.norm()) < 0.05
