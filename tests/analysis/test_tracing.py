"""A trace equals a plain loop of full passes, and finds a memory that was planted."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebind.analysis.traces import KINDS, POSITIONS, PromptTokens, Trace, TraceSettings, average_traces, read_prompt
from rebind.analysis.tracing import Tracer, attention_outputs, hooked
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError, NumericalError
from rebind.models.language_model import LanguageModel
from rebind.models.sites import find_sites, module_at
from tests import tiny
from tests.families import FAMILIES
from tests.support import assert_close, raises

FACT = Fact.parse("The capital of {France and Italy} is not", "Rome")
EXACT = {"gpt2": 1e-12, "gpt-j": 1e-9}  # elsewhere norms and rotations run in float32 whatever the dtype
PLAIN_FAMILIES = ("gpt2", "gpt-j", "gpt-neox", "llama", "opt", "bloom", "gemma3")


def language_model(model: Any) -> LanguageModel:
    return LanguageModel(model, tiny.tokenizer(), start=(0,))


def tracer_of(model: Any, settings: TraceSettings | None = None, **options: Any) -> Tracer:
    return Tracer(language_model(model), settings, **options)


@functools.cache
def family(name: str) -> Any:
    vocab = len(tiny.tokenizer())
    return FAMILIES[name](seed=1, vocab_size=vocab).double()


# The plain loop: one full pass for every state and every draw


def first_of(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def put(at: int, clean: Tensor) -> Any:
    """A hook that puts one token's state back."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        states = first_of(out).clone()
        flat = states.reshape(-1, states.shape[-1])  # one row: tokens are all there is
        flat[at] = clean.reshape(-1, states.shape[-1])[at]
        states = flat.reshape(states.shape)
        return (states, *out[1:]) if isinstance(out, tuple) else states

    return hook


def plain_trace(model: Any, tracer: Tracer, fact: Fact, answer: int) -> tuple[float, float, dict[str, Tensor]]:
    """Return the clean and corrupted probability and all effects, computed with hooks alone."""
    sites, settings = find_sites(model), tracer.settings
    prompt, _ = read_prompt(language_model(model), fact.as_prompt())
    ids = torch.tensor([prompt.ids])
    modules = {
        "hidden": [module_at(model, site.block) for site in sites],
        "mlp": [module_at(model, site.name) for site in sites],
        "attention": attention_outputs(model, sites),
    }
    clean: dict[tuple[str, int], Tensor] = {}

    def keep(key: tuple[str, int]) -> Any:
        return lambda _, __, out: clean.__setitem__(key, first_of(out).clone())

    def probability() -> float:
        return float(torch.softmax(model(input_ids=ids, use_cache=False).logits[0, -1].double(), -1)[answer])

    every = [(module, keep((kind, at))) for kind, listed in modules.items() for at, module in enumerate(listed)]
    depth, embeddings = len(sites), model.get_input_embeddings()
    first, last = prompt.subject
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randn(settings.draws, last + 1 - first, embeddings.weight.shape[-1], generator=generator)
    with torch.no_grad():
        with hooked(every):
            before = probability()
        table = embeddings(torch.arange(embeddings.weight.shape[0])).double()
        scale = settings.noise * table.std(correction=0)
        total = {kind: torch.zeros(len(prompt.ids), depth, dtype=torch.float64) for kind in settings.kinds}
        corrupted = 0.0
        for draw in drawn:

            def add(_: nn.Module, __: Any, out: Tensor, draw: Tensor = draw) -> Tensor:
                out = out.clone()
                out[:, first : last + 1] += (scale * draw.double()).to(out)
                return out

            with hooked([(embeddings, add)]):
                corrupted += probability() / settings.draws
            for kind in settings.kinds:
                for layer in range(depth):
                    half = tracer.window // 2
                    span = range(max(0, layer - half), min(depth, layer - half + tracer.window))
                    span = range(layer, layer + 1) if kind == "hidden" else span
                    for at in range(len(prompt.ids)):
                        pairs = [(modules[kind][one], put(at, clean[kind, one])) for one in span]
                        with hooked([(embeddings, add), *pairs]):
                            total[kind][at, layer] += probability() / settings.draws
    return before, corrupted, {kind: rows - corrupted for kind, rows in total.items()}


