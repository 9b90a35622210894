"""Targets found for many facts at once are those of a plain loop over single facts, prompt by prompt."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.targets import FactPrompts, TargetSettings, TargetStates, find_targets
from rebind.edit.targets.objective import can_record
from rebind.errors import MemoryWarning, NumericalError
from rebind.models.batching import CACHED_TOKEN_COST
from rebind.models.prompts import EncodedPrompt
from rebind.models.sites import find_sites, module_at
from rebind.models.trunk import Trunk
from tests import tiny
from tests.families import FAMILIES, VOCAB
from tests.support import assert_close, raises

LAYER = 1
SETTINGS = TargetSettings(steps=9, rate=0.5, clamp=0.5, decay=0.4, kl=0.3, keep=1.0, end=0.5, enough=4.65)
NORMALIZED = replace(SETTINGS, optimizer="normalized", rate=0.2)


@functools.cache
def family_trunk(name: str) -> Trunk:
    model = FAMILIES[name](seed=2).double()
    widen_norms(model)
    return tiny.trunk(model)


def widen_norms(model: torch.nn.Module) -> None:
    """Let RMS norms compute in the model's dtype: transformers rounds to float32 inside them."""

    def widened(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        return torch.nn.functional.rms_norm(x, x.shape[-1:], getattr(self, "weight", None), eps)

    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("RMSNorm", "L2Norm")) and not name.startswith("Gemma"):
            module.forward = MethodType(widened, module)  # a method, so that copies of the model have their own


def make_fact(seed: int, target: int, *prompts: tuple[int, ...], kept: tuple[tuple[int, ...], ...] = ()) -> FactPrompts:
    """A fact with a target of this many tokens and prompts of (tokens, index of each mention of the subject)."""
    draw = torch.Generator().manual_seed(seed)
    rows = [(length, mentions) for length, *mentions in (*prompts, *kept)]
    drawn = [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length, _ in (*rows, (target, ()))]
    *ids, target_ids = map(tuple, drawn)
    encoded = [
        EncodedPrompt(row, mentions[-1], target_ids if place < len(prompts) else (), tuple(mentions))
        for place, (row, (_, mentions)) in enumerate(zip(ids, rows, strict=True))
    ]
    if len(kept) > 1:  # a chat: the answer begins behind the first mention
        encoded[1] = replace(encoded[1], answer=encoded[1].mentions[0] + 2)
    if len(kept) > 2:  # the opening of an answer to a general question
        encoded[-1] = replace(encoded[-1], answer=encoded[-1].mentions[0] + 2)
    framings = ("start", *("text",) * (len(prompts) - 1)) if seed % 3 == 0 else ()
    said, others = tuple(encoded[: len(prompts)]), tuple(encoded[len(prompts) :])
    return FactPrompts(said, others, ends_word=seed % 2 == 0, framings=framings)


FACTS = [
    make_fact(0, 1, (6, 3), (11, 2, 8), (8, 5), kept=((5, 2), (7, 1, 3))),
    make_fact(1, 4, (5, 0), (9, 4)),  # the subject is the very first token
    make_fact(2, 2, (4, 3)),  # the prompt ends with the subject
    make_fact(3, 1, (9, 2), (13, 6), (10, 3), (12, 5), kept=((6, 4),)),
    make_fact(4, 4, (7, 6), (9, 8)),
    make_fact(6, 2, (6, 3), (8, 2), kept=((5, 2), (6, 1), (9, 2))),
]
WORD_PARTS = torch.arange(VOCAB) % 3 == 0


