"""German to English on Multi30k: softmax attention against fast weights, the question of Schlag et al.'s Table 1.

python -m benchmarks.translation --data DIR --out translation.json --device cuda
python -m benchmarks.translation --data DIR --kinds softmax dpfp --seeds 1 --steps 400 --out quick.json

DIR holds train, val and test_2016_flickr, each as .de and .en, one sentence a line, plain or .gz. Every run is written
to --out as it ends; started again, the runs that are there are not made again. Needs sacrebleu.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from rebind.bench.machine import machine
from rebind.errors import InputError
from rebind.files import write_atomically
from rebind.nn import RebindForSeq2SeqLM, RebindSeq2SeqConfig
from rebind.nn.seq2seq_kinds import SEQ2SEQ_KINDS

SPECIAL = ("<pad>", "<s>", "</s>")
PAD, START, END = range(3)
SPLITS = ("train", "val", "test_2016_flickr")
LANGUAGES = ("de", "en")
ROUND = 8  # lengths of batches are multiples of this: few shapes, and what tensor cores take
CHECKS = 10  # times that the validation loss is taken in a run, the last one included

Pair = tuple[str, str]


@dataclass(frozen=True)
class Settings:
    """Everything but kind and seed that a result depends on."""

    steps: int = 1_600
    tokens: int = 16_384  # of a batch: source and target, padding included
    rate: float = 1e-3
    warmup: int = 200  # steps, then a cosine down to 0
    vocabulary: int = 8_000
    hidden: int = 256
    layers: int = 3  # of the encoder, and of the decoder
    heads: int = 4
    ff: int = 1_024
    dropout: float = 0.3
    smoothing: float = 0.1
    favor: int = 128  # m; with heads of 64 features 256 wide, as Schlag et al.'s smallest
    nu: int = 2  # ν; the same width
    beams: int = 5
    longest: int = 96  # tokens that a training sentence may have; longer pairs are left out

    def config(self, kind: str, vocabulary: int) -> RebindSeq2SeqConfig:
        return RebindSeq2SeqConfig(
            vocab_size=vocabulary, attention=kind, hidden_size=self.hidden, encoder_layers=self.layers,
            decoder_layers=self.layers, num_attention_heads=self.heads, intermediate_size=self.ff,
            dropout=self.dropout, label_smoothing=self.smoothing, favor_features=self.favor, dpfp_nu=self.nu,
            pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=START,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One model, trained and asked."""

    kind: str
    seed: int
    bleu: float
    valid_loss: float  # nats a token, no smoothing: of the checkpoint that was asked
    best_step: int  # where that checkpoint was taken
    train_seconds: float
    test_seconds: float
    parameters: int
    state: int  # numbers that the decoder keeps for a sentence of 16 tokens, after 16 tokens


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of pairs, padded, on the device; lengths on the host, where batches are planned."""

    source: Tensor  # [N, S]
    target: Tensor  # [N, T], its end token included
    lengths: Tensor  # [N, 2] on the CPU

    @classmethod
    def of(cls, tokenizer: Tokenizer, pairs: Sequence[Pair], device: torch.device, longest: int | None) -> Corpus:
        sides = [tokenizer.encode_batch_fast([pair[side] for pair in pairs]) for side in range(2)]
        ids = [([*one.ids, END], [*other.ids, END]) for one, other in zip(*sides, strict=True)]
        ids = [pair for pair in ids if longest is None or max(map(len, pair)) <= longest]
        if not ids:
            raise InputError(f"no pair has at most {longest} tokens a side, expected some: raise --longest")
        source, target = (_padded([pair[side] for pair in ids]).to(device) for side in range(2))
        return cls(source, target, torch.tensor([[len(one), len(other)] for one, other in ids]))

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, tokens: int, generator: torch.Generator | None = None) -> Iterator[dict[str, Tensor]]:
        """Pairs of like lengths together, `tokens` or fewer a batch; with a generator in random order and company.

        All that is sent to the device is the order of the rows, once: nothing waits for it.
        """
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        widths = _rounded(self.lengths)[order]
        order, widths = (x[torch.argsort(widths @ torch.tensor([1, 1_000]), stable=True)] for x in (order, widths))
        cuts = _cuts(widths.tolist(), tokens)
        spans = list(pairwise(cuts))
        if generator is not None:
            spans = [spans[place] for place in torch.randperm(len(spans), generator=generator).tolist()]
        rows = order.to(self.source.device)
        for begin, end in spans:
            wide, long = widths[begin:end].amax(0).tolist()
            source, target = self.source[rows[begin:end], :wide], self.target[rows[begin:end], :long]
            labels = target.masked_fill(target == PAD, -100)
            yield {"input_ids": source, "attention_mask": source != PAD, "labels": labels}


def _cuts(widths: list[list[int]], tokens: int) -> list[int]:
    """Where batches begin, and the end: each as many rows as fit when padded to the widest of them."""
    cuts, wide, long = [0], 0, 0
    for place, (source, target) in enumerate(widths):
        wide, long = max(wide, source), max(long, target)
        if (place + 1 - cuts[-1]) * (wide + long) > tokens and place > cuts[-1]:
            cuts.append(place)
            wide, long = source, target
    return [*cuts, len(widths)]


def _rounded(lengths: Tensor) -> Tensor:
    return (lengths + ROUND - 1) // ROUND * ROUND


def _padded(rows: list[list[int]]) -> Tensor:
    width = int(_rounded(torch.tensor(max(map(len, rows)))))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def read_pairs(folder: Path, split: str) -> list[Pair]:
    """The sentence pairs of a split, from SPLIT.de and SPLIT.en, plain or .gz; pairs with an empty side left out."""
    sides = [_lines(folder, f"{split}.{language}") for language in LANGUAGES]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{split} has {len(sides[0])} German and {len(sides[1])} English lines, expected as many: get the files "
            f"of one release"
        )
    return [(one, other) for one, other in zip(*sides, strict=True) if one and other]


def _lines(folder: Path, name: str) -> list[str]:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return [line.strip() for line in data.decode().rstrip("\n").split("\n")]
    raise InputError(
        f"{folder} has neither {name}.gz nor {name}, expected {', '.join(SPLITS)} as .de and .en: point --data at "
        f"Multi30k's raw files"
    )


def shared_tokenizer(pairs: Sequence[Pair], vocabulary: int, folder: Path) -> Tokenizer:
    """Byte-level BPE of both languages together, trained on these pairs or read from a file that was."""
    digest = hashlib.sha256(repr((vocabulary, list(pairs))).encode()).hexdigest()[:16]
    path = folder / f"tokenizer-{digest}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((side for pair in pairs for side in pair), trainer)
    write_atomically(path, tokenizer.to_str().encode())
    return tokenizer


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """sacreBLEU: cased, 13a tokens."""
    return float(import_module("sacrebleu").corpus_bleu(hypotheses, [references]).score)


def _require_sacrebleu() -> None:
    if find_spec("sacrebleu") is None:
        raise InputError("sacrebleu is not installed, expected it for the score: pip install sacrebleu")


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def valid_loss(model: RebindForSeq2SeqLM, corpus: Corpus, tokens: int) -> float:
    """Mean cross-entropy a target token."""
    model.train(False)
    device = corpus.source.device
    total = torch.zeros((), device=device, dtype=torch.float64)
    with _autocast(device):
        for batch in corpus.batches(tokens):
            total += model(**batch, num_items_in_batch=1).loss
    model.train()
    return float(total) / int(corpus.lengths[:, 1].sum())


def train(
    model: RebindForSeq2SeqLM,
    corpus: Corpus,
    valid: Corpus,
    settings: Settings,
    seed: int,
    told: Callable[[int, float | None], None],
) -> tuple[float, int]:
    """Train, and leave the model at its best checkpoint: that validation loss, and its step."""
    device = corpus.source.device
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, settings))
    checks = {max(1, round(settings.steps * part / CHECKS)) for part in range(1, CHECKS + 1)}
    best, best_step, kept = float("inf"), 0, {}
    model.train()
    for step, batch in enumerate(_forever(corpus, settings.tokens, seed), 1):
        with _autocast(device):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step in checks and (now := valid_loss(model, valid, settings.tokens)) < best:
            best, best_step = now, step
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        told(step, best if step in checks else None)
        if step == settings.steps:
            break
    if not kept:
        raise InputError("the validation loss was never a number, expected it to fall: lower --rate")
    model.load_state_dict(kept)
    return best, best_step


def _forever(corpus: Corpus, tokens: int, seed: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from corpus.batches(tokens, generator)


def _rate(step: int, settings: Settings) -> float:
    """Up in a line, down along a cosine; as a share of the highest."""
    warmup = min(settings.warmup, settings.steps // 4)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


@torch.no_grad()
def translate(model: RebindForSeq2SeqLM, tokenizer: Tokenizer, corpus: Corpus, beams: int) -> list[str]:
    """Every sentence of a corpus, all at once, by beam search in the weights' own dtype."""
    longest = min(2 * int(corpus.lengths[:, 0].max()) + 8, 128)
    made: Any = model.train(False)
    ids = made.generate(
        corpus.source,
        attention_mask=(corpus.source != PAD).long(),
        max_new_tokens=longest,
        num_beams=beams,
        do_sample=False,
        early_stopping=beams > 1,
    )
    return [text.strip() for text in tokenizer.decode_batch(ids.tolist(), skip_special_tokens=True)]