@pytest.mark.parametrize(("batch_tokens", "window"), [(1, 2), (50, 3), (10_000, 1)])
def test_a_trace_equals_the_plain_loop(batch_tokens, window):
    model = tiny.gpt2(dtype=torch.float64)
    tracer = tracer_of(model, TraceSettings(draws=2, window=window), batch_tokens=batch_tokens)
    got = tracer.trace(FACT)
    before, corrupted, expected = plain_trace(model, tracer, FACT, got.answer_id)
    assert got.clean == pytest.approx(before, abs=1e-12)
    assert got.corrupted == pytest.approx(corrupted, abs=1e-12)
    for kind in KINDS:
        assert float(expected[kind].abs().max()) > 1e-4
        assert_close(got.effects[kind], expected[kind], 1e-12)


@pytest.mark.parametrize("name", PLAIN_FAMILIES)
def test_a_trace_equals_the_plain_loop_in_every_family(name):
    model = family(name)
    tracer = tracer_of(model, TraceSettings(draws=1, window=2))
    fact = Fact.parse("In {Norway} we", "Rome")
    got = tracer.trace(fact)
    _, corrupted, expected = plain_trace(model, tracer, fact, got.answer_id)
    assert got.corrupted == pytest.approx(corrupted, abs=1e-6)
    for kind in KINDS:
        assert float(expected[kind].abs().max()) > 1e-5
        assert_close(got.effects[kind], expected[kind], EXACT.get(name, 1e-6))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_without_attention_outputs_tokens_do_not_influence_each_other(name):
    """This is what makes them the right modules, whatever they are called."""
    model = family(name)
    outputs = attention_outputs(model, find_sites(model))
    ids = torch.tensor([[5, 9, 20, 31], [7, 3, 44, 31]])
    with torch.no_grad():
        with_attention = model(input_ids=ids, use_cache=False).logits[:, -1]
        with hooked([(module, lambda _, __, out: torch.zeros_like(out)) for module in outputs]):
            without_attention = model(input_ids=ids, use_cache=False).logits[:, -1]
    assert not torch.allclose(with_attention[0], with_attention[1])
    assert_close(without_attention[0], without_attention[1], 1e-12)


# A planted memory

MARK, ANSWER = 11, 77  # the subject's token, and what follows it


