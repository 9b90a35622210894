"""Baselines for edits: the facts in the prompt of the unedited model, and a plain LoRA fine-tune.

`answer_records` runs the first. `fine_tuned` trains low-rank adapters on the down projections of the edited layers with
Adam, on the bare prompts and their targets, and removes them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rebind.edit.facts.fact import Fact
from rebind.evals.answers import BaseModel
from rebind.models.language_model import LanguageModel
from rebind.models.sites import Site, module_at
from rebind.models.tokens import Tokens

BASELINES = {"prompt": "the facts in the prompt", "lora": "LoRA fine-tune"}
RANK, STEPS, LEARNING_RATE = 8, 30, 5e-3
FACTS_PER_PASS = 32


class Adapters:
    """A hook that adds low-rank maps to the outputs of modules. A map is created when its module first runs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.factors: dict[nn.Module, tuple[nn.Parameter, nn.Parameter]] = {}
        self.enabled = True

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if not self.enabled:
            return output
        if module not in self.factors:
            d_k, d_v = inputs[0].shape[-1], output.shape[-1]
            down = torch.randn(RANK, d_k, generator=self.generator) / d_k**0.5
            up = torch.zeros(d_v, RANK)
            self.factors[module] = nn.Parameter(down.to(output.device)), nn.Parameter(up.to(output.device))
        down, up = self.factors[module]
        return output + (inputs[0].float() @ down.mT @ up.mT).to(output.dtype)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run a block on the unedited model."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


@contextmanager
def fine_tuned(
    model: LanguageModel, facts: Sequence[Fact], sites: Sequence[Site], *, seed: int = 0
) -> Iterator[BaseModel]:
    """Run a block on a model that is fine-tuned on facts; yield a context in which it is unedited."""
    adapters = Adapters(seed)
    hooks = [module_at(model.model, site.name).register_forward_hook(adapters) for site in sites]
    try:
        _train(adapters, model, facts)
        yield adapters.disabled
    finally:
        for hook in hooks:
            hook.remove()


def _train(adapters: Adapters, model: LanguageModel, facts: Sequence[Fact]) -> None:
    with torch.no_grad():
        _loss(model, facts[:1])  # creates the adapters
    parameters = [factor for factors in adapters.factors.values() for factor in factors]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for begin in range(0, len(facts), FACTS_PER_PASS):
            batch = facts[begin : begin + FACTS_PER_PASS]
            with torch.enable_grad():
                (_loss(model, batch) * len(batch) / len(facts)).backward()
        optimizer.step()
    for factor in parameters:
        factor.requires_grad_(False)


def _loss(model: LanguageModel, facts: Sequence[Fact]) -> Tensor:
    """Return the mean NLL per token of the targets."""
    prompts = model.encode([fact.as_prompt() for fact in facts])
    rows = [(*prompt.ids, *prompt.target[:-1]) for prompt in prompts]
    where = [
        (row, len(prompt.ids) - 1 + step) for row, prompt in enumerate(prompts) for step in range(len(prompt.target))
    ]
    logits = model.trunk.logits(Tokens.right_padded(rows, model.device), torch.tensor(where))
    targets = [token for prompt in prompts for token in prompt.target]
    return nn.functional.cross_entropy(logits, torch.tensor(targets, device=logits.device))
