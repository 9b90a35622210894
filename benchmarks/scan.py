"""Our scan beside the peers: forward, forward + backward, peak memory, first call, and decoding, in one run.

    python -m benchmarks.scan                         the shapes of this device: a GPU's, or a CPU's
    python -m benchmarks.scan --shapes 1x2048x8x64 --only ours,transformers --device cpu --dtype float32

Peers are whatever can be imported: flash-linear-attention, transformers' torch fallback of gated delta, torch's
causal attention, and the token-by-token loop. Every round times each of them once, so that a change in the machine's
load meets all alike; the table has medians. Floors are the bytes that must be moved and the multiplications of the
chunk form, at the rates that this machine copies and multiplies at.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.report import MIB, RESULTS, Peak, machine
from rebind.ops import scan, step

CHUNK = 64  # of the floors: the chunk size that GPU kernels use
GPU_SHAPES = (
    (8, 2048, 16, 64),
    (4, 4096, 16, 128),
    (1, 8192, 32, 128),
    (1, 32768, 32, 128),
    (4, 8192, 32, 128),
    (1, 131072, 4, 128),
    (64, 512, 8, 64),
)
CPU_SHAPES = ((1, 512, 8, 64), *((1, 2048 * 2**n, 8, 64) for n in range(6)))
DECODING = ((1, 32, 128), (256, 32, 128))  # (B, H, D)

Shape = tuple[int, int, int, int]
Scan = Callable[..., Tensor]  # (q, k, v, log_decay, beta) → the output


@dataclass(frozen=True)
class Contender:
    """A way to run a rule over a sequence."""

    name: str
    rule: str  # gated delta, delta, sum or softmax
    run: Scan
    largest: int = 2**62  # tokens in all that it is given
    length: int = 2**62  # tokens a sequence that it is given
    scaled: bool = False  # whether it divides queries by √D
    differentiates: bool = True


@dataclass
class Row:
    """One contender at one shape. Times in milliseconds, medians; None where it was not or could not be measured."""

    shape: str
    rule: str
    name: str
    forward: float | None = None
    both: float | None = None  # forward and backward
    peak_mib: float | None = None  # of forward and backward, the inputs included
    first_s: float | None = None  # the first call, compilation included
    error: float | None = None  # of the output, relative, against float64
    io_forward: float | None = None  # the floor's share of the time
    io_both: float | None = None
    flop_forward: float | None = None
    flop_both: float | None = None
    note: str = ""


def ours(rule: str) -> Scan:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        coefficients = {
            "gated delta": {"log_decay": log_decay, "erase": beta, "write": beta},
            "delta": {"erase": beta, "write": beta},
            "sum": {},
        }[rule]
        return scan(q, k, v, **coefficients)[0]

    return run


def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return scan(q, k, v, log_decay=log_decay, erase=beta, write=beta, backend="reference")[0]


def softmax(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def contenders(device: str) -> Iterator[Contender]:
    """Ours first, then what can be imported here."""
    yield Contender("ours", "gated delta", ours("gated delta"))
    yield Contender("ours", "delta", ours("delta"))
    yield Contender("ours", "sum", ours("sum"))
    if device != "cpu":
        yield from _fla()
    try:
        importlib.import_module("transformers").logging.set_verbosity_error()  # it says that it falls back
        peer = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
        fallback = peer.torch_chunk_gated_delta_rule
        run = lambda q, k, v, g, beta: fallback(q, k, v, g=g, beta=beta)[0]  # noqa: E731
        yield Contender("transformers", "gated delta", run, largest=2**17, length=2**14, scaled=True)
    except (ImportError, AttributeError) as problem:
        print(f"without transformers: {problem}", file=sys.stderr)
    yield Contender("SDPA", "softmax", softmax, length=2**13 if device == "cpu" else 2**62)
    yield Contender("loop", "gated delta", loop, largest=2**12, length=2**9)


def _fla() -> Iterator[Contender]:
    try:
        delta = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
        gated = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        linear = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError) as problem:
        print(f"without flash-linear-attention: {problem}", file=sys.stderr)
        return
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
    torch.autograd.grad(run(*leaves), leaves, slope, allow_unused=True)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def timed(call: Callable[[], object], device: str, inner: int = 1) -> float:
    """Milliseconds a call."""
    wait(device)
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        return 1e3 * (time.perf_counter() - begin) / inner
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(inner):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / inner


def race(calls: dict[int, Callable[[], object]], device: str, rounds: int, budget: float) -> dict[int, float]:
    """The median of each call, all of them timed in every round; short calls are repeated within one."""
    once = {key: min(timed(call, device) for _ in range(2)) for key, call in calls.items()}
    inner = {key: max(1, min(20, int(5 / max(ms, 1e-3)))) for key, ms in once.items()}
    total = sum(once[key] * inner[key] for key in calls)
    rounds = max(3, min(rounds, int(1e3 * budget / max(total, 1e-3))))
    times: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(timed(call, device, inner[key]))
    return {key: statistics.median(found) for key, found in times.items()}


def measure(shape: Shape, field: list[Contender], args: argparse.Namespace) -> list[Row]:
    """Every contender that takes this shape."""
    dtype = getattr(torch, args.dtype)
    tokens = shape[0] * shape[1]
    field = [c for c in field if tokens <= c.largest and shape[1] <= c.length]
    leaves = inputs(shape, args.device, dtype)
    slope = torch.randn_like(leaves[2])
    rows = [Row(name_of(shape), c.rule, c.name) for c in field]
    truths = truth(leaves) if leaves[0].numel() <= 2**24 else {}
    forwards: dict[int, Callable[[], object]] = {}
    boths: dict[int, Callable[[], object]] = {}
    for index, (c, row) in enumerate(zip(field, rows, strict=True)):
        call = lambda c=c: forward(c.run, leaves)  # noqa: E731
        again = lambda c=c: both(c.run, leaves, slope)  # noqa: E731
        try:
            row.first_s, out = clocked(call, args.device)
            if c.rule in truths:
                exact = truths[c.rule]
                out = out.double() * (shape[3] ** 0.5 if c.scaled else 1.0)
                row.error = float((out - exact).norm() / exact.norm())
            forwards[index] = call
        except Exception as problem:
            row.note = complaint(problem)
            continue
        try:
            row.first_s += clocked(again, args.device)[0]
            boths[index] = again
        except Exception as problem:
            row.note = f"no backward: {complaint(problem)}"
    del truths
    for index, ms in race(forwards, args.device, args.rounds, args.seconds).items():
        rows[index].forward = ms
    for index, ms in race(boths, args.device, args.rounds, args.seconds).items():
        rows[index].both = ms
    for index in boths:
        rows[index].peak_mib = peak(field[index], shape, args)
    return rows


def truth(leaves: list[Tensor]) -> dict[str, Tensor]:
    """The output of each rule in float64."""
    exact = [x.detach().double() for x in leaves]
    return {rule: ours(rule)(*exact) for rule in ("gated delta", "delta", "sum")}


def clocked(call: Callable[[], object], device: str) -> tuple[float, object]:
    wait(device)
    begin = time.perf_counter()
    result = call()
    wait(device)
    return time.perf_counter() - begin, result


def complaint(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"[:160]


def peak(contender: Contender, shape: Shape, args: argparse.Namespace) -> float | None:
    """MiB at the height of forward and backward, inputs and gradients included."""
    if args.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        leaves = inputs(shape, args.device, getattr(torch, args.dtype))
        slope = torch.randn_like(leaves[2])
        size = sum(x.numel() * x.element_size() for x in (*leaves, slope))
        before = torch.cuda.memory_allocated() - size
        torch.cuda.reset_peak_memory_stats()
        both(contender.run, leaves, slope)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    # The highest resident size of a process of its own, less what it was before the inputs were made.
    command = [sys.executable, "-m", "benchmarks.scan", "--peak", contender.name, contender.rule, "--dtype", args.dtype]
    done = subprocess.run([*command, "--shapes", name_of(shape)], capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def print_peak(args: argparse.Namespace) -> None:
    """What `peak` runs in its own process."""
    name, rule = args.peak
    (contender,) = (c for c in contenders("cpu") if (c.name, c.rule) == (name, rule))
    dtype = getattr(torch, args.dtype)
    small = inputs((1, 64, 1, 8), "cpu", dtype)
    both(contender.run, small, torch.randn_like(small[2]))  # libraries loaded, thread pools made
    with Peak() as highest:
        leaves = inputs(args.shapes[0], "cpu", dtype)
        both(contender.run, leaves, torch.randn_like(leaves[2]))
    print(highest.mib)


@dataclass(frozen=True)
class Rates:
    """What this machine can do."""

    bytes_a_s: float
    flops_a_s: float

    @classmethod
    def of(cls, device: str, dtype: torch.dtype) -> Rates:
        size = 2**26 if device == "cpu" else 2**29
        x = torch.empty(size, dtype=torch.uint8, device=device)
        y = torch.empty_like(x)
        copy = min(timed(lambda: y.copy_(x), device) for _ in range(10))
        n = 1024 if device == "cpu" else 8192
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        product = min(timed(lambda: a @ b, device) for _ in range(10))
        return cls(2 * size / copy * 1e3, 2 * n**3 / product * 1e3)


def floors(shape: Shape, rule: str, dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Bytes forward, bytes of both, FLOPs forward, FLOPs of both, that the chunk form cannot do without.

    Bytes: q, k, v and the coefficients read and the output written; backward, those and the output's cotangent read
    and the gradients written. FLOPs, a token and head, with C tokens a chunk: docs of `rebind.ops.chunked`, products
    counted one by one.
    """
    b, t, h, d = shape
    numbers = {"gated delta": 2, "delta": 1, "sum": 0, "softmax": 0}[rule]
    row = d * torch.empty(0, dtype=dtype).element_size()
    io_forward = 4 * row + 4 * numbers
    io_backward = 7 * row + 8 * numbers
    if rule == "softmax":
        pairs = t / 2 * d
        flop_forward, flop_backward = 2 * 2 * pairs, 2 * 5 * pairs
    elif rule == "sum":
        flop_forward, flop_backward = 2 * (2 * CHUNK * d + 2 * d * d), 2 * (5 * CHUNK * d + 4 * d * d)
    else:
        flop_forward = 2 * (4 * CHUNK * d + 3 * d * d + CHUNK**2 / 3)
        flop_backward = 2 * (10 * CHUNK * d + 7 * d * d)
    count = b * t * h
    return (
        count * io_forward,
        count * (io_forward + io_backward),
        count * flop_forward,
        count * (flop_forward + flop_backward),
    )


