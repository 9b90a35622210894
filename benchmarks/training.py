"""Speed of training: tokens a second and memory of whole language models, ours and whatever else can be imported.

    python -m benchmarks.training --device cuda --peers fla-delta gpt2
    OMP_NUM_THREADS=1 python -m benchmarks.training --device cpu --peers transformers gpt2

A step is forward, loss, backward and AdamW (fused on a GPU) on one batch of random tokens; every batch holds --tokens
of them, in sequences of each of --lengths. On a GPU weights are float32 and models run in bfloat16 by autocast; on a
CPU all is float32. The time is the median of --repeats steps after some that warm up; memory is the highest that a step
allocates on a GPU, weights, gradients and moments included (with --record the most since the model was made). Backward
passes run in the thread that asks for them, the peers' too: operators written in Python are slower in autograd's own.
Small models wait for the host, which launches their kernels; --record replays a step as one CUDA graph, the peers' too
where they can be, with the norm of the gradients, as `rebind train` takes it.

Ours are the presets with layers of each of --kinds, asked for their loss without the logits, as `rebind train` does
(flash-linear-attention's hold theirs only in part either). Peers have the same width, depth, heads and vocabulary:

- `fla-delta`, `fla-gated-delta`: flash-linear-attention's DeltaNetForCausalLM and GatedDeltaNetForCausalLM with values
  as wide as keys, tied embeddings and otherwise their defaults. Their kernels tune themselves at first use.
- `gpt2`: transformers' GPT2LMHeadModel (attention by SDPA, no dropout, MLPs of four times the width).
- `transformers`: our gated-delta model in which transformers' torch code takes the place of our scan: what there was
  on a CPU.

Parameters differ where the architectures do, and are given. A peer that fails is a row that says why; ours
come first, so that none is measured after a peer's recording that failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.report import RESULTS
from rebind.bench.clock import timed, wait
from rebind.bench.machine import machine
from rebind.files import write_atomically
from rebind.nn import RebindConfig, RebindForCausalLM, preset
from rebind.nn.training.recorded import RecordedStep

WARM_UP = 3  # steps: kernels are compiled, moments made
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One model at one length."""

    preset: str
    name: str
    length: int
    batch: int
    parameters: int = 0
    tokens_a_second: float = 0.0
    milliseconds: float = 0.0  # a step
    memory_gib: float | None = None
    compiled: bool = False
    recorded: bool = False  # as a CUDA graph
    problem: str | None = None  # why there is nothing else


@dataclass(frozen=True)
class Contender:
    """A model that returns the loss of `labels`, made for a config of ours and a length."""

    name: str
    build: Callable[[RebindConfig, int], nn.Module]
    during: Callable[[], Any] = nullcontext  # what is in force while it runs
    asked: Mapping[str, Any] = field(default_factory=dict)  # of its forward, besides


# Who takes part


def ours(kind: str) -> Contender:
    def build(config: RebindConfig, length: int) -> nn.Module:
        changed = RebindConfig(**{**config.to_dict(), "layer_kinds": kind})
        return RebindForCausalLM(changed)

    return Contender(f"ours, {kind}", build, asked={"return_logits": False})


def peer(name: str) -> Contender:
    return {
        "fla-delta": Contender("fla, DeltaNet", _fla_delta),
        "fla-gated-delta": Contender("fla, GatedDeltaNet", _fla_gated),
        "gpt2": Contender("transformers, GPT-2", _gpt2),
        "transformers": replace(ours("gated-delta"), name="transformers' gated delta", during=_fallback),
    }[name]


def _fla_common(config: RebindConfig, length: int) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": length,
        "expand_v": 1.0,
        "conv_size": config.conv_size,
        "tie_word_embeddings": True,
        "use_cache": False,
    }


def _fla_delta(config: RebindConfig, length: int) -> nn.Module:
    models = importlib.import_module("fla.models")
    return models.DeltaNetForCausalLM(models.DeltaNetConfig(**_fla_common(config, length)))


def _fla_gated(config: RebindConfig, length: int) -> nn.Module:
    models = importlib.import_module("fla.models")
    head = config.hidden_size // config.num_attention_heads
    return models.GatedDeltaNetForCausalLM(models.GatedDeltaNetConfig(**_fla_common(config, length), head_dim=head))


def _gpt2(config: RebindConfig, length: int) -> nn.Module:
    library = importlib.import_module("transformers")
    made = library.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=length,
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return library.GPT2LMHeadModel(made)


