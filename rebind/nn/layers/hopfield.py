"""A layer that looks its tokens up in a modern Hopfield network of learned patterns.

    ξ ← Xᵀ softmax(β X ξ)      `steps` − 1 times, then      y = Vᵀ softmax(β X ξ)

X are the stored patterns of a head and V their answers; a single step is softmax attention over them (Ramsauer et al.).
The patterns are slow weights: the layer remembers nothing of the sequence and mixes no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer, State
from rebind.nn.parts.checks import require_positive
from rebind.nn.parts.padding import zero_padding


class HopfieldLayer(SequenceLayer[State]):
    """Retrieval from learned patterns.

    Args:
        dim: Width of the input and the output.
        heads: Number of networks.
        patterns: Stored patterns per head.
        steps: Updates before the answer is read; with more of them the query ends closer to one pattern.
        beta: Inverse temperature of the softmax. None: 1/√(width of a head), as in attention.
    """

    state_type = State

    def __init__(self, dim: int, heads: int, *, patterns: int = 64, steps: int = 1, beta: float | None = None) -> None:
        super().__init__(dim, heads)
        require_positive(patterns=patterns, steps=steps)
        self.steps = steps
        self.beta = self.head_dim**-0.5 if beta is None else beta
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.patterns = nn.Parameter(torch.empty(heads, patterns, self.head_dim))
        self.answers = nn.Parameter(torch.empty(heads, patterns, self.head_dim))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.patterns)
        nn.init.normal_(self.answers)

    state_size = 0

    def initial_state(self, batch: int) -> State:
        return State()

    def _run(self, x: Tensor, state: State | None, mask: Tensor | None) -> tuple[Tensor, State]:
        query = self.q_proj(zero_padding(x, mask)).unflatten(-1, (self.heads, self.head_dim))
        wide = working_dtype(query)
        query, patterns = query.to(wide), self.patterns.to(wide)
        for _ in range(self.steps - 1):
            query = self._attend(query, patterns, patterns)
        answer = self._attend(query, patterns, self.answers.to(wide))
        return self.o_proj(answer.flatten(-2).to(x.dtype)), State()

    def _attend(self, query: Tensor, patterns: Tensor, answers: Tensor) -> Tensor:
        weights = torch.softmax(self.beta * torch.einsum("...hd,hmd->...hm", query, patterns), dim=-1)
        return torch.einsum("...hm,hmd->...hd", weights, answers)