def add_floors(row: Row, shape: Shape, rates: Rates, dtype: torch.dtype) -> None:
    io_forward, io_both, flop_forward, flop_both = floors(shape, row.rule, dtype)
    if row.forward:
        row.io_forward = 1e3 * io_forward / rates.bytes_a_s / row.forward
        row.flop_forward = 1e3 * flop_forward / rates.flops_a_s / row.forward
    if row.both:
        row.io_both = 1e3 * io_both / rates.bytes_a_s / row.both
        row.flop_both = 1e3 * flop_both / rates.flops_a_s / row.both


def decoding(args: argparse.Namespace) -> list[Row]:
    """One token for every sequence of a batch."""
    dtype = getattr(torch, args.dtype)
    rows = []
    for batch, heads, d in DECODING if args.device != "cpu" else ((1, 8, 64), (256, 8, 64)):
        leaves = [x.detach() for x in inputs((batch, 1, heads, d), args.device, dtype)]
        q, k, v, log_decay, beta = leaves
        one = [x[:, 0] for x in leaves]
        state = torch.zeros(batch, heads, d, d, device=args.device)
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda one=one, state=state: step(*one[:3], state, log_decay=one[3], erase=one[4], write=one[4]),
        }
        if args.device != "cpu":
            try:
                recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
                calls["fla"] = lambda q=q, k=k, v=v, g=log_decay, beta=beta, state=state, f=recurrent: f(
                    q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
                )
            except (ImportError, AttributeError):
                pass
        table = {
            index: Row(f"{batch}x1x{heads}x{d}", "gated delta, decoding", name) for index, name in enumerate(calls)
        }
        ready = {}
        for index, (name, call) in enumerate(calls.items()):
            if args.only and name not in args.only:
                continue
            try:
                table[index].first_s, _ = clocked(call, args.device)
                ready[index] = call
            except Exception as problem:
                table[index].note = complaint(problem)
        for index, ms in race(ready, args.device, args.rounds, args.seconds).items():
            table[index].forward = ms
        rows += [row for index, row in table.items() if index in ready or row.note]
    return rows


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("shape", "rule", ""):
        table.add_column(column, no_wrap=True)
    for column in ("fwd ms", "fwd+bwd ms", "peak MiB", "first s", "error", "I/O floor", "FLOP floor"):
        table.add_column(column, justify="right", no_wrap=True)

    def number(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    for row in rows:
        table.add_row(
            row.shape,
            row.rule,
            row.name,
            number(row.forward, ".3f"),
            number(row.both, ".3f"),
            number(row.peak_mib, ".0f"),
            number(row.first_s, ".2f"),
            number(row.error, ".1e"),
            " / ".join(filter(None, (number(row.io_forward, ".0%"), number(row.io_both, ".0%")))),
            " / ".join(filter(None, (number(row.flop_forward, ".0%"), number(row.flop_both, ".0%")))),
        )
    console = Console(width=150)
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"  {row.shape} {row.rule}, {row.name}: {row.note}", highlight=False)


