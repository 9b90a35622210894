"""The implementations that take part in the benchmark of the scan: ours, and those that can be imported.

On a CPU the peak memory of one is the highest resident size of a process of its own:

    python -m rebind.bench.contenders ours gated_delta float32 1x2048x8x64
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rebind.bench.measure import peak_of_call
from rebind.errors import InputError
from rebind.memory.rules import get_rule, rule_names
from rebind.ops import scan, step
from rebind.ops.scan import scan_arguments

Shape = tuple[int, int, int, int]  # B, T, H, D
Implementation = Callable[..., Tensor]  # (q, k, v, log_decay, beta) → the output
USUAL_RULES = ("gated_delta", "delta", "sum", "kda", "softmax")  # those measured if none are named
OUR_RULES = tuple(name for name in rule_names() if not get_rule(name).several)
RULES = (*OUR_RULES, "softmax")
SHAPE = re.compile("x".join(["([0-9]{1,9})"] * 4))
MAX_NUMBERS = 2**36  # of an input: more than any device holds
NAMES = ("ours", "fla", "transformers", "SDPA", "loop")


@dataclass(frozen=True)
class Contender:
    """A way to run a rule over a sequence."""

    name: str
    rule: str  # one of RULES, or "decoding"
    run: Implementation
    most_tokens: int = 2**62  # in all; beyond that it takes too long
    longest: int = 2**62  # sequence
    scaled: bool = False  # whether it divides queries by √D

    @property
    def by_channel(self) -> bool:
        """Whether the rule decays every key channel by itself."""
        return decays_by_channel(self.rule)

    def takes(self, shape: Shape) -> bool:
        """Return whether it is measured at this shape."""
        return shape[0] * shape[1] <= self.most_tokens and shape[1] <= self.longest


def find_contenders(device: str, names: tuple[str, ...] = NAMES) -> tuple[list[Contender], list[str]]:
    """Return those of these names, ours first, then the others that can be imported here, and why some cannot."""
    field = [Contender("ours", rule, our_scan(rule)) for rule in OUR_RULES]
    missing = []
    libraries = {"transformers": _transformers}
    if device.startswith("cuda"):
        libraries = {"fla": _fla, **libraries}  # it runs on GPUs only
    for name, find in libraries.items():
        try:
            field += find() if name in names else ()
        except (ImportError, AttributeError) as problem:
            missing.append(f"without {name}: {problem}")
    field.append(Contender("SDPA", "softmax", _softmax, longest=2**13 if device == "cpu" else 2**62))
    field.append(
        Contender("loop", "gated_delta", our_scan("gated_delta", "reference"), most_tokens=2**12, longest=2**9)
    )
    return [contender for contender in field if contender.name in names], missing


def find_decoders(shape: Shape, device: str) -> list[Contender]:
    """Return the ways to write one token into each memory of a batch, shape (B, 1, H, D)."""
    b, _, h, d = shape
    state = torch.zeros(b, h, d, d, device=device)

    def ours(*sequences: Tensor) -> Tensor:
        q, k, v, log_decay, beta = (x[:, 0] for x in sequences)
        return step(q, k, v, state, log_decay=log_decay, erase=beta, write=beta)

    field = [Contender("ours", "decoding", ours)]
    if not device.startswith("cuda"):
        return field
    try:
        recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    except (ImportError, AttributeError):
        return field

    def fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return recurrent(q, k, v, g=log_decay, beta=beta, scale=1.0, initial_state=state, output_final_state=True)[0]

    return [*field, Contender("fla", "decoding", fla)]


def decays_by_channel(rule: str) -> bool:
    """Return whether a rule has a decay per key channel."""
    return rule in OUR_RULES and get_rule(rule).channels.get("alpha") == "key"


def our_scan(rule: str, backend: str = "auto") -> Implementation:
    """Return our scan with a rule; β is the value of all its gates except the decay."""
    gates = get_rule(rule).gates

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        decay = log_decay if "alpha" in gates else None
        if rule in USUAL_RULES:
            rate = beta if "beta" in gates else None
            return scan(q, k, v, log_decay=decay, erase=rate, write=rate, backend=backend)[0]
        values: dict[str, float | Tensor] = {name: beta for name in gates if name != "alpha"}
        return scan(**scan_arguments(rule, q, k, v, values, log_decay=decay, check=False), backend=backend)[0]

    return run


def _softmax(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _transformers() -> Iterator[Contender]:
    importlib.import_module("transformers").logging.set_verbosity_error()  # it warns that it falls back
    peer = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule

    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return peer(q, k, v, g=log_decay, beta=beta)[0]

    yield Contender("transformers", "gated_delta", run, most_tokens=2**17, longest=2**14, scaled=True)
    kimi = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear").chunk_kimi_delta_attention

    def run_kda(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return kimi(q, k, v, log_decay, beta)[0]

    yield Contender("transformers", "kda", run_kda, most_tokens=2**12, longest=2**12, scaled=True)


def _fla() -> Iterator[Contender]:
    delta = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
    gated = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    linear = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    kda = importlib.import_module("fla.ops.kda").chunk_kda
    yield Contender("fla", "kda", lambda q, k, v, g, beta: kda(q, k, v, g=g, beta=beta, scale=1.0)[0])
    yield Contender("fla", "gated_delta", lambda q, k, v, g, beta: gated(q, k, v, g=g, beta=beta, scale=1.0)[0])
    yield Contender("fla", "delta", lambda q, k, v, g, beta: delta(q, k, v, beta=beta, scale=1.0)[0])
    yield Contender("fla", "sum", lambda q, k, v, g, beta: linear(q, k, v, scale=1.0, normalize=False)[0])


def draw_inputs(shape: Shape, device: str, dtype: torch.dtype, *, by_channel: bool = False) -> list[Tensor]:
    """Draw q, k, v, log_decay and beta as leaves: unit keys and queries, decays as large as in a trained model."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    q, k = (functional.normalize(normal(*shape), dim=-1).to(dtype) for _ in range(2))
    v = normal(*shape).to(dtype)
    log_decay = functional.logsigmoid(normal(*(shape if by_channel else shape[:3])) + 4)
    beta = normal(*shape[:3]).sigmoid().to(dtype)
    return [x.detach().requires_grad_() for x in (q, k, v, log_decay, beta)]


