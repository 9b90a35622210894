"""Decoding speed: tokens per second and memory after contexts of a thousand to a hundred thousand tokens.

    python -m benchmarks.decoding --device cuda --peers llama --graph

A model (random weights, bfloat16 on a GPU) reads a context of random tokens in one pass, its cache is repeated to
--batch sequences, and then it reads single tokens: embedding, all layers and the logits, through the cache of the model
and without `generate` or sampling. The time is the median of --steps tokens; with --graph the recurrent kinds are also
timed under `recorded_decoding`, which removes the launches. *cache* is the size of the cache of all sequences after the
context; *peak* is the peak memory of a step on the GPU, weights included.

The state of the recurrent kinds does not depend on the context. That of attention grows with it; ours is concatenated
at every step, as in the DynamicCache of transformers. `llama` is LlamaForCausalLM of transformers with the same width,
depth, heads and MLPs, and with SDPA.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import RESULTS
from rebind.bench.measure import clocked, machine, timed, wait
from rebind.nn import RebindCache, RebindConfig, RebindForCausalLM, preset, recorded_decoding
from rebind.storage import write_json

WARM_UP_STEPS = 5
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Row:
    """One model after one context."""

    name: str
    context: int
    batch: int
    graph: bool = False
    tokens_per_second: float = 0.0  # of all sequences together
    milliseconds: float = 0.0  # per token
    prefill_seconds: float = 0.0  # the context, one sequence
    cache_mib: float = 0.0
    peak_gib: float | None = None
    problem: str | None = None  # why there are no numbers


# Models


def build(name: str, options: argparse.Namespace) -> Any:
    """Return the model of that name, ready to decode."""
    torch.manual_seed(0)
    config = preset(options.preset, vocab_size=options.vocabulary)
    if name == "llama":
        model = _llama(config, max(options.contexts) + options.steps + 64)
    else:
        model = RebindForCausalLM(RebindConfig(**{**config.to_dict(), "layer_kinds": name}))
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    return model.to(device=options.device, dtype=dtype).eval()


def _llama(config: RebindConfig, positions: int) -> Any:
    library = importlib.import_module("transformers")
    options = library.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return library.LlamaForCausalLM(options)


def cache_tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a cache."""
    if isinstance(cache, RebindCache):
        for state in cache.states:
            yield from [] if state is None else state.tensors
    else:
        for layer in cache.layers:
            yield from (layer.keys, layer.values)


# Measurement


@torch.no_grad()
def measure(model: Any, name: str, context: int, batch: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a model after a context: launched and, if requested, recorded."""
    cuda = options.device.startswith("cuda")
    ids = torch.randint(options.vocabulary, (1, context), device=options.device)

    def read() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    if context == min(options.contexts):
        read()  # compiles the kernels
    seconds, cache = clocked(read, options.device)
    cache.batch_repeat_interleave(batch)
    size = sum(tensor.numel() * tensor.element_size() for tensor in cache_tensors(cache)) / MIB
    token = ids[:, -1:].expand(batch, 1).contiguous()

    def step() -> None:
        model(input_ids=token, past_key_values=cache, use_cache=True)

    ways: list[tuple[bool, AbstractContextManager[None]]] = [(False, nullcontext())]
    if options.graph and cuda and isinstance(model, RebindForCausalLM) and not model.grows:
        ways.append((True, recorded_decoding(model)))
    for graph, way in ways:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            with way:
                for _ in range(WARM_UP_STEPS):
                    step()
                wait(options.device)
                milliseconds = statistics.median(timed(step, options.device) for _ in range(options.steps))
        except RuntimeError as problem:
            yield Row(name, context, batch, graph, problem=_summary(problem))
            continue
        peak = torch.cuda.max_memory_allocated() / GIB if cuda else None
        yield Row(name, context, batch, graph, 1e3 * batch / milliseconds, milliseconds, seconds, size, peak)


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a model for every context and batch, with the reason for each that fails."""
    try:
        model = build(name, options)
    except Exception as problem:  # whatever a peer raises
        yield Row(name, 0, 0, problem=_summary(problem))
        return
    for context in options.contexts:
        for batch in options.batch:
            try:
                yield from measure(model, name, context, batch, options)
            except Exception as problem:  # out of memory, or whatever a peer raises: the others run
                yield Row(name, context, batch, problem=_summary(problem))
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


def _summary(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]


# Report


def describe(row: Row) -> str:
    name = f"{row.name}{', graph' if row.graph else ''}  context {row.context:,}, batch {row.batch}"
    if row.problem:
        return f"{name}: failed, {row.problem}"
    return f"{name}: {row.tokens_per_second:,.0f} tokens/s, cache {row.cache_mib:,.1f} MiB"


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    table = Table(title=f"decoding, {options.preset}", title_justify="left", title_style="bold")
    for column in ("layers", "batch", "context", "tokens/s", "ms per token", "prefill s", "cache MiB", "peak GiB"):
        table.add_column(column, justify="left" if column == "layers" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row.batch, row.name, row.graph, row.context)):
        name = row.name + (", graph" if row.graph else "")
        numbers = (
            ("failed", "", "", "", "")
            if row.problem
            else (
                f"{row.tokens_per_second:,.0f}",
                f"{row.milliseconds:.2f}",
                f"{row.prefill_seconds:.3f}",
                f"{row.cache_mib:,.1f}",
                "" if row.peak_gib is None else f"{row.peak_gib:.2f}",
            )
        )
        table.add_row(name, str(row.batch), f"{row.context:,}", *numbers)
    Console(width=120).print(table)


def save(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    content = {
        "machine": machine("transformers", "triton"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, content)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="modern-60m")
    parser.add_argument("--kinds", nargs="*", default=["gated_delta", "delta", "attention"], help="layers of rebind")
    parser.add_argument("--peers", nargs="*", default=[], choices=("llama",), help="other models to measure")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**10, 2**12, 2**14, 2**16, 2**17])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="numbers of sequences")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=48, help="tokens to time")
    parser.add_argument("--graph", action="store_true", help="also time the recurrent kinds as a CUDA graph")
    parser.add_argument("--out", default=str(RESULTS / "decoding.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows: list[Row] = []
    for name in (*options.kinds, *options.peers):
        for row in rows_of(name, options):
            rows.append(row)
            print(describe(row), flush=True)
            save(options, rows)
    show(rows, options)


if __name__ == "__main__":
    main()
