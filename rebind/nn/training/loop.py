"""The training loop, with evaluations and checkpoints.

Every number of a run is a function of its settings, its text and the step. A run that was killed therefore continues
from its last checkpoint as if nothing had happened: on a CPU, bit for bit.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import reduce  # type: ignore[import-untyped]
from safetensors.torch import load_model
from torch import Tensor

from rebind.errors import InputError, NumericalError
from rebind.memory.checks import usable_device
from rebind.nn.lm.cache import RebindCache
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training import checkpoint
from rebind.nn.training.config import CHANGEABLE, TrainConfig
from rebind.nn.training.data import SegmentBatches, TokenizedText, prepare_text
from rebind.nn.training.evaluate import carried_perplexity, sliding_perplexity
from rebind.nn.training.memory import require_memory, require_memory_for_batch
from rebind.nn.training.outputs import RESULT, RunOutputs, import_tensorboard
from rebind.nn.training.step import TrainingStep, build_optimizer, shard
from rebind.parallel import join_processes
from rebind.storage import Row, RunFolder, path_inside, read_sealed_json, remove_folder

CHECKPOINTS, TOKENS = "checkpoints", "tokens"


@dataclass(frozen=True)
class TrainingUpdate:
    """The progress of a run after a step."""

    step: int
    steps: int
    loss: float
    validation: float | None  # the latest loss on the validation text
    tokens_per_second: float


@dataclass(frozen=True)
class TrainingProgress:
    """Functions that a run calls: `step` when it has read losses, `phase` with the name of what it does from now on."""

    step: Callable[[TrainingUpdate], None] = lambda update: None
    phase: Callable[[str], None] = lambda name: None


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    folder: Path
    checkpoint: Path
    summary: dict[str, Any]
    resumed_from: int = field(default=0, compare=False)  # the last step if the run had been finished before


def train(
    config: TrainConfig, out: Path | str, *, cache: Path | None = None, progress: TrainingProgress | None = None
) -> TrainingResult:
    """Train into the folder `out`, or resume the run in it. Start several processes with `torchrun`.

    Args:
        config: The settings. A run is resumed with the same ones, apart from those in `config.CHANGEABLE`.
        out: A new folder, or that of a run. It gets config.json, log.jsonl, times.jsonl and checkpoints; at the end
            result.json and curve.png.
        cache: Where tokenized texts are stored. None: in `out`.
        progress: Functions to call on the way.
    """
    if config.tensorboard:
        import_tensorboard()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        run = _Run(config, Path(out), progress or TrainingProgress())
        stack.enter_context(torch.random.fork_rng([run.device] if run.device.type == "cuda" else []))
        with run.processes.main_process_first():
            newest = run.open_folder(stack)
        run.prepare(newest, cache or run.path / TOKENS)
        try:
            run.take_steps()
        except InputError as problem:  # a layer refuses its input; after the first step, only NaN and infinity are new
            if run.step == 0:
                raise
            run.read_losses()
            raise run.not_finite(f"After step {run.step}: {problem.problem}") from problem
        return run.finish()


class _Run:
    """A run in one of its processes. The main process alone has outputs."""

    outputs: RunOutputs | None = None
    validation: float | None = None

    def __init__(self, config: TrainConfig, path: Path, progress: TrainingProgress) -> None:
        self.config, self.path, self.progress = config, path, progress
        self.checkpoints = path_inside(path, f"{CHECKPOINTS}/step").parent  # no symbolic link
        self.processes, self.device = join_processes(usable_device(config.device))
        self.rank, self.count = self.processes.process_index, self.processes.num_processes
        self.is_sharded = config.sharded and self.count > 1  # a single process holds everything anyway
        self.unread: list[tuple[Tensor, Tensor]] = []  # losses and norms that a GPU may still be computing

    def open_folder(self, stack: ExitStack) -> Path | None:
        """Lock the folder, and return the checkpoint to resume from."""
        if self.rank == 0:
            settings, is_new = asdict(self.config), not checkpoint.list_checkpoints(self.checkpoints)
            folder = RunFolder.open(self.path, "training", settings, ignore=CHANGEABLE, overwrite=is_new)
            self.outputs = RunOutputs(stack.enter_context(folder))
            stack.callback(self.outputs.close)
            self._remove_old_checkpoints()  # that a process was killed before it removed
        return checkpoint.newest_checkpoint(self.checkpoints)

    def prepare(self, newest: Path | None, cache: Path) -> None:
        """Prepare the text, the model and the optimizer, and restore them from the newest checkpoint."""
        config, seed = self.config, self.config.seed
        self.progress.phase("tokenizing")
        with self.processes.main_process_first():
            self.text = prepare_text(config.data, cache)
        tokens, length, rows = self.text.train, config.length, config.batch_size
        self.batches = SegmentBatches(tokens, length, rows, seed=seed, lanes=config.carry)
        torch.manual_seed(seed)  # the same model in every process
        self.model = _build_model(config, self.text, torch.device("cpu") if self.is_sharded else self.device)
        require_memory_for_batch(config, self.model.config, self.device, self.count)
        self.caches = self._empty_caches()
        saved = None if newest is None else checkpoint.read(newest)
        if newest is not None and saved is not None:
            self._require_same(saved)
            load_model(self.model, newest / "model.safetensors")
            if saved.carried:
                checkpoint.restore_carried_state(self.caches, self.model, saved.carried, self.rank)
        if self.is_sharded:
            shard(self.model, self.count, self.device)
        self.optimizer = build_optimizer(config.optimizer, self.model)
        torch.manual_seed(seed + 1 + self.rank)  # other dropout in each process
        if saved is not None:
            checkpoint.restore_moments(self.model, self.optimizer, saved.optimizer)
            checkpoint.restore_random_state(saved.random, self.rank, self.device)
        self.training_step = TrainingStep(config, self.processes, self.model, self.optimizer)
        self.step = self.resumed_from = 0 if saved is None else saved.step
        if self.outputs is not None:
            self.outputs.resume(self.step, 0 if saved is None else saved.log_rows, tensorboard=config.tensorboard)
            self.validation = self.outputs.last("validation")

    def _empty_caches(self) -> list[RebindCache]:
        return [RebindCache(len(self.model.model.layers)) for _ in range(self.config.accumulate)]

    def _require_same(self, saved: checkpoint.Checkpoint) -> None:
        for name, value in (("text", self.text.digest), ("processes", self.count)):
            if value != (expected := getattr(saved, name)):
                raise InputError(
                    f"The {name} of the run in {self.path} changed from {expected} to {value}",
                    advice="Restore the text and the tokenizer, or the number of processes, or use another folder",
                    code=f"other_{name}",
                )

    def take_steps(self) -> None:
        """Train to the last step, and log, evaluate and save on the way."""
        config = self.config
        self.model.train()
        self.progress.phase("training")
        self.clock = time.perf_counter()
        while self.step < config.steps:
            batch = self.batches.batch(self.step)
            if batch.starts:
                self.caches = self._empty_caches()
            self.unread.append(self.training_step.run(self._learning_rate(self.step), batch, self.caches))
            self.step += 1
            is_last = self.step == config.steps
            evaluates = is_last or self.step % config.evaluate_every == 0
            saves = is_last or self.step % config.save_every == 0
            if evaluates or saves or len(self.unread) >= config.log_every:
                self.read_losses()
            if evaluates:
                self._evaluate()
            if saves:
                self._save()
            if evaluates or saves:
                self.progress.phase("training")
                self.clock = time.perf_counter()

    def _learning_rate(self, step: int) -> float:
        return self.config.optimizer.learning_rate_at(step, self.config.steps)

    def read_losses(self) -> None:
        """Log the steps since the last call. This is the only place where the host waits for a GPU."""
        if not self.unread:
            return
        losses = reduce(torch.stack([loss for loss, _ in self.unread])).tolist()  # the mean over all processes
        norms = torch.stack([norm for _, norm in self.unread]).tolist()
        self.unread = []
        rows: list[Row] = []
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=self.step - len(losses)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._log(rows)
                raise self.not_finite(f"The loss of step {step + 1} is {loss}, the norm of its gradient {norm}")
            rows.append({"step": step + 1, "loss": loss, "norm": norm, "learning_rate": self._learning_rate(step)})
        self._log(rows)
        seconds = time.perf_counter() - self.clock
        speed = len(losses) * self.config.batch_size * self.config.length / max(seconds, 1e-9)
        self._log([{"step": self.step, "seconds": seconds, "tokens_per_second": speed}], times=True)
        self.clock += seconds
        self.progress.step(TrainingUpdate(self.step, self.config.steps, losses[-1], self.validation, speed))

    def _log(self, rows: list[Row], *, times: bool = False) -> None:
        if self.outputs is not None:
            self.outputs.add(rows, times=times)

    def not_finite(self, problem: str) -> NumericalError:
        newest = checkpoint.newest_checkpoint(self.checkpoints)
        return NumericalError(
            f"{problem} (last good checkpoint: {newest or 'none yet'})",
            expected="finite numbers",
            advice="Train into another folder with a lower {learning_rate}, a longer {warmup} or {precision}",
            settings={"learning_rate": None, "warmup": None, "precision": "float32"},
            code="loss_not_finite",
        )

    def _evaluate(self) -> None:
        self.progress.phase("evaluating")
        tokens = self.text.validation[: self.config.evaluate_tokens]
        with self.training_step.autocast():
            measured = sliding_perplexity(self.model, tokens, self.config.length)
        if not math.isfinite(measured.loss):
            raise self.not_finite(f"After step {self.step} the validation loss is {measured.loss}")
        self.validation = measured.loss
        self._log([{"step": self.step, "validation": measured.loss, "tokens": measured.tokens}])

    def _save(self) -> None:
        """Write a checkpoint, and remove the oldest ones."""
        carried = checkpoint.carried_state(self.caches, self.device)
        random = checkpoint.random_state(self.device)
        weights, moments = checkpoint.whole_state(self.model, self.optimizer)
        if self.outputs is not None:
            self.progress.phase("saving")
            log_rows, digest = self.outputs.log_rows, self.text.digest
            saved = checkpoint.Checkpoint(self.step, log_rows, self.count, digest, moments, random, carried)
            path = self.outputs.folder.file(f"{CHECKPOINTS}/step-{self.step:08d}")
            checkpoint.save(path, saved, self.model, weights, self.text.tokenizer)
            self._remove_old_checkpoints()
        self.processes.wait_for_everyone()

    def _remove_old_checkpoints(self) -> None:
        for old in checkpoint.list_checkpoints(self.checkpoints)[: -self.config.keep_checkpoints]:
            remove_folder(old)

    def finish(self) -> TrainingResult:
        """Measure the finished model, unless that has been done."""
        is_done = read_sealed_json(self.path / RESULT) is not None
        self.processes.wait_for_everyone()  # until all have looked
        if not is_done and (self.rank == 0 or self.is_sharded):  # all processes run a sharded model together
            self.progress.phase("evaluating")
            summary = self._summary()
            if self.outputs is not None:
                kinds = ", ".join(f"{count} × {kind}" for kind, count in Counter(summary["layers"]).items())
                self.outputs.finish(summary, f"{kinds}; {summary['parameters']:,} parameters")
        self.processes.wait_for_everyone()
        summary = read_sealed_json(self.path / RESULT) or {}
        return TrainingResult(self.path, self.checkpoints / f"step-{self.step:08d}", summary, self.resumed_from)

    def _summary(self) -> dict[str, Any]:
        config, model = self.config, self.model
        tokens = self.text.validation[: config.evaluate_tokens]
        with self.training_step.autocast():
            measured = {"sliding": sliding_perplexity(model, tokens, config.length, stride=max(config.length // 2, 1))}
            if not model.grows:
                measured["carried"] = carried_perplexity(model, tokens, config.length)
        return {
            "steps": self.step,
            "tokens": self.step * config.batch_size * config.length,
            "epochs": self.step / self.batches.steps_per_epoch,
            "corpus_tokens": len(self.text.train),
            "vocabulary": model.config.vocab_size,
            "parameters": model.num_parameters(),
            "state": None if model.grows else model.state_size(),
            "layers": model.config.kinds,
            "loss": None if self.outputs is None else self.outputs.last("loss"),
            "validation": {name: asdict(perplexity) for name, perplexity in measured.items()},
        }


def _build_model(config: TrainConfig, text: TokenizedText, device: torch.device) -> RebindForCausalLM:
    vocabulary, end, padding = len(text.tokenizer), text.tokenizer.eos_token_id, text.tokenizer.pad_token_id
    model_config = config.model_config(vocabulary, eos_token_id=end, pad_token_id=padding)
    if model_config.vocab_size < vocabulary:
        problem = f"The model has {model_config.vocab_size:,} tokens and the tokenizer {vocabulary:,}"
        raise InputError(problem, advice="Leave out the model's field vocab_size", code="vocabulary_too_small")
    require_memory(model_config, device)
    model: Any = RebindForCausalLM(model_config)  # untyped, since transformers wraps `to`
    if config.carry and model.grows:
        raise InputError(
            "The state of attention grows with every token and cannot be carried through a text",
            advice="Leave out {carry}, or choose other {layers}",
            settings={"carry": True, "layers": None},
            code="growing_state",
        )
    return cast(RebindForCausalLM, model.to(device))