@dataclass(frozen=True, eq=False)
class Task:
    """The data as a run needs it."""

    tokenizer: Tokenizer
    train: Corpus
    valid: Corpus
    test: Corpus
    references: list[str]

    @classmethod
    def read(cls, folder: Path, settings: Settings, cache: Path, device: torch.device) -> Task:
        pairs = {split: read_pairs(folder, split) for split in SPLITS}
        tokenizer = shared_tokenizer(pairs["train"], settings.vocabulary, cache)
        train, valid, test = (
            Corpus.of(tokenizer, pairs[split], device, settings.longest if split == "train" else None)
            for split in SPLITS
        )
        return cls(tokenizer, train, valid, test, [reference for _, reference in pairs[SPLITS[2]]])


def _model(kind: str, task: Task, settings: Settings) -> RebindForSeq2SeqLM:
    made: Any = RebindForSeq2SeqLM(settings.config(kind, task.tokenizer.get_vocab_size()))
    return made.to(task.train.source.device)


def _warm(model: RebindForSeq2SeqLM, task: Task, settings: Settings) -> None:
    """One step of a model that is thrown away: kernels are compiled before the clock starts."""
    with _autocast(task.train.source.device):
        loss = model.train()(**next(task.train.batches(settings.tokens))).loss
    loss.backward()
    loss.item()


