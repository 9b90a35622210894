"""Who takes part in the scan's benchmark: ours, and whatever else can be imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.ops import scan, step

Shape = tuple[int, int, int, int]  # B, T, H, D
Scan = Callable[..., Tensor]  # (q, k, v, log_decay, beta) → the output
RULES = ("gated delta", "delta", "sum", "softmax")


@dataclass(frozen=True)
class Contender:
    """A way to run a rule over a sequence."""

    name: str
    rule: str  # one of RULES
    run: Scan
    largest: int = 2**62  # tokens in all that it is given
    length: int = 2**62  # tokens a sequence that it is given
    scaled: bool = False  # whether it divides queries by √D

    def takes(self, shape: Shape) -> bool:
        return shape[0] * shape[1] <= self.largest and shape[1] <= self.length


def contenders(device: str) -> tuple[list[Contender], list[str]]:
    """Ours first, then what can be imported here; and why something cannot."""
    field = [Contender("ours", rule, ours(rule)) for rule in RULES[:3]]
    missing = []
    for library, found in (("flash-linear-attention", _fla), ("transformers", _transformers)):
        if library == "flash-linear-attention" and not device.startswith("cuda"):
            continue  # it runs on GPUs only
        try:
            field += found()
        except (ImportError, AttributeError) as problem:
            missing.append(f"without {library}: {problem}")
    field.append(Contender("SDPA", "softmax", softmax, length=2**13 if device == "cpu" else 2**62))
    field.append(Contender("loop", "gated delta", loop, largest=2**12, length=2**9))
    return field, missing


def decoders(device: str) -> dict[str, Callable[[list[Tensor], Tensor], object]]:
    """Ways to write one token: a function of q, k, v, log_decay, beta [B, 1, H, …] and the state."""

    def ours(leaves: list[Tensor], state: Tensor) -> object:
        q, k, v, log_decay, beta = (x[:, 0] for x in leaves)
        return step(q, k, v, state, log_decay=log_decay, erase=beta, write=beta)

    found: dict[str, Callable[[list[Tensor], Tensor], object]] = {"ours": ours}
    if device.startswith("cuda"):
        try:
            recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        except (ImportError, AttributeError):
            return found

        def fla(leaves: list[Tensor], state: Tensor) -> object:
            q, k, v, log_decay, beta = leaves
            return recurrent(q, k, v, g=log_decay, beta=beta, scale=1.0, initial_state=state, output_final_state=True)

        found["fla"] = fla
    return found


def ours(rule: str) -> Scan:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        if rule == "sum":
            return scan(q, k, v)[0]
        return scan(q, k, v, log_decay=log_decay if rule == "gated delta" else None, erase=beta, write=beta)[0]

    return run


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return scan(q, k, v, log_decay=log_decay, erase=beta, write=beta, backend="reference")[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _transformers() -> Iterator[Contender]:
    importlib.import_module("transformers").logging.set_verbosity_error()  # it says that it falls back
    peer = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return peer(q, k, v, g=log_decay, beta=beta)[0]

    yield Contender("transformers", "gated delta", run, largest=2**17, length=2**14, scaled=True)


def _fla() -> Iterator[Contender]:
    delta = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
    gated = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    linear = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    yield Contender("fla", "gated delta", lambda q, k, v, g, beta: gated(q, k, v, g=g, beta=beta, scale=1.0)[0])
    yield Contender("fla", "delta", lambda q, k, v, g, beta: delta(q, k, v, beta=beta, scale=1.0)[0])
    yield Contender("fla", "sum", lambda q, k, v, g, beta: linear(q, k, v, scale=1.0, normalize=False)[0])


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, log_decay and beta as leaves: unit keys and queries, decays of a trained model's size."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    q, k = (functional.normalize(normal(*shape), dim=-1).to(dtype) for _ in range(2))
    v = normal(*shape).to(dtype)
    log_decay = functional.logsigmoid(normal(*shape[:3]) + 4)
    beta = normal(*shape[:3]).sigmoid().to(dtype)
    return [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]


def forward(run: Scan, leaves: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return run(*leaves)


def both(run: Scan, leaves: list[Tensor], slope: Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(run(*leaves), leaves, slope, allow_unused=True)