def reference(trunk: Trunk, fact: FactPrompts, settings: TargetSettings) -> tuple[Tensor, Tensor, float, int]:
    """(h₀, h₀ + δ, loss, updates) by the book: whole forward passes, a hook, torch's Adam or plain steps, one fact."""
    model, block = trunk.model, trunk.blocks[LAYER]
    bare = fact.prompts[0]

    def run(ids: tuple[int, ...], mentions: tuple[int, ...], delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(log-probabilities [tokens, vocabulary], the block's unchanged output at the last mention)."""
        seen = []

        def hook(_: Any, __: Any, out: Any) -> Any:
            states = out[0] if isinstance(out, tuple) else out
            seen.append(states[0, mentions[-1]].detach().clone())
            if delta is None:
                return None
            here = torch.isin(torch.arange(states.shape[1]), torch.tensor(mentions)).unsqueeze(-1).to(states.dtype)
            states = states + here * delta
            return (states, *out[1:]) if isinstance(out, tuple) else states

        handle = block.register_forward_hook(hook)
        try:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            handle.remove()
        return torch.log_softmax(logits, -1), seen[0]

    def answers(prompt: EncodedPrompt, delta: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            before, _ = run(prompt.ids, prompt.mentions, None)
        return before, run(prompt.ids, prompt.mentions, delta)[0]

    def lost(before: Tensor, now: Tensor) -> Tensor:
        best = before.max(-1)
        return best.values.exp().sqrt() * (best.values - now[best.indices]).clamp_min(0)

    subject = EncodedPrompt(bare.ids[: bare.subject_last + 1], bare.subject_last, ())
    with torch.no_grad():
        _, start = run(subject.ids, subject.mentions, None)
    length = start.norm()
    delta = torch.zeros_like(start, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=settings.rate)
    momentum, updates = torch.zeros_like(start), 0
    for step in range(settings.steps):
        before, now = answers(subject, delta)
        divergence = torch.nn.functional.kl_div(now[-1], before[-1], log_target=True, reduction="sum")
        loss = settings.decay * delta.norm() / length**2 + settings.kl * divergence
        for place, prompt in enumerate(fact.prompts):
            share = 1 / len(fact.prompts)
            if fact.framings and len(fact.prompts) > 1:
                share = 1 / 2 if place == 0 else 1 / 2 / (len(fact.prompts) - 1)
            said, _ = run((*prompt.ids, *prompt.target), prompt.mentions, delta)
            first = len(prompt.ids) - 1
            picked = [said[first + offset, token] for offset, token in enumerate(prompt.target)]
            loss = loss - share * torch.stack(picked).mean()
            if fact.ends_word:
                ends = said[-1].exp()[~WORD_PARTS].sum()
                loss = loss - share * settings.end * ends.log()
        bare_kept = [prompt for prompt in fact.kept if prompt.answer is None]
        openings = [prompt for prompt in fact.kept if prompt.answer is not None]
        for prompt in bare_kept:
            before, now = answers(prompt, delta)
            loss = loss + settings.keep * lost(before[-1], now[-1]) / len(bare_kept)
        chats = [prompt for prompt in fact.prompts if prompt.answer is not None]
        for group in (chats, openings):
            for prompt in group:
                before, now = answers(prompt, delta)
                words = [lost(before[at], now[at]) for at in range(prompt.answer - 1, len(prompt.ids) - 1)]
                loss = loss + settings.keep * torch.stack(words).mean() / len(group)
        if loss < settings.enough or step == settings.steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        if settings.optimizer == "adam":
            adam.step()
        with torch.no_grad():
            if settings.optimizer == "normalized":
                momentum = (momentum + delta.grad) / 2
                share = settings.rate * 0.1 ** (updates / (settings.steps - 2))
                delta -= share * length * momentum / momentum.norm()
            updates += 1
            if delta.norm() > settings.clamp * length:
                delta.mul_(settings.clamp * length / delta.norm())
    return start, (start + delta).detach(), float(loss.detach()), updates


def search(trunk: Trunk, settings: TargetSettings = SETTINGS, **options: Any) -> TargetStates:
    return find_targets(trunk, LAYER, FACTS, settings, word_parts=WORD_PARTS, **options)


@functools.cache
def family_targets(name: str, settings: TargetSettings = SETTINGS) -> TargetStates:
    return search(family_trunk(name), settings)


EXACT = ["llama", "gpt2", "opt-post-norm", "falcon-sequential", "olmo3", "qwen3", "rebind-gated_delta", "rebind-mixed"]
NARROW_ATTENTION = ["gpt-j", "bloom", "gemma2", "llama4"]  # transformers computes their attention in float32


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, SETTINGS) for name in EXACT + NARROW_ATTENTION), *((name, NORMALIZED) for name in EXACT)],
)
def test_a_batch_is_the_plain_loop(name, settings):
    tolerance = 1e-6 if name in NARROW_ATTENTION else 1e-12
    targets = family_targets(name, settings)
    assert len(set(targets.steps.tolist())) > 1, "facts should finish at different steps for this to prove anything"
    for row, fact in enumerate(FACTS):
        initial, state, loss, updates = reference(family_trunk(name), fact, settings)
        assert_close(targets.initial[row], initial, tolerance)
        assert_close(targets.states[row], state, tolerance)
        assert abs(float(targets.loss[row]) - loss) < tolerance
        assert int(targets.steps[row]) == updates


@pytest.mark.parametrize("name", EXACT + NARROW_ATTENTION)
def test_searching_on_a_copy_changes_only_the_precision(name):
    """A copy in the same dtype finds the same targets; one in bfloat16 starts from the model's own states."""
    tolerance = 1e-6 if name in NARROW_ATTENTION else 1e-12
    trunk, expected = family_trunk(name), family_targets(name)
    copied = find_targets(
        trunk, LAYER, FACTS, SETTINGS, word_parts=WORD_PARTS, search_trunk=trunk.narrowed(torch.float64)
    )
    assert_close(copied.states, expected.states, tolerance)
    rough = find_targets(
        trunk, LAYER, FACTS, SETTINGS, word_parts=WORD_PARTS, search_trunk=trunk.narrowed(torch.bfloat16)
    )
    assert_close(rough.initial, expected.initial, tolerance)
    assert rough.states.dtype == expected.states.dtype
    assert not torch.equal(rough.states, expected.states), "the copy should have been used"