def run_both(run: Implementation, leaves: list[Tensor], slope: Tensor) -> None:
    """Run forward and backward."""
    torch.autograd.grad(run(*leaves), leaves, slope, allow_unused=True)


def name_of(shape: Shape) -> str:
    """Return a shape as it is written: 1x2048x8x64."""
    return "x".join(map(str, shape))


def parse_shape(text: str) -> Shape:
    """Return the shape of a text.

    >>> parse_shape("1x2048x8x64")
    (1, 2048, 8, 64)
    """
    match = SHAPE.fullmatch(text.strip())
    b, t, h, d = map(int, match.groups()) if match else (0, 0, 0, 0)
    if not 0 < b * t * h * d <= MAX_NUMBERS:
        expected = f"BxTxHxD, such as 1x2048x8x64, of at most {MAX_NUMBERS:,} numbers"
        raise InputError(f"The shape is {text[:40]!r}", expected=expected, code="invalid_shape")
    return b, t, h, d


def peak_memory(contender: Contender, shape: Shape, device: str, dtype: torch.dtype) -> float | None:
    """Return the peak memory of forward and backward in MiB, inputs and gradients included; None if unknown."""
    if device.startswith("cuda"):
        return _peak_on_gpu(contender, shape, device, dtype)
    if device != "cpu":
        return None
    words = [contender.name, contender.rule, str(dtype).removeprefix("torch."), name_of(shape)]
    command = [sys.executable, "-m", "rebind.bench.contenders", *words]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def _peak_on_gpu(contender: Contender, shape: Shape, device: str, dtype: torch.dtype) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    leaves = draw_inputs(shape, device, dtype, by_channel=contender.by_channel)
    slope = torch.randn_like(leaves[2])
    size = sum(x.numel() * x.element_size() for x in (*leaves, slope))
    before = torch.cuda.memory_allocated() - size
    torch.cuda.reset_peak_memory_stats()
    run_both(contender.run, leaves, slope)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _peak_of_this_process(name: str, rule: str, dtype: torch.dtype, shape: Shape) -> float:
    (contender,) = (c for c in find_contenders("cpu", (name,))[0] if c.rule == rule)
    small = draw_inputs((1, 64, 1, 8), "cpu", dtype, by_channel=contender.by_channel)
    run_both(contender.run, small, torch.randn_like(small[2]))  # loads libraries and creates thread pools

    def run() -> None:
        leaves = draw_inputs(shape, "cpu", dtype, by_channel=contender.by_channel)
        run_both(contender.run, leaves, torch.randn_like(leaves[2]))

    return peak_of_call(run)[0]


if __name__ == "__main__":
    _name, _rule, _dtype, _shape = sys.argv[1:]
    print(_peak_of_this_process(_name, _rule, getattr(torch, _dtype), parse_shape(_shape)))
