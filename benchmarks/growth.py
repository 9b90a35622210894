"""How the cost of an edit grows with the model: random Llamas of the shapes of 135M to 8B, seconds by phase and memory.

    python -m benchmarks.growth --shapes 135M 1B 3B 8B --n 1 10 100
    python -m benchmarks.growth --shapes tiny --device cpu --steps 3

The weights are random, so what is written means nothing and no search ends early: each makes all of its steps. Facts
are made up. Moments are of random tokens, and are kept in memory: they are here to be factored and solved with. Their
seconds (with their factors), and those of the contexts, are spent once a model; all others are those of one edit.
*Checks* are the facts' scores before and after and the guard's measurements.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.clock import Clock, peak_gib, told_apart
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.edit.editor import Editor
from rebind.edit.facts.fact import Fact
from rebind.edit.moments import OldKeys
from rebind.edit.progress import Progress
from rebind.models.sites import module_at
from rebind.models.tokens import Tokens
from rebind.storage import write_file

GIB = 2**30
ONCE = ("contexts", "moments")  # a model
PHASES = ("encoding", "targets", "keys", "solve", "writing", "checks")  # of an edit
WINDOW, AT_ONCE = 64, 16_384  # tokens, of random text


def _shape(width: int, inner: int, depth: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": _shape(32, 48, 6, 4, 2, 512, True),
    "135M": _shape(576, 1536, 30, 9, 3, 49_152, True),  # SmolLM2
    "1B": _shape(2048, 8192, 16, 32, 8, 128_256, True),  # Llama 3.2
    "3B": _shape(3072, 8192, 28, 24, 8, 128_256, True),  # Llama 3.2
    "8B": _shape(4096, 14_336, 32, 32, 8, 128_256, False),  # Llama 3.1
}


@dataclass(frozen=True)
class Row:
    """One edit of one model."""

    shape: str
    parameters: int
    layers: tuple[int, ...]  # edited
    d_k: int
    facts: int
    steps: int
    seconds: float  # of the edit
    phases: dict[str, float]
    once: dict[str, float]  # seconds spent once a model
    weights_gib: float
    memory_gib: float  # peak, the weights included

    @property
    def edits_a_second(self) -> float:
        return self.facts / self.seconds


# Models and facts


def build(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A random Llama, made where it will run."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config  # untyped
    with torch.device(device):
        return make(config, dtype=dtype).to(device)


SYLLABLES = ("ma", "ro", "ti", "len", "sa", "vo", "ka", "dri", "no", "pel")
PROMPTS = (
    ("The capital of {} is", ("Rome", "Vienna", "Madrid", "Oslo")),
    ("{} plays the", ("harp", "oboe", "drum", "piano")),
    ("The mother tongue of {} is", ("French", "Italian", "Norwegian", "German")),
    ("{} was born in the city of", ("Paris", "Berlin", "Lisbon", "Athens")),
)


def invented(n: int) -> list[Fact]:
    """Facts about n subjects that nobody has heard of."""
    made = []
    for number in range(n):
        digits = [number // 10**place % 10 for place in range(4)]
        first, last = ("".join(SYLLABLES[digit] for digit in part) for part in (digits[:2], digits[1:]))
        prompt, targets = PROMPTS[number % len(PROMPTS)]
        made.append(Fact(prompt, f"{first.title()} {last.title()}", targets[number // len(PROMPTS) % len(targets)]))
    return made


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of the invented facts: for where there is no tokenizer to be had."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([f"{fact.text} {fact.target}." for fact in invented(1000)], trainer)
    wrap: Any = PreTrainedTokenizerFast  # untyped
    made: PreTrainedTokenizerFast = wrap(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    return made


# Moments, without files


@torch.no_grad()
def learn(editor: Editor, layers: Sequence[int], tokens: int) -> None:
    """E[kkᵀ] of the layers' sites over random tokens, and its factor, into the editor's memory."""
    names = [editor.sites[layer].name for layer in layers]
    modules = [module_at(editor.model, name) for name in names]
    vocabulary = editor.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    totals: dict[str, Tensor] = {}
    read = 0
    while read < tokens:
        rows = max(1, min(AT_ONCE, tokens - read) // WINDOW)
        ids = torch.randint(vocabulary, (rows, WINDOW), generator=generator).to(editor.language_model.device)
        everywhere = torch.ones_like(ids)
        seen = editor.language_model.trunk.inputs(modules, Tokens(ids, everywhere, everywhere.cumsum(-1) - 1))
        for name, keys in zip(names, seen, strict=True):
            wide = keys.flatten(0, 1).float()
            product = (wide.mT @ wide).double()
            totals[name] = totals[name].add_(product) if name in totals else product
        read += ids.numel()
    for name in names:
        editor.weights.old_keys[name] = OldKeys(totals.pop(name) / read)
        _ = editor.weights.old_keys[name].factored


# One edit, phase by phase


def edit(editor: Editor, facts: list[Fact], steps: int) -> tuple[float, dict[str, float]]:
    """Write and undo: the seconds of the edit, in all and by phase."""
    search = replace(editor.settings("memit").targets, steps=steps, enough=0.0)
    clock = Clock()
    editor.progress = clock.progress
    clock.enter("writing")  # the edits before are taken out of the weights
    begin = time.perf_counter()
    with told_apart(editor, clock):
        made = editor.rewrite_many(facts, method="memit", targets=search, force=True)
    clock.enter(None)
    seconds = time.perf_counter() - begin
    editor.progress = Progress()
    editor.undo(made.id)
    spent = dict(clock.spent)
    # Contexts and moments are there already: what is left of their phases is turning facts into tokens.
    return seconds, {"encoding": sum(spent.pop(name, 0.0) for name in ONCE), **spent}


def grown(
    shape: str,
    tokenizer: Any,
    numbers: Sequence[int],
    *,
    device: str,
    dtype: torch.dtype,
    steps: int,
    tokens: int,
) -> Iterator[Row]:
    """A row for each number of facts."""
    editor = Editor(build(shape, device, dtype), tokenizer)
    layers = editor.settings("memit").layers
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in editor.model.parameters()]
    clock = Clock()
    clock.enter("contexts")
    _ = editor.contexts
    clock.enter("moments")
    learn(editor, layers, tokens)
    clock.enter(None)
    once = clock.spent
    edit(editor, invented(1), 2)  # kernels are loaded, and what the base says to the canaries is there
    for n in numbers:
        if editor.language_model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, phases = edit(editor, invented(n), steps)
        yield Row(
            shape,
            sum(count for count, _ in sizes),
            layers,
            editor.sites[layers[-1]].d_k,
            n,
            steps,
            seconds,
            phases,
            once,
            sum(count * size for count, size in sizes) / GIB,
            peak_gib(editor),
        )


# What is told


def show(rows: Sequence[Row]) -> None:
    table = Table(
        title="cost of an edit, random Llamas",
        title_justify="left",
        title_style="bold",
        caption="seconds; contexts and moments are spent once a model, and are not in the edit's",
        caption_justify="left",
    )
    columns = ("model", "layers", "d_k", "facts", "edit", "edits/s", *PHASES, *ONCE, "weights GiB", "peak GiB")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.shape,
            f"{row.layers[0]}-{row.layers[-1]}",
            f"{row.d_k:,}",
            str(row.facts),
            f"{row.seconds:.2f}",
            f"{row.edits_a_second:.1f}",
            *(f"{row.phases.get(phase, 0.0):.2f}" for phase in PHASES),
            *(f"{row.once[name]:.2f}" for name in ONCE),
            f"{row.weights_gib:.1f}",
            f"{row.memory_gib:.1f}",
        )
    Console(width=170).print(table)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135M", "1B", "3B", "8B"], choices=list(SHAPES))
    parser.add_argument("--n", type=int, nargs="+", default=[1, 10, 100], help="numbers of facts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=25, help="of the search: all of them are made")
    parser.add_argument("--tokens", type=int, default=32_768, help="of random text, for the moments")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json; default: a small one of the facts' own")
    parser.add_argument("--out", type=Path, default=RESULTS / "growth.json")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, told: Callable[[Row], None] | None = None) -> None:
    options = parse(arguments)
    given = options.tokenizer
    tokenizer = small_tokenizer() if given is None else AutoTokenizer.from_pretrained(given, local_files_only=True)
    rows: list[Row] = []
    for shape in options.shapes:
        measured = grown(
            shape,
            tokenizer,
            options.n,
            device=options.device,
            dtype=getattr(torch, options.dtype),
            steps=options.steps,
            tokens=options.tokens,
        )
        for row in measured:
            rows.append(row)
            if told is not None:
                told(row)
            show([row])
            content = {
                "machine": machine("transformers"),
                "dtype": options.dtype,
                "tokens": options.tokens,
                "rows": [asdict(one) for one in rows],
            }
            write_file(options.out, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
        del measured
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    show(rows)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
