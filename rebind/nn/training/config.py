"""The settings of a training run. They are stored in the folder of the run, and a resumed run must have the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rebind.errors import InputError
from rebind.limits import MAX_SEED, MAX_VOCABULARY
from rebind.memory.checks import require_number, unknown_name
from rebind.nn.lm.config import RebindConfig, preset
from rebind.nn.parts.checks import require_positive

PRECISIONS = ("auto", "float32", "bfloat16")
LARGEST_RECORDED = 400_000_000  # parameters; larger models were not measured to be faster as a CUDA graph
CHANGEABLE = {  # when a run is resumed: these settings change its numbers by no more than rounding
    "evaluate_every",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "device",
    "record",
    "sharded",
    "context_parallel",
    "tensorboard",
}


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from. A source is a UTF-8 text file, or "hf:name:split" for a dataset of the Hub."""

    source: str
    tokenizer: str = "bpe"  # "bpe" (byte-level) or "characters", trained on the source; or a folder or Hub id
    vocabulary: int = 8_000  # largest vocabulary of a trained BPE tokenizer
    validation: str | None = None  # source to measure perplexity on; None: the end of `source`, not trained on
    validation_fraction: float = 0.05  # of the tokens of `source`, held out for validation if there is no other source

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer"):
            _require(self, name, isinstance(getattr(self, name), str), "a text")
        require_number(
            "vocabulary", self.vocabulary, least=257, most=MAX_VOCABULARY, whole=True, code="invalid_vocabulary"
        )
        fraction = self.validation_fraction
        require_number("validation_fraction", fraction, above=0.0, most=1.0, code="invalid_validation_fraction")
        _require(self, "validation_fraction", fraction < 1, "a number between 0 and 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a learning rate that climbs for `warmup` steps and then falls along a cosine to the last step."""

    learning_rate: float = 1e-3
    final_fraction: float = 0.1  # of the learning rate, at the last step
    warmup: int = 100
    weight_decay: float = 0.1  # of matrices; vectors have none
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # largest norm of the gradient

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            require_number(name, getattr(self, name), above=0.0, code=f"invalid_{name}")
        for name in ("final_fraction", "beta1", "beta2"):
            require_number(name, getattr(self, name), most=1.0, code=f"invalid_{name}")
        require_number("warmup", self.warmup, whole=True, code="invalid_warmup")
        require_number("weight_decay", self.weight_decay, code="invalid_weight_decay")

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step 0, 1, … of `steps`.

        >>> config = OptimizerConfig(learning_rate=1.0, warmup=2, final_fraction=0.0)
        >>> [round(config.learning_rate_at(step, 6), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(steps - self.warmup, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    data: DataConfig
    preset: str = "modern-10m"  # the model, by its name in `rebind.nn.PRESETS`
    layers: str | tuple[str, ...] | None = None  # kind of every layer, or a pattern of kinds; None: the preset's
    model: Mapping[str, Any] = field(default_factory=dict)  # other fields of the model's RebindConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    length: int = 256  # tokens per segment
    batch_size: int = 16  # segments per step, over all processes and pieces
    accumulate: int = 1  # number of pieces that a batch is computed in, one after the other
    steps: int = 1_000
    carry: bool = False  # whether states continue from each segment to the next, detached in between
    seed: int = 0
    evaluate_every: int = 250
    evaluate_tokens: int = 100_000  # largest number of validation tokens for one evaluation
    save_every: int = 250
    keep_checkpoints: int = 2
    log_every: int = 10
    precision: str = "auto"  # "float32", "bfloat16" (autocast; weights stay in float32), "auto": bfloat16 on a GPU
    compile: bool = False  # whether the model runs through torch.compile
    record: bool | None = None  # whether steps are recorded as a CUDA graph; None: if that is possible and faster
    device: str = "cpu"
    sharded: bool = False  # whether processes share the weights and moments (FSDP2) instead of holding copies (DDP)
    context_parallel: int = 1  # processes that share each sequence, every one of them with a segment of it
    tensorboard: bool = False  # whether the log is also written for TensorBoard

    def __post_init__(self) -> None:
        for name in ("preset", "precision", "device"):
            _require(self, name, isinstance(getattr(self, name), str), "a text")
        counts = ("length", "batch_size", "accumulate", "steps", "evaluate_every", "save_every", "keep_checkpoints")
        require_positive(**{name: getattr(self, name) for name in (*counts, "log_every", "evaluate_tokens")})
        _require(self, "evaluate_tokens", self.evaluate_tokens > 1, "2 or more")
        require_number("seed", self.seed, most=MAX_SEED, whole=True, code="invalid_seed")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        for name in self.model:
            if name not in RebindConfig.__annotations__:
                raise unknown_name("model field", name, RebindConfig.__annotations__)
        is_single = self.layers is None or "layer_kinds" not in self.model
        _require(self, "layers", is_single, "nothing beside the model's field layer_kinds")
        self._check_context_parallel()
        self.rows_per_piece()
        self.should_record()
        self.model_config(self.model.get("vocab_size", 1_000))  # refuses a wrong shape before the text is read

    def _check_context_parallel(self) -> None:
        """Check that every process gets an equal part of a sequence, without what needs all of it in one."""
        require_positive(context_parallel=self.context_parallel)
        is_possible = self.context_parallel == 1 or not (self.carry or self.compile)
        _require(self, "context_parallel", is_possible, "1 with carry or compile")
        divides = self.length % self.context_parallel == 0
        _require(self, "context_parallel", divides, f"a divisor of the length, {self.length}")

    def sequences_at_once(self, processes: int) -> int:
        """Return how many processes, or groups of processes that share a sequence, there are."""
        if processes % self.context_parallel:
            raise InputError(
                f"{self.context_parallel} processes share each sequence, and there are {processes}",
                expected=f"a multiple of {self.context_parallel}",
                advice="Start them with torchrun --nproc-per-node",
                code="indivisible_processes",
            )
        return processes // self.context_parallel

    def rows_per_piece(self, processes: int = 1) -> int:
        """Return the number of segments that each process computes at once, where so many each have their own."""
        if self.batch_size % (self.accumulate * processes):
            expected = f"a multiple of {self.accumulate} pieces times {processes} processes"
            raise InputError(f"The batch size is {self.batch_size}", expected=expected, code="indivisible_batch")
        return self.batch_size // (self.accumulate * processes)

    def should_record(self, processes: int = 1, parameters: int = 0) -> bool:
        """Return whether steps are recorded as a CUDA graph: as configured, else if that is possible and faster."""
        is_plain = not (self.carry or self.compile or self.sharded or self.accumulate > 1)
        is_possible = is_plain and processes == 1 and self.device.startswith("cuda")
        if self.record and not is_possible:
            expected = "one process on a GPU, without carry, compile, sharded and accumulate"
            raise InputError("Steps cannot be recorded as a CUDA graph", expected=expected, code="not_recordable")
        return is_possible and (parameters <= LARGEST_RECORDED if self.record is None else self.record)

    def model_config(self, vocabulary: int, **special_tokens: int | None) -> RebindConfig:
        """Return the config of the model for a tokenizer with `vocabulary` tokens."""
        kinds = list(self.layers) if isinstance(self.layers, tuple) else self.layers
        return preset(self.preset, kinds, **{"vocab_size": vocabulary, **special_tokens, **self.model})


def _require(config: object, name: str, is_valid: bool, expected: str) -> None:
    """Refuse an invalid setting, with "invalid_" and its name as the code."""
    if not is_valid:
        raise InputError(f"Setting {name!r} is {getattr(config, name)!r}", expected=expected, code=f"invalid_{name}")
