"""Training speed: tokens per second and memory of whole language models, rebind's and others that can be imported.

    python -m benchmarks.training --device cuda --peers fla-delta gpt2
    OMP_NUM_THREADS=1 python -m benchmarks.training --device cpu --peers transformers gpt2

A step is forward, loss, backward and AdamW (fused on a GPU) on one batch of random tokens. Every batch has --tokens of
them, in sequences of each of --lengths. On a GPU weights are float32 and models run in bfloat16 by autocast; on a CPU
everything is float32. The time is the median of --repeats steps after a few warm-up steps. The memory is the peak of a
step on a GPU, weights, gradients and moments included (with --record the peak since the model was created). Backward
passes run in the calling thread, for the peers too: operators written in Python are slower in autograd's own thread.
Small models wait for the host to launch their kernels; --record replays a step as one CUDA graph, for the peers too
where possible, and includes the norm of the gradients, as `rebind train` does.

The models of rebind are presets with layers of each of --kinds. They return their loss without the logits, as in
`rebind train` (the models of flash-linear-attention never have all logits in memory either). Peers have the same width,
depth, heads and vocabulary:

- `fla-delta`, `fla-gated_delta`: DeltaNetForCausalLM and GatedDeltaNetForCausalLM of flash-linear-attention with values
  as wide as keys, tied embeddings and defaults otherwise. Their kernels tune themselves at first use.
- `gpt2`: GPT2LMHeadModel of transformers (attention by SDPA, no dropout, MLPs of four times the width).
- `transformers`: the gated_delta model of rebind with the torch code of transformers in place of the scan.

The numbers of parameters differ with the architectures and are reported. A peer that fails becomes a row with the
reason. The models of rebind run first, so that none is measured after a peer's recording that failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.report import RESULTS
from rebind.bench.measure import machine, timed, wait
from rebind.nn import RebindConfig, RebindForCausalLM, preset
from rebind.nn.training.step import RecordedStep
from rebind.storage import write_json

WARM_UP_STEPS = 3  # compile the kernels and create the moments
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One model at one length."""

    preset: str
    name: str
    length: int
    batch: int
    parameters: int = 0
    tokens_per_second: float = 0.0
    milliseconds: float = 0.0  # per step
    memory_gib: float | None = None
    compiled: bool = False
    recorded: bool = False  # as a CUDA graph
    problem: str | None = None  # why there are no numbers


@dataclass(frozen=True)
class Contender:
    """A model that returns the loss of `labels`, built for a config of rebind and a length."""

    name: str
    build: Callable[[RebindConfig, int], nn.Module]
    context: Callable[[], Any] = nullcontext  # entered while it runs
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its forward, besides tokens and labels


# Contenders


def ours(kind: str) -> Contender:
    def build(config: RebindConfig, length: int) -> nn.Module:
        return RebindForCausalLM(RebindConfig(**{**config.to_dict(), "layer_kinds": kind}))

    return Contender(f"ours, {kind}", build, arguments={"return_logits": False})


def peer(name: str) -> Contender:
    return {
        "fla-delta": Contender("fla, DeltaNet", _fla_delta),
        "fla-gated_delta": Contender("fla, GatedDeltaNet", _fla_gated_delta),
        "gpt2": Contender("transformers, GPT-2", _gpt2),
        "transformers": replace(ours("gated_delta"), name="transformers' gated_delta", context=_scan_of_transformers),
    }[name]


def _fla_options(config: RebindConfig, length: int) -> dict[str, Any]:
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
    return models.DeltaNetForCausalLM(models.DeltaNetConfig(**_fla_options(config, length)))


def _fla_gated_delta(config: RebindConfig, length: int) -> nn.Module:
    models = importlib.import_module("fla.models")
    head_dim = config.hidden_size // config.num_attention_heads
    options = models.GatedDeltaNetConfig(**_fla_options(config, length), head_dim=head_dim)
    return models.GatedDeltaNetForCausalLM(options)


