"""An MLP of experts, of which every token uses a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.memory.precision import working_dtype
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.dense import SwiGlu


class ExpertMlp(nn.Module):
    """Σ_e p_e · expert_e(x) over the `chosen` likeliest experts, plus σ(W_s x) · shared(x); every expert is a SwiGLU.

    Args:
        dim: Width of the input and the output.
        hidden: Width of the hidden layer of an expert.
        experts: Number of experts.
        chosen: Experts that a token uses.
        shared: Width of the hidden layer of an expert that every token uses. None: there is none.
        normalize: Whether the weights of the chosen experts are divided by their sum.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, chosen: int, *, shared: int | None = None, normalize: bool = True
    ) -> None:
        super().__init__()
        require_positive(dim=dim, hidden=hidden, experts=experts, chosen=chosen)
        self.chosen, self.normalize = chosen, normalize
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        self.shared = None if shared is None else SwiGlu(dim, shared)
        self.shared_gate = None if shared is None else nn.Linear(dim, 1, bias=False)
        self.reset_parameters(dim**-0.5)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.gate_up, std=std)
        nn.init.normal_(self.down, std=std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        shares, chosen = logits.softmax(-1, dtype=working_dtype(logits)).topk(self.chosen, dim=-1)
        shares = shares / shares.sum(-1, keepdim=True) if self.normalize else shares
        out = torch.zeros_like(tokens)
        for expert in range(len(self.down)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(tokens[rows], self.gate_up[expert]).chunk(2, dim=-1)
            answer = functional.linear(functional.silu(gate) * up, self.down[expert])
            out = out.index_add(0, rows, (answer * shares[rows, places, None]).to(out.dtype))
        if self.shared is not None and self.shared_gate is not None:
            out = out + torch.sigmoid(self.shared_gate(tokens)) * self.shared(tokens)
        return out.view(x.shape)