def run(
    kind: str, seed: int, task: Task, settings: Settings, told: Callable[[int, float | None], None] = lambda *_: None
) -> Run:
    """Train one kind from one seed, and translate the test set."""
    _warm(_model(kind, task, settings), task, settings)
    torch.manual_seed(seed)
    model = _model(kind, task, settings)
    begin = time.perf_counter()
    loss, step = train(model, task.train, task.valid, settings, seed, told)
    trained = time.perf_counter()
    score = bleu(translate(model, task.tokenizer, task.test, settings.beams), task.references)
    return Run(
        kind,
        seed,
        bleu=score,
        valid_loss=loss,
        best_step=step,
        train_seconds=trained - begin,
        test_seconds=time.perf_counter() - trained,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        state=model.state_size(16, 16),
    )


def kept_runs(out: Path, settings: Settings) -> list[Run]:
    """What --out holds already, if it was made with the same settings."""
    if not out.exists():
        return []
    held = json.loads(out.read_text())
    if held.get("settings") != asdict(settings):
        raise InputError(
            f"{out} holds runs of other settings, expected {asdict(settings)}: choose another --out, or remove it"
        )
    return [Run(**found) for found in held["runs"]]


def save(out: Path, settings: Settings, runs: list[Run]) -> None:
    content = {
        "title": "Multi30k, German to English, test_2016_flickr",
        "machine": machine("transformers", "tokenizers", "sacrebleu"),
        "settings": asdict(settings),
        "runs": [asdict(found) for found in runs],
    }
    write_atomically(out, (json.dumps(content, indent=2) + "\n").encode())


def table(runs: list[Run]) -> Table:
    """A row a kind: means, and how far the seeds lie apart."""
    made = Table(
        title="Multi30k, German to English, test_2016_flickr", title_justify="left",
        caption="mean (least to most) over seeds; state: numbers a decoder keeps of 16 + 16 tokens",
        caption_justify="left",
    )  # fmt: skip
    made.add_column("attention", no_wrap=True)
    for column in ("seeds", "BLEU", "validation loss", "train s", "test s", "parameters", "state"):
        made.add_column(column, justify="right", no_wrap=True)
    for kind in dict.fromkeys(found.kind for found in runs):
        mine = [found for found in runs if found.kind == kind]
        made.add_row(
            kind,
            str(len(mine)),
            _spread([found.bleu for found in mine], 1),
            _spread([found.valid_loss for found in mine], 3),
            f"{mean(found.train_seconds for found in mine):.1f}",
            f"{mean(found.test_seconds for found in mine):.1f}",
            f"{mine[0].parameters / 1e6:.1f}M",
            f"{mine[0].state:,}",
        )
    return made


def _spread(numbers: list[float], digits: int) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{mean(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with Multi30k's raw files")
    parser.add_argument("--kinds", nargs="+", choices=[*SEQ2SEQ_KINDS], default=[*SEQ2SEQ_KINDS])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind: seeds 0 to this less 1")
    parser.add_argument("--out", type=Path, required=True, help="JSON; the tokenizer is kept beside it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="%(default)s")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    args = parsed(arguments)
    _require_sacrebleu()
    settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    console = Console(width=130, highlight=False)
    runs = kept_runs(args.out, settings)
    done = {(found.kind, found.seed) for found in runs}
    waiting = [(kind, seed) for seed in range(args.seeds) for kind in args.kinds if (kind, seed) not in done]
    if waiting:
        task = Task.read(args.data, settings, args.out.resolve().parent, torch.device(args.device))
    for kind, seed in waiting:
        with _progress(console, f"{kind}, seed {seed}", settings.steps) as told:
            found = run(kind, seed, task, settings, told)
        runs.append(found)
        save(args.out, settings, runs)
        console.print(
            f"{kind}, seed {seed}: BLEU {found.bleu:.1f}, validation loss {found.valid_loss:.3f}, "
            f"{found.train_seconds:.1f} s and {found.test_seconds:.1f} s"
        )
    console.print(table(runs), f"written to {args.out}", sep="\n")


class _progress:  # noqa: N801
    """A bar for one run; what it gives takes the step, and the best validation loss where it was taken."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task(name, total=steps, loss="")

    def __enter__(self) -> Callable[[int, float | None], None]:
        self.bar.start()
        return self._told

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def _told(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self.bar.update(self.task, completed=step, loss=f"validation loss {loss:.3f}")
        elif step % 20 == 0:
            self.bar.update(self.task, completed=step)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as problem:
        sys.exit(f"error: {problem}")