def model_with_memory(memory: int, reader: int, layers: int = 6) -> Any:
    """A Llama whose answer is looked up by one MLP at the subject and carried to the end by one attention.

    Of the residual stream: coordinate 0 says "subject", 1 "known" (written by the MLP of layer `memory` where 0 is
    set), 2 is what attention of layer `reader` copies of 1, and the head answers where 2 is set. 3 says "any token" and
    keeps norms from blowing up what little noise there is.
    """
    model = tiny.llama(
        dtype=torch.float64,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=8,
        intermediate_size=8,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        table = model.get_input_embeddings().weight
        table[:, 3] = 1.0
        table[MARK, 0] = 3.0
        knows = model.model.layers[memory].mlp
        knows.gate_proj.weight[0, 0], knows.gate_proj.weight[0, 3] = 40.0, -30.0  # open for the subject alone
        knows.up_proj.weight[0, 3] = 1.0
        knows.down_proj.weight[1, 0] = 1.0
        reads = model.model.layers[reader].self_attn
        reads.v_proj.weight[0, 1] = 40.0  # attention is uniform: what one token has, all later ones get a share of
        reads.o_proj.weight[2, 0] = 1.0
        model.get_output_embeddings().weight[ANSWER, 2] = 8.0
    return model


class FixedTokenizer:
    """Words are numbers: the least that a trace asks of a tokenizer."""

    is_fast = True

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        rows = [self._one(one) for one in ([text] if isinstance(text, str) else text)]
        if isinstance(text, str):
            return dict(zip(("input_ids", "offset_mapping"), rows[0], strict=True))
        return {"input_ids": [ids for ids, _ in rows], "offset_mapping": [spans for _, spans in rows]}

    def _one(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, spans, at = [], [], 0
        for word in text.split(" "):
            if word:
                ids.append(int(word) if word.isdecimal() else 9)
                spans.append((at, at + len(word)))
            at += len(word) + 1
        return ids, spans

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]


@pytest.mark.parametrize(("memory", "reader"), [(1, 4), (2, 3), (0, 5)])
@pytest.mark.parametrize("subject_at", [1, 3])
def test_a_trace_finds_a_planted_memory(memory, reader, subject_at):
    model = model_with_memory(memory, reader)
    words = ["20", "21", "22", "23", "24", "25"]
    words[subject_at] = "{11}"
    fact = Fact.parse(" ".join(words), str(ANSWER))
    settings = TraceSettings(window=1, draws=6, noise=40.0)  # the table is nearly constant: its deviation is small
    tracer = Tracer(LanguageModel(model, FixedTokenizer(), start=()), settings)
    got = tracer.trace(fact)
    assert got.answer_id == ANSWER
    assert tracer.knows(fact)
    assert not tracer.knows(replace(fact, old="20")), "the old answer is the one to know"
    assert got.clean > 0.9 > 0.6 > got.corrupted
    last = len(words) - 1
    total = got.clean - got.corrupted
    # The MLP: at the subject, at the layer where it was planted, and nowhere else.
    assert got.peak("mlp") == (subject_at, memory)
    # Attention: at the last token, at the layer that reads, and nowhere else.
    assert got.peak("attention") == (last, reader)
    for kind, place in (("mlp", (subject_at, memory)), ("attention", (last, reader))):
        others = got.effects[kind].clone()
        assert float(others[place]) > 0.5 * total
        others[place] = 0.0
        assert float(others.abs().max()) < 0.3 * float(got.effects[kind][place])
    # Hidden states: at the subject until it is read, at the last token from then on.
    hidden = got.effects["hidden"]
    assert (hidden[subject_at, memory:reader] > 0.5 * total).all()
    assert (hidden[subject_at, reader:] < 0.1 * total).all()
    assert_close(hidden[last, reader:], torch.full((6 - reader,), total, dtype=torch.float64), 1e-6)
    assert (hidden[last, :reader].abs() < 0.1 * total).all()


# Promises


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    model = tiny.llama()
    first, second = (tracer_of(model).trace(FACT).to_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    other = tracer_of(model, TraceSettings(seed=1)).trace(FACT)
    assert other.corrupted != first["corrupted"]


def test_the_model_is_left_unchanged():
    model = tiny.llama()
    before = tiny.weights(model)
    tracer_of(model).trace(FACT)
    assert tiny.weights(model) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_tokens_before_the_subject_have_no_effect_and_the_last_can_be_traced_alone():
    tracer = tracer_of(tiny.llama(dtype=torch.float64))
    whole = tracer.trace(FACT)
    first, last = whole.prompt.subject
    assert first > 1, "the test needs tokens before the subject"
    only = tracer.trace(FACT, subject_only=True)
    for kind in KINDS:
        assert (whole.effects[kind][:first] == 0).all()
        assert_close(only.effects[kind][last], whole.effects[kind][last], 1e-6)
        assert only.effects[kind][last + 1 :].isnan().all()
    assert only.peak("hidden")[0] == last


def test_restoring_the_last_state_restores_everything():
    got = tracer_of(tiny.llama(dtype=torch.float64)).trace(FACT)
    assert float(got.effects["hidden"][-1, -1]) == pytest.approx(got.clean - got.corrupted, abs=1e-6)
    assert float(got.effects["hidden"][:-1, -1].abs().max()) < 1e-6, "nothing reads the last block's other tokens"


def test_the_answer_is_the_models_own_or_the_target():
    tracer = tracer_of(tiny.llama())
    own, target = tracer.trace(FACT), tracer.trace(FACT, use_target=True)
    assert own.first_choice
    assert own.clean >= target.clean
    assert target.answer_id == read_prompt(tracer.model, FACT.as_prompt())[1]


def test_noise_is_measured_as_embeddings_leave_their_module():
    model = family("gemma3")  # scales them inside
    table = model.get_input_embeddings()
    with torch.no_grad():
        expected = float(table(torch.arange(len(table.weight))).std(correction=0))
    assert tracer_of(model).embedding_std == pytest.approx(expected, rel=1e-6)
    assert expected > 2 * float(table.weight.std())


@pytest.mark.parametrize(
    ("prompt", "subject"),
    [
        ("The mother tongue of {Ærøskøbing Łódź} is", "Ærøskøbing Łódź"),
        ("{東京} は", "東京"),
        ("عاصمة {مصر} هي", "مصر"),
        ("I like {🙂} and", "🙂"),
    ],
)
def test_subjects_in_any_script(prompt, subject):
    read, _ = read_prompt(language_model(tiny.llama()), Fact.parse(prompt, "x").as_prompt())
    first, last = read.subject
    covered = tiny.tokenizer().decode(read.ids[first : last + 1])
    assert subject in covered
    assert subject not in tiny.tokenizer().decode(read.ids[first + 1 : last + 1])
    assert len(read.labels) == len(read.ids)
    got = tracer_of(tiny.llama(), TraceSettings(draws=1, kinds=("hidden",))).trace(Fact.parse(prompt, "x"))
    assert (got.effects["hidden"][:first] == 0).all()
    assert torch.isfinite(got.effects["hidden"]).all()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: tracer_of(tiny.llama()).trace(Fact.parse("{France} is" + " very" * 200, "x")), "prompt_too_long"),
        (lambda: TraceSettings(kinds=("heads",)), "unknown_kind"),
        (lambda: TraceSettings(draws=0), "not_positive"),
        (lambda: TraceSettings(draws=10**30), "not_positive"),
        (lambda: TraceSettings(seed=2**32), "invalid_seed"),
        (lambda: TraceSettings(noise=float("inf")), "not_positive"),
        (lambda: TraceSettings(noise=float("nan")), "not_positive"),
    ],
)
def test_invalid_input_is_refused(make, code):
    with raises(InputError, code):
        make()


