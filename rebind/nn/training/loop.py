"""The training loop: a function of its config, the corpus and the step, so that it can stop and go on anywhere."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rebind.errors import InputError, NumericalError
from rebind.files import write_atomically
from rebind.nn.lm.cache import RebindCache
from rebind.nn.training import carry, checkpoint, sharding
from rebind.nn.training.board import Board, require_tensorboard
from rebind.nn.training.build import build_model, build_optimizer, rows_a_piece
from rebind.nn.training.config import TrainConfig
from rebind.nn.training.data import Corpus, Segments, prepare
from rebind.nn.training.evaluate import Perplexity, carried, sliding
from rebind.nn.training.figure import draw_curve
from rebind.nn.training.folder import CONFIG, TOKENS, require_new_or_run, require_same
from rebind.nn.training.log import Log, Row
from rebind.nn.training.processes import Processes, alone, processes
from rebind.nn.training.updates import Updates

CHECKPOINTS, LOG, TIMES, RESULT, CURVE, BOARD = (
    "checkpoints",
    "log.jsonl",
    "times.jsonl",
    "result.json",
    "curve.png",
    "tensorboard",
)


@dataclass(frozen=True)
class Update:
    """How far a run is."""

    step: int
    steps: int
    loss: float
    validation: float | None
    tokens_a_second: float


@dataclass(frozen=True)
class Progress:
    """Whom a run tells. `step` is called where losses are read, `phase` when something else than steps begins."""

    step: Callable[[Update], None] = lambda update: None
    phase: Callable[[str], None] = lambda name: None


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    checkpoint: Path
    summary: dict[str, Any]
    began: int = field(default=0, compare=False)  # steps done before: all, if it was finished already


def train(
    config: TrainConfig, out: Path | str, *, cache: Path | None = None, progress: Progress | None = None
) -> Result:
    """Train into the folder `out`, or go on with what is there. Several processes: start with `torchrun`.

    Args:
        config: The run. A folder that has a checkpoint takes only the config it was begun with, but for what
            `rebind.nn.training.config.MAY_CHANGE` names.
        out: New, or a run's. Gets config.json, log.jsonl, times.jsonl, checkpoints; at the end result.json, curve.png.
        cache: Where tokens are kept. None: in `out`.
        progress: Whom to tell.
    """
    folder, told = Path(out), progress or Progress()
    require_new_or_run(folder)
    if config.tensorboard:
        require_tensorboard()
    with processes(config.device) as group, alone(folder, group), _own_random(group), sharding.quiet():
        if group.first:
            checkpoint.tidy(folder / CHECKPOINTS)
        found = group.after_the_first(lambda: checkpoint.latest(folder / CHECKPOINTS))
        if found is not None:
            require_same(folder, config, found.place.step)
        told.phase("tokens")
        corpus = group.after_the_first(lambda: prepare(config.data, cache or folder / TOKENS))
        run = Run(config, folder, group, corpus, found, told)
        try:
            run.go()
            return run.finish()
        finally:
            run.close()


class Run:
    """A model, its optimizer and its place in the data."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        group: Processes,
        corpus: Corpus,
        found: checkpoint.Checkpoint | None,
        told: Progress,
    ) -> None:
        self.config, self.folder, self.group, self.corpus, self.told = config, folder, group, corpus, told
        self.sharded = config.sharded and group.count > 1  # one process holds all of it anyway
        self.log, self.times = Log(folder / LOG), Log(folder / TIMES)
        self.segments = Segments(corpus.train, config.length, config.batch, seed=config.seed, lanes=config.carry)
        self.rows = rows_a_piece(config, group.count)
        if config.record:
            config.require_recordable(group.count)
        if len(corpus.held) < 2:
            raise InputError(f"{len(corpus.held)} tokens are held, expected 2 or more: give more text to measure on")
        torch.manual_seed(config.seed)  # the same model in every process
        self.model = build_model(config, corpus, torch.device("cpu") if self.sharded else group.device)
        if config.carry and self.model.grows:
            raise InputError("carry is on and attention's memory grows without end: train it without, or other layers")
        self.step, self.saved = 0, found.folder if found else None
        self.began = found.place.step if found else 0
        if found is not None:
            self._require_place(found)
            found.fill(self.model)
        self.caches = self._caches(found)
        if self.sharded:
            sharding.shard(self.model, group)
        self.optimizer = build_optimizer(config, self.model, fused=group.device.type == "cuda")
        torch.manual_seed(config.seed + 1 + group.rank)  # other dropout in each
        if found is not None:
            self._go_on(found)
        else:
            self._begin()
        self.board = Board(folder / BOARD, self.step) if config.tensorboard and group.first else None
        self.updates = Updates(config, group, self.model, self.optimizer, self.rows)
        self.waiting: list[tuple[Tensor, Tensor]] = []  # losses and norms that nobody has looked at
        self.loss, self.validation = math.nan, _last_validation(self.log)
        self._clock = time.perf_counter()

    # Beginning and going on

    def _begin(self) -> None:
        if self.group.first:
            self.log.cut(0)
            self.times.cut(0)
            for stale in (RESULT, CURVE):
                (self.folder / stale).unlink(missing_ok=True)
            text = json.dumps(self.config.to_json(), indent=1) + "\n"
            write_atomically(self.folder / CONFIG, text.encode())
        self.group.wait()

    def _go_on(self, found: checkpoint.Checkpoint) -> None:
        place = found.place
        moments = checkpoint.moments_by_name(self.optimizer, self.model, found.tensors.optimizer)
        restore = sharding.split_moments if self.sharded else checkpoint.restore_optimizer
        restore(self.optimizer, self.model, moments)
        torch.set_rng_state(found.tensors.random["cpu"][self.group.rank].clone())  # a view of it crashes torch
        if self.group.device.type == "cuda" and "cuda" in found.tensors.random:
            torch.cuda.set_rng_state(found.tensors.random["cuda"][self.group.rank].clone(), self.group.device)
        self.step = place.step
        if self.group.first:
            self.log.cut(place.log_bytes)
        self.group.wait()

    def _caches(self, found: checkpoint.Checkpoint | None) -> list[RebindCache]:
        """The memories of each piece of a batch: empty ones, or as a checkpoint has them."""
        mine, seen = {}, 0
        if found is not None and self.config.carry:
            mine = {name: stacked[self.group.rank] for name, stacked in found.tensors.carried.items()}
            lane = self.segments.count // self.config.batch
            seen = (found.place.step % lane) * self.config.length
        return carry.filled(self.model, self.config.accumulate, self.rows, mine, seen, self.group.device)

    def _require_place(self, found: checkpoint.Checkpoint) -> None:
        place = found.place
        if place.tokenizer != self.corpus.tokenizer_digest:
            raise InputError(
                f"the tokenizer is not the one of checkpoint {found.folder} ({self.corpus.tokenizer_digest}, expected "
                f"{place.tokenizer}): its ids would mean other words; restore the tokenizer or the corpus, or train "
                f"into another folder"
            )
        if place.corpus != self.corpus.digest:
            raise InputError(
                f"the corpus is not the one of checkpoint {found.folder} ({self.corpus.digest}, expected "
                f"{place.corpus}): restore the text, or train into another folder"
            )
        if place.processes != self.group.count:
            raise InputError(
                f"{self.group.count} processes, and checkpoint {found.folder} was written by {place.processes}: start "
                f"as many, or train into another folder"
            )

    # Steps

    def go(self) -> None:
        """Train to the last step, logging, evaluating and saving on the way."""
        config = self.config
        self.model.train()
        self.told.phase("steps")
        while self.step < config.steps:
            with self._trusted():
                self.waiting.append(self._step(self.step))
            self.step += 1
            last = self.step == config.steps
            evaluates = last or self.step % config.evaluate_every == 0
            saves = last or self.step % config.save_every == 0
            if evaluates or saves or len(self.waiting) >= config.log_every:
                self._read_losses()
            if evaluates:
                self._evaluate()
            if saves:
                self._save()

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        """One update; the loss before it and the norm of its gradients, not looked at."""
        batch = self.segments.batch(step)
        if batch.begins:
            self.caches = self._caches(None)
        return self.updates.make(self.config.optimizer.rate_at(step, self.config.steps), batch, self.caches)

    def _read_losses(self) -> None:
        """Log the steps since the last time. A GPU waits here, and nowhere else."""
        losses = self.group.mean(torch.stack([loss for loss, _ in self.waiting])).tolist()
        norms = torch.stack([norm for _, norm in self.waiting]).tolist()
        first = self.step - len(losses)
        rows: list[Row] = []
        self.waiting = []
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=first):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._write(rows)
                raise self._broken(f"at step {step + 1} the loss is {loss} and the norm of its gradients {norm}")
            rate = self.config.optimizer.rate_at(step, self.config.steps)
            rows.append({"step": step + 1, "loss": loss, "norm": norm, "rate": rate})
        self._write(rows)
        self.loss = losses[-1]
        now = time.perf_counter()
        speed = len(losses) * self.config.batch * self.config.length / max(now - self._clock, 1e-9)
        if self.group.first:
            row = {"step": self.step, "seconds": now - self._clock, "tokens_a_second": speed}
            self.times.append([row])
            self._draw([row])
        self._clock = now
        self.told.step(Update(self.step, self.config.steps, self.loss, self.validation, speed))

    def _write(self, rows: list[Row]) -> None:
        if self.group.first:
            self.log.append(rows)
            self._draw(rows)

    def _draw(self, rows: list[Row]) -> None:
        if self.board is not None:
            self.board.append(rows)

    @contextmanager
    def _trusted(self) -> Iterator[None]:
        """Layers refuse what is not finite. Where the same shapes went through before, that is what they refuse."""
        try:
            yield
        except InputError as problem:
            if self.step == 0:
                raise
            raise self._broken(f"after step {self.step} a layer refuses its input ({problem})") from problem

    def _broken(self, what: str) -> NumericalError:
        kept = "no checkpoint was written yet" if self.saved is None else f"the last good checkpoint is {self.saved}"
        return NumericalError(
            f"{what}, expected finite numbers: train into another folder with a lower rate, more warm-up or float32; "
            f"{kept}"
        )

    def _evaluate(self) -> None:
        self.told.phase("evaluating")
        with self.updates.autocast(), self._trusted():
            held = sliding(self.model, self.corpus.held[: self.config.evaluate_tokens], self.config.length)
        if not math.isfinite(held.loss):
            raise self._broken(f"after step {self.step} the loss of held text is {held.loss}")
        self.validation = held.loss
        self._write([{"step": self.step, "validation": held.loss, "tokens": held.tokens}])
        self.told.phase("steps")
        self._clock = time.perf_counter()

    # Saving

    def _save(self) -> None:
        group = self.group
        random = {"cpu": group.gathered(torch.get_rng_state())}
        if group.device.type == "cuda":
            random["cuda"] = group.gathered(torch.cuda.get_rng_state(group.device))
        kept = {name: group.gathered(tensor) for name, tensor in carry.flattened(self.caches)}
        parts = self._whole() if self.sharded or group.first else ({}, {})
        if group.first:
            self.told.phase("saving")
            place = checkpoint.Place(
                step=self.step,
                segments=self.step * self.config.batch,
                rate=self.config.optimizer.rate_at(self.step - 1, self.config.steps),
                log_bytes=self.log.size,
                processes=group.count,
                corpus=self.corpus.digest,
                tokenizer=self.corpus.tokenizer_digest,
            )
            tensors = checkpoint.Tensors(*parts, _present(random), _present(kept))
            folder, keep = self.folder / CHECKPOINTS, self.config.keep
            self.saved = checkpoint.save(folder, self.model, self.corpus.tokenizer, place, tensors, keep=keep)
            if self.board is not None:
                self.board.flush()
            self.told.phase("steps")
        group.wait()
        self._clock = time.perf_counter()

    def _whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All weights and all of AdamW's moments, in the first process."""
        if self.sharded:
            return sharding.whole_weights(self.model), sharding.whole_moments(self.optimizer, self.model)
        return self.model.state_dict(), checkpoint.optimizer_tensors(self.optimizer, self.model)

    def close(self) -> None:
        if self.board is not None:
            self.board.close()

    def finish(self) -> Result:
        """Measure the model, draw the curve, and say what came of it."""
        path = self.folder / CHECKPOINTS / f"step-{self.step:08d}"
        missing = self.group.as_the_first(not (self.folder / RESULT).exists())
        summary = None
        if missing and (self.group.first or self.sharded):  # a model that is split runs in all processes, or in none
            self.told.phase("evaluating")
            summary = self._summary()
        if summary is not None and self.group.first:
            text = json.dumps(summary, indent=1) + "\n"
            title = f"{self.config.preset}, {', '.join(dict.fromkeys(self.model.config.kinds))}"
            draw_curve(self.folder / CURVE, self.log.rows(), title)
            write_atomically(self.folder / RESULT, text.encode())
        self.group.wait()
        summary = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        return Result(self.folder, path, summary, self.began)

    def _summary(self) -> dict[str, Any]:
        config, held = self.config, self.corpus.held[: self.config.evaluate_tokens]
        measured: dict[str, Perplexity] = {}
        with self.updates.autocast():
            measured["sliding"] = sliding(self.model, held, config.length, stride=max(config.length // 2, 1))
            if not self.model.grows:
                measured["carried"] = carried(self.model, held, config.length)
        rows = [row for row in self.log.rows() if "loss" in row]
        return {
            "steps": self.step,
            "tokens": self.step * config.batch * config.length,
            "epochs": self.step / self.segments.steps_an_epoch,
            "corpus_tokens": len(self.corpus.train),
            "vocabulary": self.model.config.vocab_size,
            "parameters": self.model.num_parameters(),
            "state": None if self.model.grows else self.model.state_size(),
            "layers": self.model.config.kinds,
            "loss": rows[-1]["loss"],
            "validation": {name: one.to_json() for name, one in measured.items()},
        }


def _own_random(group: Processes) -> AbstractContextManager[None]:
    """Seeds of a run are not those of whoever calls it."""
    return torch.random.fork_rng(devices=[group.device] if group.device.type == "cuda" else [])


def _last_validation(log: Log) -> float | None:
    return next((row["validation"] for row in reversed(log.rows()) if "validation" in row), None)


def _present(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
