"""Speed of decoding: tokens a second and memory after contexts of a thousand tokens to a hundred thousand.

    python -m benchmarks.decoding --device cuda --peers llama --graph

A model (random weights, bfloat16 on a GPU) reads a context of random tokens in one pass, its cache is repeated to
--batch sequences, and then single tokens are read: embedding, all layers and the logits, through the model's own cache
and without `generate`, sampling or the choice of a next token. The time is the median of --steps of them; with --graph
the recurrent kinds are timed under `recorded_decoding` too, which takes the launches out. *cache* is the bytes of the
cache for all sequences after the context; *peak* the highest that a step allocates on the GPU, weights included.

The state of the recurrent kinds does not depend on the context; attention's grows with it, ours by a concatenation a
step, as transformers' DynamicCache does. `llama` is transformers' LlamaForCausalLM of the same width, depth, heads and
MLPs with SDPA.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import RESULTS
from rebind.bench.clock import clocked, timed, wait
from rebind.bench.machine import machine
from rebind.files import write_atomically
from rebind.nn import RebindCache, RebindConfig, RebindForCausalLM, preset, recorded_decoding

WARM_UP = 5
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Row:
    """One model after one context."""

    name: str
    context: int
    batch: int
    graph: bool = False
    tokens_a_second: float = 0.0  # all sequences together
    milliseconds: float = 0.0  # a token
    prefill_seconds: float = 0.0  # the context, one sequence
    cache_mib: float = 0.0
    peak_gib: float | None = None
    problem: str | None = None


# Models


def build(name: str, options: argparse.Namespace) -> Any:
    """The model of that name, ready to be asked."""
    torch.manual_seed(0)
    config = preset(options.preset, vocab_size=options.vocabulary)
    if name == "llama":
        made = _llama(config, max(options.contexts) + options.steps + 64)
    else:
        made = RebindForCausalLM(RebindConfig(**{**config.to_dict(), "layer_kinds": name}))
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    return made.to(device=options.device, dtype=dtype).eval()


def _llama(config: RebindConfig, longest: int) -> Any:
    library = importlib.import_module("transformers")
    made = library.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return library.LlamaForCausalLM(made)


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """What a cache holds."""
    if isinstance(cache, RebindCache):
        for state in cache.states:
            yield from [] if state is None else state.tensors
    else:
        for layer in cache.layers:
            yield from (layer.keys, layer.values)


# Measuring


@torch.no_grad()
def measure(model: Any, name: str, context: int, batch: int, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a model after a context: launch by launch, and recorded where that is asked for."""
    cuda = options.device.startswith("cuda")
    ids = torch.randint(options.vocabulary, (1, context), device=options.device)

    def read() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    if context == min(options.contexts):
        read()  # kernels are compiled
    seconds, cache = clocked(read, options.device)
    cache.batch_repeat_interleave(batch)
    held = sum(one.numel() * one.element_size() for one in tensors_of(cache)) / MIB
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
                for _ in range(WARM_UP):
                    step()
                wait(options.device)
                ms = statistics.median(timed(step, options.device) for _ in range(options.steps))
        except RuntimeError as problem:
            yield Row(name, context, batch, graph, problem=_said(problem))
            continue
        peak = torch.cuda.max_memory_allocated() / GIB if cuda else None
        yield Row(name, context, batch, graph, 1e3 * batch / ms, ms, seconds, held, peak)


def rows_of(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every context and batch of a model; one that fails is a row that says why."""
    try:
        model = build(name, options)
    except Exception as problem:  # a peer's own
        yield Row(name, 0, 0, problem=_said(problem))
        return
    for context in options.contexts:
        for batch in options.batch:
            try:
                yield from measure(model, name, context, batch, options)
            except Exception as problem:  # out of memory, or a peer's own: the others go on
                yield Row(name, context, batch, problem=_said(problem))
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


def _said(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]


# What is told


def told(row: Row) -> str:
    name = f"{row.name}{', graph' if row.graph else ''}  context {row.context:,}, batch {row.batch}"
    if row.problem:
        return f"{name}: failed, {row.problem}"
    return f"{name}: {row.tokens_a_second:,.0f} tokens/s, cache {row.cache_mib:,.1f} MiB"


def show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    title = f"decoding, {options.preset}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("layers", "batch", "context", "tokens/s", "ms a token", "prefill s", "cache MiB", "peak GiB"):
        table.add_column(column, justify="left" if column == "layers" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: (row.batch, row.name, row.graph, row.context)):
        name = row.name + (", graph" if row.graph else "")
        numbers = (
            ("failed", "", "", "", "")
            if row.problem
            else (
                f"{row.tokens_a_second:,.0f}",
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
    write_atomically(Path(options.out), (json.dumps(content, indent=2) + "\n").encode())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="modern-60m")
    parser.add_argument("--kinds", nargs="*", default=["gated-delta", "delta", "attention"], help="of our layers")
    parser.add_argument("--peers", nargs="*", default=[], choices=("llama",))
    parser.add_argument("--contexts", type=int, nargs="+", default=[2**10, 2**12, 2**14, 2**16, 2**17])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=48, help="tokens that are timed")
    parser.add_argument("--graph", action="store_true", help="the recurrent kinds as a CUDA graph too")
    parser.add_argument("--out", default=str(RESULTS / "decoding.json"))
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    rows: list[Row] = []
    for name in (*options.kinds, *options.peers):
        for row in rows_of(name, options):
            rows.append(row)
            print(told(row), flush=True)
            save(options, rows)
    show(rows, options)


if __name__ == "__main__":
    main()
