"""Keys, gains and moments with their speed-ups and without: all of an edit but the search for its targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from benchmarks.speedups.searches import Setup
from benchmarks.speedups.timing import Row, Timer, difference
from rebind.edit.moments import OldKeys
from rebind.edit.solve import SubjectStates, choose_lambda
from rebind.memory.closed_form import ridge
from rebind.memory.solve import factor
from rebind.models.sites import Site, module_at
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk

WINDOW = 64  # tokens a line of random text


def key_rows(setup: Setup, sites: Sequence[Site], clock: Timer) -> Iterator[Row]:
    """The keys of every layer and the states at the last: going up once, or two whole passes a layer."""

    def climbing() -> Tensor:
        subjects = SubjectStates(setup.trunk, setup.facts)
        keys = []
        for site in sites:
            keys.append(subjects.keys(site))
            subjects.states_after(setup.layer)
        return torch.cat(keys)

    def passes() -> Tensor:
        return torch.cat([_keys_by_a_pass(setup, module_at(setup.trunk.model, site.name)) for site in sites])

    on, expected = clock(climbing)
    off, got = clock(passes)
    yield Row("keys", "two whole passes a layer", on, off, difference(got, expected))


@torch.no_grad()
def _keys_by_a_pass(setup: Setup, module: nn.Module) -> Tensor:
    """The input of a module at the subjects, weighed as `SubjectStates` does, after two passes of whole prompts."""
    prompts = [prompt for fact in setup.facts for prompt in fact.prompts]
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[*prompt.ids] + [0] * (width - len(prompt.ids)) for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt.ids) + [0] * (width - len(prompt.ids)) for prompt in prompts])
    at = torch.tensor([prompt.subject_last for prompt in prompts], device=setup.trunk.device)
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    try:
        for _ in ("keys", "states"):
            setup.trunk.model(ids.to(at.device), attention_mask=mask.to(at.device))
    finally:
        handle.remove()
    last = seen[0][torch.arange(len(at), device=at.device), at].double()
    parts = last.split([len(fact.prompts) for fact in setup.facts])
    return torch.stack([(one[0] + one[1:].mean(0)) / 2 if len(one) > 1 else one[0] for one in parts])


def solve_rows(keys: Sequence[Tensor], old: Sequence[OldKeys], clock: Timer) -> Iterator[Row]:
    """The gains of every layer: the moment's factor kept and a small system, or the whole system each time."""
    lam = choose_lambda(keys[0], old[0])
    for one in old:
        _ = one.factored

    def small() -> Tensor:
        return torch.cat([ridge(k, one.factored, lam).value for k, one in zip(keys, old, strict=True)])

    def whole() -> Tensor:
        systems = [(lam * one.moment + k.mT @ k, k) for k, one in zip(keys, old, strict=True)]
        return torch.cat([factor(matrix, "system").solve(k.mT).value.mT for matrix, k in systems])

    on, expected = clock(small)
    off, got = clock(whole)
    yield Row("solve", "the d × d system of each layer", on, off, difference(got, expected))


def moment_rows(trunk: Trunk, modules: Sequence[nn.Module], clock: Timer, tokens: int) -> Iterator[Row]:
    """E[kkᵀ] of every layer: one pass that stops at the last, a pass for each, or a pass to the top."""
    read = _random_text(trunk, max(1, tokens // WINDOW), seed=0)

    def summed(keys: Sequence[Tensor]) -> Tensor:
        return torch.stack([(rows.flatten(0, 1).mT @ rows.flatten(0, 1)).double() for rows in keys])

    def together() -> Tensor:
        return summed(trunk.inputs(modules, read))

    def apart() -> Tensor:
        return summed([trunk.inputs([module], read)[0] for module in modules])

    @torch.no_grad()
    def to_the_top() -> Tensor:
        seen: list[Tensor] = []
        handles = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in modules]
        try:
            trunk.model.base_model(input_ids=read.ids, attention_mask=read.mask, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return summed(seen)

    on, expected = clock(together)
    for name, call in (("a pass for each layer", apart), ("passes that go on to the top", to_the_top)):
        off, got = clock(call)
        yield Row("moments", name, on, off, difference(got, expected))


def old_keys(trunk: Trunk, modules: Sequence[nn.Module], width: int) -> list[OldKeys]:
    """E[kkᵀ] over twice as many random tokens as a key is wide: all a solver's time depends on is the size."""
    seen = trunk.inputs(modules, _random_text(trunk, -(-2 * width // WINDOW), seed=1))
    rows = [keys.flatten(0, 1).double() for keys in seen]
    return [OldKeys((one.mT @ one / len(one)).to(trunk.device)) for one in rows]


def _random_text(trunk: Trunk, lines: int, *, seed: int) -> Tokens:
    vocabulary = trunk.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (lines, WINDOW), generator=torch.Generator().manual_seed(seed)).to(trunk.device)
    everywhere = torch.ones_like(ids)
    return Tokens(ids, everywhere, everywhere.cumsum(-1) - 1)
