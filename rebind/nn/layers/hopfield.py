"""A layer that looks its tokens up in a modern Hopfield network of learned patterns.

    ξ ← Xᵀ softmax(β X ξ)      `steps` − 1 times, then      y = Vᵀ softmax(β X ξ)

X are a head's stored patterns and V what is answered for each; a single step is a pass of softmax attention over
them (Ramsauer et al.). The patterns are slow weights: the layer remembers nothing of the sequence, and mixes no tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.layers.base import SequenceLayer, head_width, require_positive
from rebind.nn.parts.padding import cleared
from rebind.nn.parts.state import Empty


class HopfieldLayer(SequenceLayer[Empty]):
    """Retrieval from learned patterns.

    Args:
        dim: Width of what goes in and comes out.
        heads: Networks.
        patterns: Stored patterns a head.
        steps: Updates before the answer is read; more of them end closer to one pattern.
        beta: The softmax's inverse temperature. None: 1/√(head width), attention's.
    """

    kind_of_state = Empty

    def __init__(self, dim: int, heads: int, *, patterns: int = 64, steps: int = 1, beta: float | None = None) -> None:
        super().__init__(dim)
        require_positive(patterns=patterns, steps=steps)
        self.heads = heads
        self.head_dim = head_width("head_dim", dim, heads, None)
        self.steps = steps
        self.beta = self.head_dim**-0.5 if beta is None else beta
        if not 0 < self.beta < float("inf"):
            raise InputError(f"beta is {beta}, expected a positive number: the softmax's inverse temperature")
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.patterns = nn.Parameter(torch.empty(heads, patterns, self.head_dim))
        self.answers = nn.Parameter(torch.empty(heads, patterns, self.head_dim))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.patterns)
        nn.init.normal_(self.answers)

    @property
    def state_size(self) -> int:
        """Nothing is carried."""
        return 0

    def initial(self, batch: int) -> Empty:
        return Empty()

    def forward(self, x: Tensor, state: Empty | None = None, mask: Tensor | None = None) -> tuple[Tensor, Empty]:
        start = self._start(x, state, mask)
        return self._retrieve(cleared(x, mask)), start

    @torch.no_grad()
    def step(self, x: Tensor, state: Empty, mask: Tensor | None = None) -> tuple[Tensor, Empty]:
        start = self._start(x, state, mask, rank=2)
        return self._retrieve(cleared(x, mask)), start

    def _retrieve(self, x: Tensor) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        wide = working_dtype(query)
        query, patterns = query.to(wide), self.patterns.to(wide)
        for _ in range(self.steps - 1):
            query = self._attend(query, patterns, patterns)
        return self.o_proj(self._attend(query, patterns, self.answers.to(wide)).flatten(-2).to(x.dtype))

    def _attend(self, query: Tensor, patterns: Tensor, answers: Tensor) -> Tensor:
        weights = torch.softmax(self.beta * torch.einsum("...hd,hmd->...hm", query, patterns), dim=-1)
        return torch.einsum("...hm,hmd->...hd", weights, answers)
