"""Every rule as a loop over tokens, written from its paper: W [d_v, d_k] and the gates of one head."""

from __future__ import annotations

import torch
from torch import Tensor


def column(x: Tensor) -> Tensor:
    return x.unsqueeze(-1)


def outer(v: Tensor, k: Tensor) -> Tensor:
    return v.unsqueeze(-1) * k.unsqueeze(-2)


def read(W: Tensor, k: Tensor) -> Tensor:
    return (W * k.unsqueeze(-2)).sum(-1)


# Each takes the memories [..., d_v, d_k], a token's k [..., d_k] and v [..., d_v], and gates; it returns the memories.


def gla(W, k, v, alpha):
    return W * alpha.unsqueeze(-2) + outer(v, k)


def kda(W, k, v, alpha, beta):
    W = W * alpha.unsqueeze(-2)
    return W + outer(column(beta) * (v - read(W, k)), k)


def gdn2(W, k, v, alpha, erase, write):
    W = W * alpha.unsqueeze(-2)
    return W - outer(read(W, erase * k), k) + outer(write * v, k)


def comba(W, k, v, alpha, beta, feedback):
    old = read(W, feedback * k)
    return column(column(alpha)) * W + outer(column(beta) * (v - old), k)


def preconditioned(W, k, v, alpha, beta, scale):
    W = W * (alpha.unsqueeze(-2) if alpha.ndim == k.ndim else column(column(alpha)))
    return W + outer(column(beta) * (v - read(W, k)), scale * k)


def rwkv7(W, k, v, alpha, a, kappa, mix):
    removed = kappa * k
    removed = removed / removed.square().sum(-1, keepdim=True).sqrt()
    transition = torch.diag_embed(alpha) - outer(removed, a * removed)
    return W @ transition + outer(v, k * (1 + (a - 1) * mix))


def delta_product(W, k, v, beta):  # k, v, beta: [n, ..., width]
    for key, value, b in zip(k, v, beta, strict=True):
        W = W + outer(column(b) * (value - read(W, key)), key)
    return W


def gated_delta_product(W, k, v, alpha, beta):
    return delta_product(column(column(alpha)) * W, k, v, beta)


LOOPS = {
    "gla": gla,
    "kda": kda,
    "gdn2": gdn2,
    "comba": comba,
    "preconditioned": preconditioned,
    "rwkv7": rwkv7,
    "delta_product": delta_product,
    "gated_delta_product": gated_delta_product,
}
KEY, VALUE, NUMBER = "key", "value", "number"
GATES = {  # the gates of each, and what they have a number for
    "gla": {"alpha": KEY},
    "kda": {"alpha": KEY, "beta": NUMBER},
    "gdn2": {"alpha": KEY, "erase": KEY, "write": VALUE},
    "comba": {"alpha": NUMBER, "beta": NUMBER, "feedback": KEY},
    "preconditioned": {"alpha": KEY, "beta": NUMBER, "scale": KEY},
    "pgdn": {"alpha": NUMBER, "beta": NUMBER, "scale": KEY},
    "rwkv7": {"alpha": KEY, "a": KEY, "kappa": KEY, "mix": KEY},
    "delta_product": {"beta": NUMBER},
    "gated_delta_product": {"alpha": NUMBER, "beta": NUMBER},
}


def rule_of(case: str) -> str:
    return {"pgdn": "preconditioned"}.get(case, case)


def run_loop(case: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor, **gates: Tensor) -> tuple[Tensor, Tensor]:
    """Run a rule over [B, T, H, width]; k and v may have several rows per token."""
    step, number = LOOPS[rule_of(case)], k.shape[1] // q.shape[1]
    outs = []
    for t in range(q.shape[1]):
        here = slice(t * number, (t + 1) * number)
        rows = lambda x: x[:, here].movedim(1, 0) if number > 1 else x[:, t]  # noqa: B023
        token = {name: gate[:, t] if name == "alpha" else rows(gate) for name, gate in gates.items()}
        state = step(state, rows(k), rows(v), **token)
        outs.append(read(state, q[:, t]))
    return torch.stack(outs, dim=1), state