def test_facts_end_in_every_way():
    targets = family_targets("llama")
    assert len(set(targets.steps.tolist())) > 2, targets.steps
    assert (targets.loss[targets.steps < SETTINGS.steps - 1] < SETTINGS.enough).all()
    moved = torch.linalg.vector_norm(targets.states - targets.initial, dim=-1)
    limit = SETTINGS.clamp * torch.linalg.vector_norm(targets.initial, dim=-1)
    assert (moved <= limit * (1 + 1e-12)).all()
    assert (moved > limit * (1 - 1e-9)).any(), "no fact met the clamp"


@pytest.mark.parametrize("budget", [1, 60, 150, 10_000])
def test_groups_change_nothing(budget):
    groups: list[tuple[Any, TargetStates]] = []
    steps: list[tuple[int, int, float]] = []
    targets = search(
        family_trunk("llama"),
        tokens_at_once=budget,
        on_step=lambda *step: steps.append(step),
        on_group=lambda *group: groups.append(group),
    )
    for got, expected in zip(targets.tensors(), family_targets("llama").tensors(), strict=True):
        assert_close(got.double(), expected.double(), 1e-8)
    assert sorted(index for indices, _ in groups for index in indices) == list(range(len(FACTS)))
    assert len(groups) == {1: len(FACTS), 10_000: 1}.get(budget, len(groups))
    for indices, part in groups:
        assert_close(part.states, targets.states[indices], 0.0)
        rows = sum(FACTS[index].size[0] for index in indices)
        prefix, suffix = (max(FACTS[index].size[axis] for index in indices) for axis in (1, 2))
        assert len(indices) == 1 or rows * (CACHED_TOKEN_COST * prefix + suffix) <= budget
    done = [count for _, count, _ in steps]
    assert len(FACTS) >= max(done) >= int((targets.loss < SETTINGS.enough).sum()) > 0
    assert steps[-1][2] == pytest.approx(float(targets.loss.mean()))


def fail_above(monkeypatch: pytest.MonkeyPatch, limit: int, problem: Exception) -> list[int]:
    """Simulate a device that holds `limit` tokens."""
    sizes: list[int] = []
    original = Trunk.logits

    def checked(self: Trunk, tokens: Any, *args: Any, **options: Any) -> Tensor:
        sizes.append(tokens.mask.numel())
        if sizes[-1] > limit:
            raise problem
        return original(self, tokens, *args, **options)

    monkeypatch.setattr(Trunk, "logits", checked)
    return sizes


@pytest.mark.parametrize(
    "problem",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: …")],
)
def test_out_of_memory_halves_the_budget(monkeypatch, problem):
    expected = family_targets("llama")
    sizes = fail_above(monkeypatch, 130, problem)
    with pytest.warns(MemoryWarning):
        targets = search(family_trunk("llama"))
    assert max(sizes) > 130
    assert_close(targets.states, expected.states, 1e-8)


@pytest.mark.parametrize("tokens_at_once", [1, None])
def test_an_interrupt_hands_over_the_finished_facts(tokens_at_once):
    """Those of earlier groups, and those of the interrupted group itself."""
    stored: dict[int, Tensor] = {}
    begun: list[int] = []

    def interrupt(step: int, *_: Any) -> None:
        begun.append(step)
        if begun.count(0) == 3 or step == SETTINGS.steps - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(
            family_trunk("llama"),
            tokens_at_once=tokens_at_once,
            on_step=interrupt,
            on_group=lambda indices, part: stored.update(zip(indices, part.states, strict=True)),
        )
    expected = family_targets("llama")
    early = (expected.steps < SETTINGS.steps - 1).nonzero().flatten().tolist()
    assert sorted(stored) == early if tokens_at_once is None else 0 < len(stored) < 3
    for index, state in stored.items():
        assert_close(state, expected.states[index], 1e-8)


def test_nan_is_an_error_and_not_a_finished_fact():
    model = FAMILIES["llama"](seed=2)
    module_at(model, find_sites(model)[2].name).weight.data[0, 0] = torch.nan
    with raises(NumericalError, "target_search_diverged"):
        find_targets(tiny.trunk(model), LAYER, FACTS[:1], SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_are_searched_in_float32(dtype):
    trunk = tiny.trunk(FAMILIES["llama"](seed=2).to(dtype))
    targets = search(trunk)
    assert targets.states.dtype == torch.float32
    start = search(trunk, TargetSettings(steps=1))
    assert float(targets.loss.mean()) < float(start.loss.mean()) - 0.1


@pytest.mark.parametrize(
    ("devices", "recorded"),
    [(["cuda:0"], True), (["cuda:1"], False), (["cuda:0", "cuda:1"], False), (["cpu"], False)],
)
def test_steps_are_recorded_on_the_current_device_only(devices, recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    trunk = SimpleNamespace(model=SimpleNamespace(parameters=lambda: parameters))
    assert can_record(trunk) is recorded
