"""An MLP of experts, of which every token uses a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.parts.checks import require_multiple, require_positive
from rebind.nn.parts.dense import SwiGlu


@dataclass(frozen=True)
class SigmoidRouting:
    """Experts are chosen by σ(W x) plus a correction, which is set from outside and not part of their weights.

    Args:
        groups: Groups of experts, equally many in each.
        chosen_groups: Groups that a token uses: those whose two likeliest experts are likeliest together.
        scale: What the weights of the chosen experts are multiplied by.
    """

    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def choose(self, logits: Tensor, correction: Tensor, chosen: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts [tokens, chosen]."""
        scores = torch.sigmoid(logits)
        corrected = (scores + correction).unflatten(-1, (self.groups, -1))
        if self.chosen_groups < self.groups:
            best = corrected.topk(min(2, corrected.shape[-1]), dim=-1).values.sum(-1)
            usable = torch.zeros_like(best, dtype=torch.bool)
            usable = usable.scatter(-1, best.topk(self.chosen_groups, dim=-1).indices, True)
            corrected = corrected.masked_fill(~usable.unsqueeze(-1), float("-inf"))
        numbers = corrected.flatten(-2).topk(chosen, dim=-1).indices
        shares = scores.gather(-1, numbers)
        return (shares / shares.sum(-1, keepdim=True) if normalize else shares) * self.scale, numbers


class ExpertMlp(nn.Module):
    """Σ_e p_e · expert_e(x) over the `chosen` likeliest experts, plus σ(W_s x) · shared(x); every expert is a SwiGLU.

    Args:
        dim: Width of the input and the output.
        hidden: Width of the hidden layer of an expert.
        experts: Number of experts.
        chosen: Experts that a token uses.
        shared: Width of the hidden layer of an expert that every token uses. None: there is none.
        shared_gate: Whether what it adds is multiplied by σ(W_s x).
        normalize: Whether the weights of the chosen experts are divided by their sum.
        routing: How experts are chosen. None: by a softmax.
    """

    correction: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        chosen: int,
        *,
        shared: int | None = None,
        shared_gate: bool = True,
        normalize: bool = True,
        routing: SigmoidRouting | None = None,
    ) -> None:
        super().__init__()
        require_positive(dim=dim, hidden=hidden, experts=experts, chosen=chosen)
        usable = experts
        if routing is not None:
            require_positive(groups=routing.groups, chosen_groups=routing.chosen_groups)
            require_multiple("The number of experts", experts, routing.groups, "the number of groups")
            usable = experts // routing.groups * min(routing.chosen_groups, routing.groups)
        if chosen > usable:
            problem = f"A token uses {chosen} experts"
            raise InputError(problem, expected=f"at most {usable}, which it can choose from", code="too_many_experts")
        self.chosen, self.normalize, self.routing = chosen, normalize, routing
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.shared = None if shared is None else SwiGlu(dim, shared)
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared is not None and shared_gate else None
        if routing is not None:
            self.register_buffer("correction", torch.zeros(experts))
        self.reset_parameters(dim**-0.5)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.gate_up, std=std)
        nn.init.normal_(self.down, std=std)
        if self.routing is not None:
            nn.init.zeros_(self.correction)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        shares, chosen = self._choose(self.router(tokens))
        out = torch.zeros_like(tokens)
        for expert in range(len(self.down)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(tokens[rows], self.gate_up[expert]).chunk(2, dim=-1)
            answer = functional.linear(functional.silu(gate) * up, self.down[expert])
            out = out.index_add(0, rows, (answer * shares[rows, places, None]).to(out.dtype))
        if self.shared is not None:
            added = self.shared(tokens)
            out = out + (added if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * added)
        return out.view(x.shape)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts [tokens, chosen]."""
        logits = logits.to(working_dtype(logits))
        if self.routing is not None:
            return self.routing.choose(logits, self.correction, self.chosen, normalize=self.normalize)
        shares, numbers = logits.softmax(-1).topk(self.chosen, dim=-1)
        return shares / shares.sum(-1, keepdim=True) if self.normalize else shares, numbers