def test_probabilities_that_are_not_finite_are_refused():
    settings = TraceSettings(draws=1, kinds=("hidden",), noise=1e300)  # infinite in float32
    with raises(NumericalError, "probability_not_finite"):
        tracer_of(tiny.llama(), settings).trace(FACT)


def test_the_window_is_romes_share_of_the_depth():
    assert [TraceSettings().window_for(depth) for depth in (48, 24, 30, 4, 1)] == [10, 5, 6, 1, 1]
    assert TraceSettings(window=3).window_for(48) == 3


# Averages


def trace_with(subject: tuple[int, int], tokens: int, effects: Tensor) -> Trace:
    prompt = PromptTokens(tuple(range(tokens)), ("x",) * tokens, subject, "x")
    return Trace(prompt, "y", 0, True, 0.8, 0.2, {"mlp": effects}, TraceSettings(), 1.0, 1, 0.0)


def test_averages_by_hand():
    long = trace_with((1, 4), 8, torch.arange(16.0, dtype=torch.float64).reshape(8, 2))
    short = trace_with((0, 0), 2, torch.tensor([[10.0, 20.0], [30.0, 40.0]], dtype=torch.float64))
    ending = trace_with((1, 2), 3, torch.zeros(3, 1))
    assert long.prompt.by_position() == [[1], [2, 3], [4], [5], [6], [7]]
    assert short.prompt.by_position() == [[], [], [0], [], [], [1]]
    assert ending.prompt.by_position() == [[1], [], [2], [], [], []], "a subject that ends the prompt counts once"
    got = average_traces([long, short])
    assert got.counts == (1, 1, 2, 1, 1, 2)
    assert len(got.labels) == len(POSITIONS)
    assert got.effects["mlp"].tolist() == [[2, 3], [5, 6], [9, 14.5], [10, 11], [12, 13], [22, 27.5]]
    assert (got.clean, got.corrupted, got.facts) == (pytest.approx(0.8), pytest.approx(0.2), 2)
    assert json.loads(json.dumps(got.to_json()))["facts"] == 2