def _gpt2(config: RebindConfig, length: int) -> nn.Module:
    library = importlib.import_module("transformers")
    options = library.GPT2Config(
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
    return library.GPT2LMHeadModel(options)


@contextmanager
def _scan_of_transformers() -> Iterator[None]:
    """Run our layers with the torch code of transformers, which computes the same function."""
    importlib.import_module("transformers").logging.set_verbosity_error()  # it reports that it has no kernels
    code = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule

    def scan(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        scaled = q * q.shape[-1] ** 0.5  # it divides by that
        out, state = code(scaled, k, v, g=arguments["log_decay"], beta=arguments["write"], output_final_state=True)
        return out, state.mT

    with mock.patch("rebind.nn.layers.fast_weight.scan", scan):
        yield


# Measurement


def measure(contender: Contender, options: argparse.Namespace, name: str, length: int) -> Row:
    """Return the row of a contender, with the reason if it fails."""
    batch = max(1, options.tokens // length)
    row = Row(name, contender.name, length, batch, compiled=options.compile, recorded=options.record)
    try:
        with contender.context():
            return _measure(contender, options, row)
    except Exception as problem:  # whatever a peer raises, the others run
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        return replace(row, problem=f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300])
    finally:
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _measure(contender: Contender, options: argparse.Namespace, row: Row) -> Row:
    device, cuda = options.device, options.device.startswith("cuda")
    torch.manual_seed(0)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    config = preset(row.preset, vocab_size=options.vocabulary)
    model: Any = contender.build(config, row.length).to(device).train()
    forward: Any = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda or None)
    ids = torch.randint(options.vocabulary, (row.batch, row.length), device=device)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        cached = not options.record  # a graph would replay stale copies of the weights
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=cuda, cache_enabled=cached):
            loss: Tensor = forward(input_ids=inputs, labels=targets, **contender.arguments).loss
        return loss

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):  # as in `rebind train`
            loss_of(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP_STEPS if cuda else 1):
        step()
    if options.record:
        with _causal_attention_while_recording():
            recording = RecordedStep(loss_of, list(model.parameters()), math.inf, ids, ids)

        def step() -> None:
            recording(ids, ids)
            optimizer.step()

        step()
    wait(device)
    if cuda and not options.record:
        torch.cuda.reset_peak_memory_stats()
    milliseconds = statistics.median(timed(step, device) for _ in range(options.repeats))
    return replace(
        row,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens_per_second=1e3 * row.batch * row.length / milliseconds,
        milliseconds=milliseconds,
        memory_gib=torch.cuda.max_memory_allocated() / GIB if cuda else None,
    )


def _causal_attention_while_recording() -> AbstractContextManager[Any]:
    """Tell transformers that sequences are not packed, which it cannot check while a graph is recorded.

    It would use a mask then; when launched it sees that they are not packed, and uses is_causal.
    """
    return mock.patch("transformers.masking_utils.find_packed_sequence_indices", return_value=None)


# Report


def show(rows: Sequence[Row]) -> None:
    table = Table(title="training", title_justify="left", title_style="bold")
    for column in ("preset", "model", "T", "batch", "parameters", "tokens/s", "ms per step", "peak GiB"):
        table.add_column(column, justify="left" if column in ("preset", "model") else "right", no_wrap=True)
    for row in rows:
        name = row.name + (", compiled" if row.compiled else "") + (", recorded" if row.recorded else "")
        numbers = (
            ("", "failed", "", "")
            if row.problem
            else (
                f"{row.parameters / 1e6:.1f}M",
                f"{row.tokens_per_second:,.0f}",
                f"{row.milliseconds:.1f}",
                "" if row.memory_gib is None else f"{row.memory_gib:.1f}",
            )
        )
        table.add_row(row.preset, name, str(row.length), str(row.batch), *numbers)
    Console(width=120).print(table)


def describe(row: Row) -> str:
    name = f"{row.preset}  {row.name}  T={row.length}"
    if row.problem:
        return f"{name}: failed, {row.problem}"
    memory = "" if row.memory_gib is None else f", {row.memory_gib:.1f} GiB"
    return f"{name}: {row.tokens_per_second:,.0f} tokens/s{memory}"


def save(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    content = {
        "machine": machine("transformers", "fla", "triton"),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, content)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--presets", nargs="+", help="default: modern-60m modern-350m; on a CPU modern-10m")
    parser.add_argument(
        "--kinds", nargs="*", help="layers of rebind; default: delta gated_delta attention; on a CPU gated_delta"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        choices=("fla-delta", "fla-gated_delta", "gpt2", "transformers"),
        help="other models to measure",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 512 2048 8192; on a CPU 512 1024")
    parser.add_argument("--tokens", type=int, help="tokens per batch; default: 16384; on a CPU 1024")
    parser.add_argument("--vocabulary", type=int, help="default: 32000; on a CPU 16000")
    parser.add_argument("--repeats", type=int, help="steps to time; default: 10; on a CPU 3")
    parser.add_argument("--compile", action="store_true", help="compile every model with torch.compile")
    parser.add_argument("--record", action="store_true", help="replay every step as a CUDA graph")
    parser.add_argument("--out", default=str(RESULTS / "training.json"))
    options = parser.parse_args(arguments)
    cuda = options.device.startswith("cuda")
    if options.record and not cuda:
        parser.error(f"--record needs a CUDA device, but --device is {options.device}")
    defaults: dict[str, tuple[Any, Any]] = {
        "presets": (["modern-60m", "modern-350m"], ["modern-10m"]),
        "kinds": (["delta", "gated_delta", "attention"], ["gated_delta"]),
        "lengths": ([512, 2048, 8192], [512, 1024]),
        "tokens": (16_384, 1_024),
        "vocabulary": (32_000, 16_000),
        "repeats": (10, 3),
    }
    for name, (on_gpu, on_cpu) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if cuda else on_cpu)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    rows: list[Row] = []
    for contender in (*map(ours, options.kinds), *map(peer, options.peers)):
        for name in options.presets:
            for length in options.lengths:
                rows.append(measure(contender, options, name, length))
                print(describe(rows[-1]), flush=True)
                save(options, rows)
    show(rows)


if __name__ == "__main__":
    main()
