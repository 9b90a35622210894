"""Many questions in few passes give what one plain pass each would."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rebind.edit.facts.scores import score_facts
from rebind.evals.asking import Model, _noise, ask, generate, text_nll

from rebind.edit.facts.fact import Fact
from rebind.errors import InputError
from rebind.evals import asking
from tests import tiny

PAIRS = [
    ("The capital of France is", "Rome"),
    ("The capital of France is", "Paris"),
    ("The capital of France is", "a city with a very long name indeed"),
    ("I", "think"),
    ("The mother tongue of Danielle Darrieux is", "French"),
    ("عاصمة فرنسا هي", "روما"),
    ("法国的首都是", "罗马"),
    ("The capital of France is", "Rome"),  # again
    ("He said that {she} had", "seen it"),
]
builds = pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])


def new_model(build=tiny.llama, start=(0,), **options) -> Model:
    return Model(tiny.trunk(build(dtype=torch.float64, **options)), tiny.tokenizer(), start)


def plain(model: Model, ids: list[int]) -> torch.Tensor:
    return model.trunk.model(input_ids=torch.tensor([ids])).logits[0]


@builds
@pytest.mark.parametrize("start", [(), (0,)])
def test_asking_together_is_asking_one_by_one(build, start, monkeypatch):
    model = new_model(build, start)
    facts = [Fact("{}", prompt, target) for prompt, target in PAIRS]
    expected = score_facts(model.trunk, model.tokenizer, start, facts)
    for budget in (1, 40, 10_000):
        monkeypatch.setattr(asking, "CPU_TOKENS", budget)
        told = ask(model, PAIRS)
        assert [one.nll for one in told] == pytest.approx([one.nll for one in expected], abs=1e-9)
        assert [one.right == one.tokens for one in told] == [one.exact for one in expected]
        assert [model.tokenizer.decode([one.first]) for one in told] == [one.says for one in expected]
    assert ask(model, []) == []


def test_tokens_that_come_first_are_counted():
    model = new_model()
    ids = list(model.encode([("The capital of France is", ".")])[0].ids)
    best = [int(plain(model, ids)[-1].argmax())]
    best.append(int(plain(model, [*ids, *best])[-1].argmax()))
    other = (best[1] + 1) % len(model.tokenizer)
    real = model.encode

    def encode(pairs):
        return [dataclasses.replace(one, target=target) for one, target in zip(real(pairs), targets, strict=True)]

    targets = [tuple(best), (best[0], other), (other, best[1])]
    object.__setattr__(model, "encode", encode)
    told = ask(model, [("The capital of France is", "x")] * 3)
    assert [one.tokens for one in told] == [2, 2, 2]
    assert [one.right for one in told[:2]] == [2, 1]
    assert {one.first for one in told} == {best[0]}


def test_a_prompt_runs_once_for_all_its_targets(monkeypatch):
    model = new_model()
    tokens = []
    real = type(model.trunk).cache
    monkeypatch.setattr(
        type(model.trunk), "cache", lambda self, some: tokens.append(some.ids.shape) or real(self, some)
    )
    ask(model, [("The capital of France is", target) for target in ("Rome", "Paris", "Madrid", "Berlin")])
    ((rows, _),) = tokens
    assert rows == 1


def test_broken_models_have_the_worst_nll():
    model = new_model()
    with torch.no_grad():
        model.trunk.model.lm_head.weight.fill_(torch.nan)
    assert ask(model, PAIRS[:1])[0].nll == asking.WORST


@builds
def test_generation_side_by_side_is_generation_alone(build):
    model = new_model(build)
    prompts = ["The capital of France is", "I", "In the north of Norway the sun does not", "I"]
    together = generate(model, prompts, 6)
    for prompt, said in zip(prompts, together, strict=True):
        ids = list(model.encode([(prompt, ".")])[0].ids)
        made: list[int] = []
        for _ in range(6):
            made.append(int(plain(model, ids + made)[-1].argmax()))
        if 0 in made:
            made = made[: made.index(0)]
        assert said == model.tokenizer.decode(made, skip_special_tokens=True)
    assert generate(model, [], 6) == []


def test_sampling_is_seeded_and_keeps_to_the_best():
    model = new_model()
    prompts = ["The capital of France is", "I"]
    drawn = generate(model, prompts, 8, top_k=5, seed=1)
    assert drawn == generate(model, prompts, 8, top_k=5, seed=1)
    assert drawn != generate(model, prompts, 8, top_k=5, seed=2)
    assert generate(model, prompts, 8, top_k=1, seed=3) == generate(model, prompts, 8)


def test_generation_stops_at_the_context_and_at_the_end_token():
    model = new_model(tiny.gpt2, n_positions=16)  # learned positions: there is no seventeenth
    assert generate(model, ["I"], 500) == generate(model, ["I"], 16 - len(model.encode([("I", ".")])[0].ids))
    assert asking._until([5, 6, 0, 7], {0}) == [5, 6]
    assert asking._ends(model) == {0}


def test_a_long_prompt_does_not_cut_short_what_follows_the_others():
    model = new_model(tiny.gpt2, n_positions=24)
    long = "The capital of France is Paris, and the capital of Italy is"
    prompts = ["I", long, "The capital of France is"]
    assert 24 - 8 < len(model.encode([(long, ".")])[0].ids) < 24, "it has room, but not for all"
    for options in ({}, {"top_k": 1}, {"top_k": 5, "seed": 3}):
        together = generate(model, prompts, 8, **options)
        assert together == [generate(model, [prompt], 8, **options)[0] for prompt in prompts]
    rows = [asking._room(model.trunk, one, 8) for one in model.encode([(prompt, ".") for prompt in prompts])]
    assert rows[0] == rows[2] == 8 > rows[1] > 0


@builds
@pytest.mark.parametrize("start", [(), (0,)])
@pytest.mark.parametrize(("window", "limit"), [(32, 32), (95, 95), (96, 95), (512, 95)])
def test_the_nll_of_a_text_is_that_of_plain_passes(build, start, window, limit):
    model = new_model(build, start)  # of 96 positions, one of them for the start
    text = " ".join(tiny.SENTENCES)
    ids = model.tokenizer(text).input_ids
    found, tokens = text_nll(model, text, window=window)
    expected = 0.0
    for begin in range(0, len(ids) if start else len(ids) - 1, limit):
        row = [*start, *ids[begin : begin + limit]] if start else ids[begin : begin + limit + 1]
        said = torch.log_softmax(plain(model, row), dim=-1)
        expected -= sum(float(said[place, token]) for place, token in enumerate(row[1:]))
    assert len(ids) > limit
    assert tokens == len(ids) - (not start), "what nothing stands before is not predicted"
    assert found == pytest.approx(expected, rel=1e-9)


class Predictable:
    """A trunk of eight words whose logits say after which token they stand, and how many stood before it."""

    device, context = torch.device("cpu"), None

    def __init__(self) -> None:
        self.lines: list[list[int]] = []

    def logits(self, tokens, where):
        self.lines += tokens.ids.tolist()
        rows = [(int(tokens.ids[row, step]), int(step)) for row, step in where]
        return torch.stack([self.row(token, place) for token, place in rows])

    @staticmethod
    def row(token: int, place: int) -> torch.Tensor:
        return torch.arange(8.0).roll(3 * token + place)


class Letters:
    """Every letter is a token."""

    def __call__(self, text, **options):
        return {"input_ids": ["abcdefgh".index(letter) for letter in text]}


def by_hand(*pairs: tuple[int, int, int]) -> float:
    """The NLL of (token, after a token, at a place)."""
    rows = [(Predictable.row(after, place), token) for token, after, place in pairs]
    return -float(sum((row - row.logsumexp(-1))[token] for row, token in rows))


def test_without_a_start_the_first_token_is_context_alone():
    model = Model(Predictable(), Letters(), ())
    found, tokens = text_nll(model, "bfcad", window=2)
    assert model.trunk.lines == [[1, 5, 2], [2, 0, 3]], "windows begin with what stands before them, and nothing else"
    assert tokens == 4
    assert found == pytest.approx(by_hand((5, 1, 0), (2, 5, 1), (0, 2, 0), (3, 0, 1)), rel=1e-6)


def test_with_a_start_every_token_is_counted():
    model = Model(Predictable(), Letters(), (7,))
    found, tokens = text_nll(model, "bfc", window=2)
    assert [line[:3] for line in model.trunk.lines] == [[7, 1, 5], [7, 2, 0]]  # the last one padded
    assert tokens == 3
    assert found == pytest.approx(by_hand((1, 7, 0), (5, 1, 1), (2, 7, 0)), rel=1e-6)


def test_a_text_of_one_token_has_nothing_to_predict_without_a_start():
    assert text_nll(Model(Predictable(), Letters(), (7,)), "b")[1] == 1
    with pytest.raises(InputError, match="held text is 1 token long, expected 2 or more"):
        text_nll(Model(Predictable(), Letters(), ()), "b")


def test_prompts_are_drawn_apart():
    """The noise of two prompts has nothing in common, and one prompt's is the same every time."""
    drawn = _noise([(1, 2), (1, 3), (1, 2)], 4, 5, seed=0)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.isclose(drawn[0], drawn[1]).any()
    assert not torch.isclose(drawn, _noise([(1, 2), (1, 3), (1, 2)], 4, 5, seed=1)).any()
