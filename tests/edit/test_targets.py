"""Targets found for many facts at once are those of a plain loop over single facts, prompt by prompt."""

from __future__ import annotations

import functools
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rebind.edit.targets import search as search_module
from rebind.edit.targets import store as kept_module
from rebind.edit.targets.objective import can_be_recorded
from rebind.edit.targets.optimize import Found, Prompt, Request, TargetSettings, find_targets
from rebind.edit.targets.search import Search
from rebind.edit.targets.store import KeptTargets, resume_targets
from rebind.errors import NumericalError
from rebind.models.batching import (
    CPU_TOKENS,
    GPU_TOKENS,
    PAST,
    MemoryWarning,
    OutOfMemoryError,
    in_portions,
    tokens_that_fit,
)
from rebind.models.sites import find_sites, module_at
from rebind.models.trunk import Trunk
from tests.families import FAMILIES, VOCAB
from tests.support import assert_close

LAYER = 1
SETTINGS = TargetSettings(steps=9, rate=0.3, clamp=0.9, decay=0.4, kl=0.3, enough=4.8)


@functools.cache
def _trunk(name: str) -> Trunk:
    model = FAMILIES[name](seed=2).double()
    _widen_norms(model)
    return Trunk(model, [module_at(model, site.block) for site in find_sites(model)])


def _widen_norms(model: torch.nn.Module) -> None:
    """Let RMS norms compute in the model's dtype: the library rounds to float32 inside them, whatever the dtype."""

    def widened(self: Any, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
        return torch.nn.functional.rms_norm(x, x.shape[-1:], getattr(self, "weight", None), eps)

    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("RMSNorm", "L2Norm")) and not name.startswith("Gemma"):
            module.forward = MethodType(widened, module)  # a method, so that copies of the model have their own


def _request(seed: int, target: int, *prompts: tuple[int, int]) -> Request:
    """A fact with a target of so many tokens and prompts of (tokens, subject's last)."""
    draw = torch.Generator().manual_seed(seed)
    ids = lambda count: tuple(torch.randint(3, VOCAB, (count,), generator=draw).tolist())
    return Request(tuple(Prompt(ids(length), at) for length, at in prompts), ids(target))


REQUESTS = [
    _request(0, 1, (6, 3), (11, 8), (8, 5)),
    _request(1, 4, (5, 0), (9, 4)),  # the subject is the very first token: nothing before it
    _request(2, 2, (4, 3)),  # the prompt ends with the subject
    _request(3, 1, (9, 2), (13, 6), (10, 3), (12, 5)),
    _request(4, 4, (7, 6), (9, 8)),
]