@contextmanager
def _fallback() -> Iterator[None]:
    """Our layers on transformers' torch code: the same function, found as `rebind bench scan` finds it."""
    importlib.import_module("transformers").logging.set_verbosity_error()  # it says that it falls back
    code = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule

    def scan(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        scaled = q * q.shape[-1] ** 0.5  # it divides by that
        out, state = code(scaled, k, v, g=given["log_decay"], beta=given["write"], output_final_state=True)
        return out, state.mT

    with mock.patch("rebind.nn.layers.fast_weight.scan", scan):
        yield


# Measuring


def measure(contender: Contender, options: argparse.Namespace, name: str, length: int) -> Row:
    """The row of a contender, or one that says why there is none."""
    batch = max(1, options.tokens // length)
    nothing = Row(name, contender.name, length, batch, compiled=options.compile, recorded=options.record)
    try:
        with contender.during():
            return _measured(contender, options, nothing)
    except Exception as problem:  # a peer's own: whatever it is, the others go on
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        said = f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]
        return replace(nothing, problem=said)
    finally:
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _measured(contender: Contender, options: argparse.Namespace, empty: Row) -> Row:
    device, cuda = options.device, options.device.startswith("cuda")
    torch.manual_seed(0)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    config = preset(empty.preset, vocab_size=options.vocabulary)
    model: Any = contender.build(config, empty.length).to(device).train()
    ran: Any = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda or None)
    ids = torch.randint(options.vocabulary, (empty.batch, empty.length), device=device)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        kept = not options.record  # narrow weights that a graph would find stale
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=cuda, cache_enabled=kept):
            loss: Tensor = ran(input_ids=inputs, labels=targets, **contender.asked).loss
        return loss

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):  # as `rebind train` does
            loss_of(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP if cuda else 1):
        step()
    if options.record:
        with _as_launched():
            recording = RecordedStep(loss_of, list(model.parameters()), math.inf, ids, ids)

        def step() -> None:
            recording(ids, ids)
            optimizer.step()

        step()
    wait(device)
    if cuda and not options.record:
        torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(timed(step, device) for _ in range(options.repeats))
    return replace(
        empty,
        parameters=sum(one.numel() for one in model.parameters()),
        tokens_a_second=1e3 * empty.batch * empty.length / ms,
        milliseconds=ms,
        memory_gib=torch.cuda.max_memory_allocated() / GIB if cuda else None,
    )


def _as_launched() -> AbstractContextManager[Any]:
    """While a graph is captured transformers cannot look whether sequences are packed, and would mask them as if they
    were; launched it sees that they are not, and says is_causal."""
    return mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)


# What is told


def show(rows: Sequence[Row]) -> None:
    table = Table(title="training", title_justify="left", title_style="bold")
    for column in ("preset", "model", "T", "batch", "parameters", "tokens/s", "ms a step", "peak GiB"):
        table.add_column(column, justify="left" if column in ("preset", "model") else "right", no_wrap=True)
    for row in rows:
        name = row.name + (", compiled" if row.compiled else "") + (", recorded" if row.recorded else "")
        numbers = (
            ("", "failed", "", "")
            if row.problem
            else (
                f"{row.parameters / 1e6:.1f}M",
                f"{row.tokens_a_second:,.0f}",
                f"{row.milliseconds:.1f}",
                "" if row.memory_gib is None else f"{row.memory_gib:.1f}",
            )
        )
        table.add_row(row.preset, name, str(row.length), str(row.batch), *numbers)
    Console(width=120).print(table)


def told(row: Row) -> str:
    name = f"{row.preset}  {row.name}  T={row.length}"
    if row.problem:
        return f"{name}: failed, {row.problem}"
    memory = "" if row.memory_gib is None else f", {row.memory_gib:.1f} GiB"
    return f"{name}: {row.tokens_a_second:,.0f} tokens/s{memory}"


def save(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    content = {
        "machine": machine("transformers", "fla", "triton"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "rows": [asdict(row) for row in rows],
    }
    write_atomically(Path(options.out), (json.dumps(content, indent=2) + "\n").encode())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--presets", nargs="+", help="default: modern-60m modern-350m; modern-10m on a CPU")
    parser.add_argument("--kinds", nargs="*", help="of ours; default: delta gated-delta attention; one on a CPU")
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        choices=("fla-delta", "fla-gated-delta", "gpt2", "transformers"),
        help="who else takes part",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 2048 8192; 512 1024 on a CPU")
    parser.add_argument("--tokens", type=int, help="a batch holds; default: 16384; 1024 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 32000; 16000 on a CPU")
    parser.add_argument("--repeats", type=int, help="steps that are timed; default: 10; 3 on a CPU")
    parser.add_argument("--compile", action="store_true", help="every model through torch.compile")
    parser.add_argument("--record", action="store_true", help="every step as a CUDA graph")
    parser.add_argument("--out", default=str(RESULTS / "training.json"))
    options = parser.parse_args(words)
    cuda = options.device.startswith("cuda")
    if options.record and not cuda:
        parser.error(f"--record wants a CUDA device, and --device is {options.device}")
    defaults: dict[str, tuple[Any, Any]] = {
        "presets": (["modern-60m", "modern-350m"], ["modern-10m"]),
        "kinds": (["delta", "gated-delta", "attention"], ["gated-delta"]),
        "lengths": ([512, 2048, 8192], [512, 1024]),
        "tokens": (16_384, 1_024),
        "vocabulary": (32_000, 16_000),
        "repeats": (10, 3),
    }
    for name, (on_gpu, on_cpu) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if cuda else on_cpu)
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    rows: list[Row] = []
    for contender in (*map(ours, options.kinds), *map(peer, options.peers)):
        for name in options.presets:
            for length in options.lengths:
                rows.append(measure(contender, options, name, length))
                print(told(rows[-1]), flush=True)
                save(options, rows)
    show(rows)


if __name__ == "__main__":
    main()