def name_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def as_shape(text: str) -> Shape:
    b, t, h, d = (int(part) for part in text.split("x"))
    return b, t, h, d


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=as_shape, help="BxTxHxD; default: this device's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, separated by commas")
    parser.add_argument("--rules", type=lambda text: text.split(","), help="rules, separated by commas")
    parser.add_argument("--rounds", type=int, default=30, help="at most")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="spent on each table cell's column of a shape, about"
    )
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/scan-DEVICE.json")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    args.shapes = args.shapes or (CPU_SHAPES if args.device == "cpu" else GPU_SHAPES)
    if args.quick:
        args.shapes, args.rounds, args.seconds = args.shapes[:2], 5, 3.0
    args.out = args.out or RESULTS / f"scan-{args.device}.json"
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments or [])
    if args.peak:
        print_peak(args)
        return
    dtype = getattr(torch, args.dtype)
    rates = Rates.of(args.device, dtype)
    field = [
        c
        for c in contenders(args.device)
        if (not args.only or c.name in args.only) and (not args.rules or c.rule in args.rules)
    ]
    note = (
        f"{args.dtype}; medians; peak with the inputs; floors: {rates.bytes_a_s / 1e9:.0f} GB/s copied, "
        f"{rates.flops_a_s / 1e12:.2f} TFLOP/s multiplied, forward / both"
    )
    rows: list[Row] = []
    for shape in args.shapes:
        found = measure(shape, field, args)
        for row in found:
            add_floors(row, shape, rates, dtype)
        show(found, f"{name_of(shape)}, {args.device}, {note}")
        rows += found
        save(args.out, rows, note)  # what there is, should a later shape fail
    if not args.rules:
        found = decoding(args)
        show(found, f"decoding, {args.device}, {args.dtype}")
        rows += found
    save(args.out, rows, note)
    print(f"written to {args.out}")


def save(path: Path, rows: list[Row], note: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"title": "scan", "note": note, "machine": machine() | versions(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    found = {}
    for name in ("triton", "fla", "transformers"):
        try:
            found[name] = importlib.import_module(name).__version__
        except (ImportError, AttributeError):
            found[name] = "none"
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
