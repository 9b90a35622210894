"""Second moments of keys: what a plain loop finds, kept, resumed after a kill, and never mistaken for another's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.moments import collect as moments_module
from rebind.edit.moments.collect import Moment, Recipe, collect, tokenizer_digest
from rebind.edit.moments.corpus import OwnSamples, Texts
from rebind.errors import InputError, StorageError
from rebind.models.generation import sample
from rebind.models.sites import find_sites, module_at
from tests import tiny
from tests.support import assert_close

START = (0,)


class Killed(BaseException):
    """As abrupt as a signal."""


@pytest.fixture
def model() -> Any:
    return tiny.llama(dtype=torch.float64)


def _sites(model: Any, layers: tuple[int, ...] = (0, 2)) -> list[tuple[str, Any]]:
    names = [find_sites(model)[layer].name for layer in layers]
    return [(name, module_at(model, name)) for name in names]


def _recipe(tokens: int = 700, **changes: Any) -> Recipe:
    return replace(Recipe("fingerprint", tiny.texts(rows=3), tokens, width=32), **changes)


def _collect(model: Any, recipe: Recipe, folder: Any, **options: Any) -> dict[str, Moment]:
    return collect(tiny.trunk(model), tiny.tokenizer(), START, _sites(model), recipe, folder=folder, **options)


def _plain(model: Any, recipe: Recipe) -> dict[str, Moment]:
    """Whole forward passes, a hook, one window at a time."""
    left = recipe.tokens
    sums: dict[str, list[Tensor]] = {name: [] for name, _ in _sites(model)}
    for batch in recipe.corpus.windows(model, tiny.tokenizer(), START, recipe.width, 0):
        for row in batch:
            if left <= 0:
                break
            left -= len(row)
            text = ~torch.isin(row, torch.tensor(START))
            handles = [
                site.register_forward_pre_hook(
                    lambda _, args, name=name, text=text: sums[name].append(args[0][0, text])
                )
                for name, site in _sites(model)
            ]
            with torch.no_grad():
                model(input_ids=row.unsqueeze(0))
            for handle in handles:
                handle.remove()
        if left <= 0:
            break
    keys = {name: torch.cat(rows) for name, rows in sums.items()}
    return {name: Moment(torch.einsum("ni,nj->ij", rows, rows), len(rows)) for name, rows in keys.items()}


def test_what_begins_a_text_inside_a_window_is_no_old_key(model, tmp_path):
    """A text's first token is read like every window's, with a key far from all others."""
    texts = Texts(["The capital of France is Paris. " * 3, "I saw Rome. " * 6], "two", rows=2)
    ids = torch.cat(list(texts.windows(model, tiny.tokenizer(), START, 24, 0)))
    inside = torch.isin(ids[:, len(START) :], torch.tensor(START)).sum()
    assert inside > 0
    found = _collect(model, _recipe(ids.numel(), corpus=texts, width=24), tmp_path)
    for moment in found.values():
        assert moment.tokens == ids.numel() - len(ids) * len(START) - inside


@pytest.mark.parametrize("tokens", [1, 100, 700, 10**9])
def test_a_moment_is_the_plain_mean(model, tmp_path, tokens):
    recipe = _recipe(tokens)
    got, expected = _collect(model, recipe, tmp_path), _plain(model, recipe)
    assert got.keys() == expected.keys()
    for name, moment in got.items():
        assert moment.tokens == expected[name].tokens
        assert moment.total.dtype == torch.float64
        assert_close(moment.mean(), expected[name].mean(), 1e-6)
    if tokens == 10**9:  # all of the corpus
        assert 3000 < moment.tokens < 4000


def test_no_window_is_drawn_that_is_not_needed(model, tmp_path):
    drawn = []

    class Counted(Texts):
        def windows(self, *arguments: Any) -> Any:
            for batch in Texts.windows(self, *arguments):
                drawn.append(batch.numel())
                yield batch

    corpus = Counted(tiny.texts().documents, "counted", rows=3)
    _collect(model, _recipe(2 * 3 * 32, corpus=corpus), tmp_path)
    assert len(drawn) == 2


def test_a_second_call_reads_the_file(model, tmp_path, monkeypatch):
    first = _collect(model, _recipe(), tmp_path)
    monkeypatch.setattr(moments_module, "_accumulate", None)  # whoever computes again fails
    again = _collect(model, _recipe(), tmp_path)
    for name, moment in first.items():
        assert torch.equal(again[name].total, moment.total)
        assert again[name].tokens == moment.tokens


def test_only_missing_sites_are_computed(model, tmp_path):
    both = _collect(model, _recipe(), tmp_path / "a")
    sites = _sites(model)
    trunk, tokenizer = tiny.trunk(model), tiny.tokenizer()
    collect(trunk, tokenizer, START, sites[:1], _recipe(), folder=tmp_path / "b")
    ran: list[str] = []
    sites[0][1].register_forward_pre_hook(lambda *_: ran.append("first"))
    sites[1][1].register_forward_pre_hook(lambda *_: ran.append("second"))
    again = collect(trunk, tokenizer, START, sites, _recipe(), folder=tmp_path / "b")
    assert "second" in ran
    for name, moment in both.items():
        assert torch.equal(again[name].total, moment.total)


@pytest.mark.parametrize("seconds", [-1.0, 1e9])  # a checkpoint after each batch; none but that of the kill
def test_a_killed_run_goes_on_where_it_was(model, tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(moments_module, "CHECKPOINT_SECONDS", seconds)
    whole = _collect(model, _recipe(), tmp_path / "whole")
    seen: list[int] = []

    def kill(done: int, wanted: int) -> None:
        seen.append(done)
        if len(seen) == 4:
            raise Killed

    with pytest.raises(Killed):
        _collect(model, _recipe(), tmp_path / "killed", on_tokens=kill)
    assert [file.suffix for file in (tmp_path / "killed").iterdir()] == [".partial"]
    resumed: list[int] = []
    again = _collect(model, _recipe(), tmp_path / "killed", on_tokens=lambda done, _: resumed.append(done))
    assert resumed[0] > seen[-1], "a finished batch was computed again"
    assert len(seen) + len(resumed) == -(-700 // (3 * 32))
    for name, moment in whole.items():
        assert torch.equal(again[name].total, moment.total)
        assert again[name].tokens == moment.tokens
    assert not list((tmp_path / "killed").glob("*.partial"))


def test_a_kill_without_warning_loses_only_what_came_after_the_checkpoint(model, tmp_path, monkeypatch):
    """SIGKILL runs no handler: the file from the last checkpoint is all there is."""
    monkeypatch.setattr(moments_module, "CHECKPOINT_SECONDS", -1.0)
    kept: list[bytes] = []

    def watch(done: int, wanted: int) -> None:
        kept.extend(file.read_bytes() for file in tmp_path.glob("a/*.partial"))
        if len(kept) == 3:
            raise Killed

    with pytest.raises(Killed):
        _collect(model, _recipe(), tmp_path / "a", on_tokens=watch)
    (partial,) = (tmp_path / "a").glob("*.partial")
    partial.write_bytes(kept[1])
    resumed: list[int] = []
    again = _collect(model, _recipe(), tmp_path / "a", on_tokens=lambda done, _: resumed.append(done))
    assert resumed[0] == 3 * 3 * 32
    whole = _collect(model, _recipe(), tmp_path / "b")
    assert all(torch.equal(again[name].total, whole[name].total) for name in whole)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "one bit", "other tensor"])
@pytest.mark.parametrize("kind", ["finished", "partial"])
def test_a_damaged_file_is_computed_again(model, tmp_path, damage, kind):
    whole = _collect(model, _recipe(), tmp_path / "whole")
    folder = tmp_path / "damaged"
    if kind == "finished":
        _collect(model, _recipe(), folder)
    else:
        with pytest.raises(Killed):
            _collect(model, _recipe(), folder, on_tokens=_raise_killed)
    file = sorted(folder.iterdir())[0]
    data = bytearray(file.read_bytes())
    if damage == "one bit":
        data[-3] ^= 4
    file.write_bytes(
        {
            "truncated": bytes(data[: len(data) // 2]),
            "garbage": b"not safetensors at all",
            "empty": b"",
            "one bit": bytes(data),
            "other tensor": moments_module.save({"something": torch.zeros(2)}),
        }[damage]
    )
    again = _collect(model, _recipe(), folder)
    for name, moment in whole.items():
        assert torch.equal(again[name].total, moment.total)


def _raise_killed(*_: Any) -> None:
    raise Killed


def test_merging_is_reading_both(model, tmp_path):
    documents = tiny.texts().documents
    parts = [
        _collect(model, _recipe(10**9, corpus=Texts(half, "half", rows=3)), tmp_path)
        for half in (documents[:10], documents[10:])
    ]
    (name, _), *_ = _sites(model)
    merged = parts[0][name].merge(parts[1][name])
    assert merged.tokens == parts[0][name].tokens + parts[1][name].tokens
    assert_close(merged.total, parts[0][name].total + parts[1][name].total, 0.0)
    weighed = sum(part[name].mean() * part[name].tokens for part in parts) / merged.tokens
    assert_close(merged.mean(), weighed, 1e-12)


def test_every_ingredient_changes_the_key(monkeypatch):
    base = _recipe()
    keys = {
        "base": base.key("site"),
        "site": base.key("other"),
        "model": _recipe(model="another").key("site"),
        "tokens": _recipe(701).key("site"),
        "width": _recipe(width=33).key("site"),
        "tokenizer": _recipe(tokenizer="another").key("site"),
        "text": _recipe(corpus=Texts(["other"], "tiny", rows=3)).key("site"),
        "rows": _recipe(corpus=tiny.texts(rows=4)).key("site"),
        "samples": _recipe(corpus=OwnSamples(0)).key("site"),
        "seed": _recipe(corpus=OwnSamples(1)).key("site"),
        "sampled rows": _recipe(corpus=OwnSamples(0, rows=7)).key("site"),
    }
    monkeypatch.setattr(moments_module, "VERSION", moments_module.VERSION + 1)
    keys["version"] = base.key("site")
    assert len(set(keys.values())) == len(keys), keys


def test_documents_do_not_run_together_in_the_digest():
    assert Texts(["ab", "c"], "x").digest != Texts(["a", "bc"], "x").digest


def test_a_tokenizers_digest_sees_its_start():
    assert tokenizer_digest(tiny.tokenizer(), (0,)) == tokenizer_digest(tiny.tokenizer(), (0,))
    assert tokenizer_digest(tiny.tokenizer(), (0,)) != tokenizer_digest(tiny.tokenizer(), ())


def test_nan_keys_are_an_error_and_leave_no_file(model, tmp_path):
    _sites(model)[1][1].weight.data.fill_(0.0)
    module_at(model, find_sites(model)[1].name).weight.data.fill_(torch.nan)
    with pytest.raises(InputError, match="keys of .*2.mlp.down_proj hold NaN or infinity, expected finite"):
        _collect(model, _recipe(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_nothing_is_named(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write .*file"):
        _collect(model, _recipe(100), tmp_path / "file")


def test_bf16_keys_are_summed_widely(tmp_path):
    """A sum in bf16 would stop growing after 256 like terms."""
    model = tiny.llama(dtype=torch.bfloat16)
    moment = next(iter(_collect(model, _recipe(3000), tmp_path).values()))
    wide = next(iter(_collect(tiny.llama(), _recipe(3000), tmp_path / "wide").values()))
    assert float((moment.mean() - wide.mean()).norm() / wide.mean().norm()) < 0.05


# Corpora


def _ids(batches: Any) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch]


def test_a_text_file_is_packed_into_windows(tmp_path, model):
    path = tmp_path / "wiki.txt"
    path.write_text("\n\n".join(tiny.SENTENCES) + "\n\n\n", encoding="utf-8")
    corpus = Texts.from_file(path)
    assert list(corpus.documents) == tiny.SENTENCES
    rows = _ids(corpus.windows(model, tiny.tokenizer(), START, 16, 0))
    assert all(len(row) == 16 and row[0] == START[0] for row in rows)
    packed = [token for row in rows for token in row[1:]]
    whole = [token for text in tiny.SENTENCES for token in (*START, *tiny.tokenizer()(text).input_ids)]
    assert packed == whole[: len(packed)]
    assert len(whole) - len(packed) < 15  # only what fills no window is left out


def test_windows_from_the_middle_are_the_same_windows(model):
    corpus = tiny.texts(rows=3)
    whole = list(corpus.windows(model, tiny.tokenizer(), START, 32, 0))
    assert len(whole) > 4
    for skip in (1, 4, len(whole)):
        rest = list(corpus.windows(model, tiny.tokenizer(), START, 32, skip))
        assert _ids(rest) == _ids(whole[skip:])


def test_dataset_rows(model):
    corpus = Texts.from_dataset([{"text": "One."}, {"text": "  "}, {"text": "Two."}])
    assert list(corpus.documents) == ["One.", "Two."]
    assert list(Texts.from_dataset([{"body": "x"}], "body").documents) == ["x"]
    with pytest.raises(InputError, match="wiki has columns body, no 'text': name the one with the text"):
        Texts.from_dataset([{"body": "x"}], name="wiki")
    with pytest.raises(InputError, match="holds no text in column 'text'"):
        Texts.from_dataset([{"text": " "}])


def test_a_short_document_is_one_short_window(model, tmp_path):
    corpus = Texts(["The sea."], "short")
    rows = _ids(corpus.windows(model, tiny.tokenizer(), START, 64, 0))
    assert len(rows) == 1
    moment = next(iter(_collect(model, _recipe(corpus=corpus, width=64), tmp_path).values()))
    assert moment.tokens == len(rows[0]) - 2 * len(START) > 0  # the window's start and the text's


@pytest.mark.parametrize(
    ("content", "message"),
    [(b" \n\n \n", "holds no text"), (b"\xff\xfe\x00", "not UTF-8"), (None, "is not a file")],
)
def test_files_that_are_no_corpus(tmp_path, content, message):
    path = tmp_path / "wiki.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        Texts.from_file(path)


def test_a_corpus_of_nothing_is_an_error(model, tmp_path):
    with pytest.raises(InputError, match="gave no tokens"):
        _collect(model, _recipe(corpus=Texts([], "nothing")), tmp_path)


def test_own_samples_follow_the_seed_and_resume(model):
    def batches(corpus: OwnSamples, skip: int, count: int) -> list[list[int]]:
        return _ids(itertools.islice(corpus.windows(model, tiny.tokenizer(), START, 12, skip), count))

    first = batches(OwnSamples(5, rows=4), 0, 3)
    assert len(first) == 12
    assert all(len(row) == 12 and row[0] == START[0] for row in first)
    assert batches(OwnSamples(5, rows=4), 0, 3) == first
    assert batches(OwnSamples(5, rows=4), 2, 1) == first[8:]
    assert batches(OwnSamples(6, rows=4), 0, 3) != first
    assert len({tuple(row) for row in first}) > 6, "rows and batches should differ"


def test_own_samples_serve_as_a_corpus(model, tmp_path):
    recipe = _recipe(4 * 12 * 3, corpus=OwnSamples(0, rows=4), width=12)
    got, expected = _collect(model, recipe, tmp_path), _plain(model, recipe)
    for name, moment in got.items():
        assert moment.tokens == expected[name].tokens == 4 * 11 * 3
        assert_close(moment.mean(), expected[name].mean(), 1e-6)


def test_sampling_follows_its_seed_alone(model):
    first = torch.tensor([[5], [6]])
    one, same, other = (sample(model, START, first, 9, seed=seed) for seed in (1, 1, 2))
    assert one.shape == (2, 9)
    assert torch.equal(one[:, :1], first)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_likeliest_of_one_is_greedy(model):
    text = sample(model, START, torch.tensor([[5]]), 6, seed=3, top_k=1)[0].tolist()
    for length in range(1, 6):
        logits = model(input_ids=torch.tensor([[*START, *text[:length]]])).logits[0, -1]
        assert text[length] == int(logits.argmax())


def test_samples_have_the_models_frequencies(model):
    """A thousand draws of one token against its probabilities: χ² within what chance allows."""
    draws = sample(model, START, torch.full((2000, 1), 5), 2, seed=0, temperature=0.7)[:, 1]
    expected = 2000 * torch.softmax(model(input_ids=torch.tensor([[*START, 5]])).logits[0, -1] / 0.7, -1)
    counts = torch.bincount(draws, minlength=len(expected)).double()
    often = expected > 5
    chi2 = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    freedom = int(often.sum())
    assert freedom > 20
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5