def reference(trunk: Trunk, request: Request, settings: TargetSettings) -> tuple[Tensor, Tensor, float, int]:
    """(h₀, h₀ + δ, loss, updates) by the book: whole forward passes, a hook, torch's Adam, one fact."""
    model, block = trunk.model, trunk.blocks[LAYER]
    bare = request.prompts[0]

    def run(ids: tuple[int, ...], at: int, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(log-probabilities [tokens, vocabulary], the block's unchanged output at the subject)."""
        seen = []

        def hook(_: Any, __: Any, out: Any) -> Any:
            states = out[0] if isinstance(out, tuple) else out
            seen.append(states[0, at].detach().clone())
            if delta is None:
                return None
            here = (torch.arange(states.shape[1]) == at).unsqueeze(-1).to(states.dtype)
            states = states + here * delta
            return (states, *out[1:]) if isinstance(out, tuple) else states

        handle = block.register_forward_hook(hook)
        try:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        finally:
            handle.remove()
        return torch.log_softmax(logits, -1), seen[0]

    with torch.no_grad():
        original, start = run(bare.ids[: bare.subject_last + 1], bare.subject_last, None)
    length = start.norm()
    delta = torch.zeros_like(start, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=settings.rate)
    updates = 0
    for step in range(settings.steps):
        nll = torch.zeros((), dtype=start.dtype)
        for prompt in request.prompts:
            said, _ = run((*prompt.ids, *request.target[:-1]), prompt.subject_last, delta)
            first = len(prompt.ids) - 1
            picked = [said[first + offset, token] for offset, token in enumerate(request.target)]
            nll = nll - torch.stack(picked).mean() / len(request.prompts)
        now, _ = run(bare.ids[: bare.subject_last + 1], bare.subject_last, delta)
        kl = torch.nn.functional.kl_div(now[-1], original[-1], log_target=True, reduction="sum")
        loss = nll + settings.kl * kl + settings.decay * delta.norm() / length**2
        if loss < settings.enough or step == settings.steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
        updates += 1
        with torch.no_grad():
            if delta.norm() > settings.clamp * length:
                delta.mul_(settings.clamp * length / delta.norm())
    return start, (start + delta).detach(), float(loss.detach()), updates


@functools.cache
def _whole(name: str) -> Found:
    return find_targets(_trunk(name), LAYER, REQUESTS, SETTINGS)


EXACT = ["llama", "gpt2", "opt-post-norm", "falcon-sequential", "olmo3", "qwen3", "rebind-gated-delta", "rebind-mixed"]
NARROW_ATTENTION = [
    "gpt-j",
    "bloom",
    "gemma2",
    "llama4",
]  # the library computes their attention in float32 whatever the dtype


@pytest.mark.parametrize("name", EXACT + NARROW_ATTENTION)
def test_a_batch_is_the_plain_loop(name):
    tolerance = 1e-6 if name in NARROW_ATTENTION else 1e-12
    found = _whole(name)
    assert len(set(found.steps.tolist())) > 1, "facts should finish at different steps for this to prove anything"
    for row, request in enumerate(REQUESTS):
        before, hidden, loss, updates = reference(_trunk(name), request, SETTINGS)
        assert_close(found.before[row], before, tolerance)
        assert_close(found.hidden[row], hidden, tolerance)
        assert abs(float(found.loss[row]) - loss) < tolerance
        assert int(found.steps[row]) == updates


@pytest.mark.parametrize("name", EXACT + NARROW_ATTENTION)
def test_searching_on_a_copy_changes_nothing_but_the_precision(name):
    """A copy in the same dtype gives the same targets; one in bfloat16 starts from the model's own states."""
    tolerance = 1e-6 if name in NARROW_ATTENTION else 1e-12
    trunk, whole = _trunk(name), _whole(name)
    copied = find_targets(trunk, LAYER, REQUESTS, SETTINGS, quick=trunk.narrowed(torch.float64))
    assert_close(copied.hidden, whole.hidden, tolerance)
    assert_close(copied.loss, whole.loss, tolerance)
    rough = find_targets(trunk, LAYER, REQUESTS, SETTINGS, quick=trunk.narrowed(torch.bfloat16))
    assert_close(rough.before, whole.before, tolerance)
    assert rough.hidden.dtype == whole.hidden.dtype
    assert not torch.equal(rough.hidden, whole.hidden), "the copy should have been used"


def test_facts_stop_when_they_are_done():
    """The settings above put facts through every way of ending; a batch that never shrank would prove little."""
    found = _whole("llama")
    assert len(set(found.steps.tolist())) > 2, found.steps
    assert (found.loss[found.steps < SETTINGS.steps - 1] < SETTINGS.enough).all()
    moved = torch.linalg.vector_norm(found.hidden - found.before, dim=-1)
    limit = SETTINGS.clamp * torch.linalg.vector_norm(found.before, dim=-1)
    assert (moved <= limit * (1 + 1e-12)).all()
    assert (moved > limit * (1 - 1e-9)).any(), "no fact met the clamp"


@pytest.mark.parametrize("budget", [1, 60, 150, 10_000])
def test_groups_change_nothing(budget):
    calls: list[tuple[list[int], Found]] = []
    found = find_targets(
        _trunk("llama"), LAYER, REQUESTS, SETTINGS, tokens_at_once=budget, keep=lambda *call: calls.append(call)
    )
    whole = _whole("llama")
    for got, expected in zip(vars(found).values(), vars(whole).values(), strict=True):
        assert_close(got.double(), expected.double(), 1e-8)
    assert sorted(index for indices, _ in calls for index in indices) == list(range(len(REQUESTS)))
    assert len(calls) == {1: 5, 10_000: 1}.get(budget, len(calls))
    for indices, part in calls:
        assert_close(part.hidden, found.hidden[indices], 0.0)
        rows = sum(REQUESTS[index].size[0] for index in indices)
        prefix, suffix = (max(REQUESTS[index].size[axis] for index in indices) for axis in (1, 2))
        width = PAST * prefix + suffix
        assert len(indices) == 1 or rows * width <= budget


def test_progress_counts_over_all_groups():
    told: list[tuple[int, int, float]] = []
    found = find_targets(
        _trunk("llama"), LAYER, REQUESTS, SETTINGS, tokens_at_once=60, on_step=lambda *step: told.append(step)
    )
    done = [count for _, count, _ in told]
    assert all(0 <= count <= len(REQUESTS) for count in done)
    assert max(done) >= int((found.loss < SETTINGS.enough).sum()) > 0
    assert told[-1][2] == pytest.approx(float(found.loss.mean()))


def _failing_above(monkeypatch: pytest.MonkeyPatch, limit: int, problem: Exception) -> list[int]:
    """A device that holds `limit` tokens, past and suffix together."""
    asked: list[int] = []
    logits = Trunk.logits

    def checked(self: Trunk, tokens: Any, *args: Any, **options: Any) -> Tensor:
        asked.append(tokens.mask.numel())
        if asked[-1] > limit:
            raise problem
        return logits(self, tokens, *args, **options)

    monkeypatch.setattr(Trunk, "logits", checked)
    return asked


@pytest.mark.parametrize(
    "problem",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: …")],
)
def test_out_of_memory_halves_the_budget_and_goes_on(monkeypatch, problem):
    expected = _whole("llama")
    asked = _failing_above(monkeypatch, 130, problem)
    with pytest.warns(MemoryWarning, match=r"memory ran out at \d+ tokens at once: going on with \d+"):
        found = find_targets(_trunk("llama"), LAYER, REQUESTS, SETTINGS)
    assert max(asked) > 130
    assert_close(found.hidden, expected.hidden, 1e-8)


@pytest.mark.filterwarnings("ignore::rebind.errors.MemoryWarning")
def test_one_fact_too_large_for_the_memory_is_an_error(monkeypatch):
    _failing_above(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemoryError, match="single item of .* shorten its prompts"):
        find_targets(_trunk("llama"), LAYER, REQUESTS, SETTINGS)


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    _failing_above(monkeypatch, 1, RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        find_targets(_trunk("llama"), LAYER, REQUESTS, SETTINGS)


def test_an_interrupt_keeps_what_was_found():
    kept: dict[int, Tensor] = {}

    def keep(indices: Any, found: Found) -> None:
        kept.update(zip(indices, found.hidden, strict=True))

    steps: list[int] = []

    def interrupt(step: int, *_: Any) -> None:
        steps.append(step)
        if steps.count(0) == 3:  # the third group begins
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_targets(_trunk("llama"), LAYER, REQUESTS, SETTINGS, tokens_at_once=1, on_step=interrupt, keep=keep)
    assert len(kept) == 2
    for index, hidden in kept.items():
        assert_close(hidden, _whole("llama").hidden[index], 1e-8)


def test_an_interrupt_within_a_group_keeps_its_finished_facts():
    whole, kept = _whole("llama"), dict[int, Tensor]()

    def interrupt(step: int, *_: Any) -> None:
        if step == SETTINGS.steps - 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_targets(
            _trunk("llama"),
            LAYER,
            REQUESTS,
            SETTINGS,
            on_step=interrupt,
            keep=lambda indices, found: kept.update(zip(indices, found.hidden, strict=True)),
        )
    early = (whole.steps < SETTINGS.steps - 1).nonzero().flatten().tolist()
    assert sorted(kept) == early
    assert early
    for index in early:
        assert_close(kept[index], whole.hidden[index], 1e-12)


def test_no_facts_have_no_targets():
    found = find_targets(_trunk("llama"), LAYER, [], SETTINGS)
    assert found.hidden.shape == (0, _trunk("llama").model.config.hidden_size)


def test_a_nan_is_an_error_and_not_a_finished_fact():
    model = FAMILIES["llama"](seed=2)
    module_at(model, find_sites(model)[2].name).weight.data[0, 0] = torch.nan
    trunk = Trunk(model, [module_at(model, site.block) for site in find_sites(model)])
    with pytest.raises(NumericalError, match="loss of fact 0 became NaN .* load the model in float32"):
        find_targets(trunk, LAYER, REQUESTS[:1], SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_are_searched_in_float32(dtype):
    model = FAMILIES["llama"](seed=2).to(dtype)
    trunk = Trunk(model, [module_at(model, site.block) for site in find_sites(model)])
    found = find_targets(trunk, LAYER, REQUESTS, SETTINGS)
    assert found.hidden.dtype == torch.float32
    start = find_targets(trunk, LAYER, REQUESTS, TargetSettings(steps=1))
    assert float(found.loss.mean()) < float(start.loss.mean()) - 0.1


def test_a_cpu_has_a_fixed_budget():
    assert tokens_that_fit(_trunk("llama")) == CPU_TOKENS


def test_a_gpus_budget_follows_its_free_memory(monkeypatch):
    """Simulated: twice the free memory, twice the tokens; a wider vocabulary, fewer."""
    trunk = _trunk("llama")
    monkeypatch.setattr(Trunk, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (6 << 20, 80 << 30))
    one = tokens_that_fit(trunk)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (14 << 20, 80 << 30))
    assert abs(tokens_that_fit(trunk) - 2 * one) <= 1
    assert 1 < one < CPU_TOKENS


def test_a_gpu_of_ones_own_has_the_same_budget_from_run_to_run(monkeypatch):
    """Simulated: what is free changes a little, what there is does not."""
    trunk = _trunk("llama")
    monkeypatch.setattr(Trunk, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    found = set()
    for free in (40 << 20, 39 << 20, 35 << 20):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 40 << 20))
        found.add(tokens_that_fit(trunk))
    assert len(found) == 1
    assert 1 < found.pop() < GPU_TOKENS


@pytest.mark.parametrize(("gib", "dtype"), [(80, torch.bfloat16), (1e-6, torch.float32)])
def test_the_size_of_a_gpu_decides_what_is_searched_in(monkeypatch, gib, dtype):
    """Simulated: nothing free, which does not matter; and targets kept from one dtype do not serve the other."""
    model = FAMILIES["llama"](seed=2)
    trunk = Trunk(model, [module_at(model, site.block) for site in find_sites(model)])
    search = Search(trunk, "model")
    assert search.dtype == torch.float32
    monkeypatch.setattr(search_module, "can_be_recorded", lambda _: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, int(gib * 2**30)))
    assert search.dtype == dtype
    asked = []
    monkeypatch.setattr(search_module, "resume_targets", lambda *given, **named: asked.append((given, named)))
    search.find(LAYER, REQUESTS, SETTINGS, KeptTargets(None), lambda *_: None)
    ((given, named),) = asked
    assert str(dtype) in given[4]
    assert (named["quick"] is None) == (dtype == torch.float32)


def test_portions_hold_every_item_once_in_order():
    sizes = [(1, 5, 2), (3, 1, 1), (2, 9, 4), (1, 1, 1)]
    portions = list(in_portions(sizes, [3, 1, 0, 2], 20, lambda portion: portion))
    assert [index for portion, _ in portions for index in portion] == [3, 1, 0, 2]
    assert [portion for portion, _ in portions] == [[3, 1], [0], [2]]


# Kept between runs


def _resume(folder: Any, requests: Any = REQUESTS, **changes: Any) -> Found:
    settled = {"model": "fingerprint", "layer": LAYER, "settings": SETTINGS}
    settled |= {name: changes.pop(name) for name in list(changes) if name in settled}
    return resume_targets(_trunk("llama"), requests=requests, kept=KeptTargets(folder), **settled, **changes)


def _interrupted(folder: Any, after: int) -> None:
    """A run that finds `after` facts, one at a time, and is then interrupted."""
    begun: list[int] = []

    def interrupt(step: int, *_: Any) -> None:
        begun.append(step)
        if begun.count(0) > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _resume(folder, tokens_at_once=1, on_step=interrupt)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many facts each search was for."""
    counts: list[int] = []

    def counted(trunk: Any, layer: Any, requests: Any, *args: Any, **options: Any) -> Found:
        counts.append(len(requests))
        return find_targets(trunk, layer, requests, *args, **options)

    monkeypatch.setattr(kept_module, "find_targets", counted)
    return counts


def test_the_next_run_searches_only_for_what_is_missing(tmp_path, searched):
    _interrupted(tmp_path, after=3)
    assert len(list(tmp_path.iterdir())) == 3
    searched.clear()
    found = _resume(tmp_path)
    assert searched == [2]
    for got, expected in zip(vars(found).values(), vars(_whole("llama")).values(), strict=True):
        assert_close(got.double(), expected.double(), 1e-8)
    again = _resume(tmp_path, REQUESTS[::-1])
    assert searched == [2]
    assert torch.equal(again.hidden, found.hidden.flip(0))


@pytest.mark.parametrize("changes", [{"model": "another"}, {"layer": 0}, {"settings": TargetSettings(steps=2)}])
def test_kept_targets_serve_only_the_run_they_were_found_for(tmp_path, searched, changes):
    _interrupted(tmp_path, after=2)
    searched.clear()
    _resume(tmp_path, **changes)
    assert searched == [len(REQUESTS)]


@pytest.mark.parametrize("content", [b"", b"not safetensors"])
def test_a_damaged_kept_target_is_found_again(tmp_path, searched, content):
    _interrupted(tmp_path, after=1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    searched.clear()
    found = _resume(tmp_path)
    assert searched == [len(REQUESTS)]
    assert_close(found.hidden, _whole("llama").hidden, 1e-12)


def test_without_a_folder_nothing_is_kept():
    assert torch.equal(_resume(None).hidden, _whole("llama").hidden)


@pytest.mark.parametrize(
    ("places", "recorded"),
    [
        (["cuda:0"], True),
        (["cuda:1"], False),
        (["cuda:0", "cuda:1"], False),
        (["cpu"], False),
        (["cuda:0", "cpu"], False),
    ],
)
def test_graphs_are_of_the_current_device(places, recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    parameters = [SimpleNamespace(device=torch.device(place)) for place in places]
    trunk = SimpleNamespace(model=SimpleNamespace(parameters=lambda: parameters))
    assert can_be_recorded(trunk) is recorded
