"""What stands between two sequence layers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from rebind.nn.parts.products import is_plain
from rebind.ops.gated import gated_linear
from rebind.precision import as_autocast


class SwiGlu(nn.Module):
    """W_d (silu(W_g x) · W_u x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = as_autocast(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if is_plain(self.down_proj) and gate.dtype == x.dtype:
            return gated_linear(gate, up, self.down_proj.weight)
        return self.down_proj(functional.silu(gate) * up)


class Relu(nn.Module):
    """W_d relu(W_u x + b) + c: the transformer's first, and Schlag et al.'s."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.relu(self.up_proj(x)))


MLPS: dict[str, type[SwiGlu] | type[Relu]] = {"swiglu": SwiGlu, "relu": Relu}
