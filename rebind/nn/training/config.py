"""What a run is: frozen, nested, and written beside its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rebind.errors import InputError
from rebind.memory.checks import unknown_name
from rebind.nn.lm.config import RebindConfig
from rebind.nn.lm.presets import preset

PRECISIONS = ("auto", "float32", "bfloat16")
MAY_CHANGE = {  # between a start and a resumption: numbers are the same but for rounding, and a recording's dropout
    "evaluate_every",
    "save_every",
    "keep",
    "log_every",
    "device",
    "record",
    "sharded",
    "tensorboard",
}


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
        source: A UTF-8 text file, or "hf:name" or "hf:name:split" of the Hub.
        tokenizer: "bpe" (byte-level) or "characters", trained on the source; or a folder or Hub id.
        vocabulary: Most tokens that a trained BPE has.
        validation: Where perplexity is measured, a source too. None: the last `held` of the tokens, not trained on.
        held: How much that is.
    """

    source: str
    tokenizer: str = "bpe"
    vocabulary: int = 8_000
    validation: str | None = None
    held: float = 0.05

    def __post_init__(self) -> None:
        if self.vocabulary < 257:
            raise InputError(
                f"vocabulary is {self.vocabulary}, expected 257 or more (256 bytes and an end): give more, or take "
                f"the tokenizer 'characters'"
            )
        if not 0 < self.held < 1:
            raise InputError(f"held is {self.held}, expected a share between 0 and 1 of the tokens: 0.05 is usual")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the rate climbs for `warmup` steps and falls along a cosine to `final` of itself at the last step."""

    rate: float = 1e-3
    final: float = 0.1
    warmup: int = 100
    weight_decay: float = 0.1  # of matrices; vectors have none
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # largest norm of all gradients together

    def __post_init__(self) -> None:
        for name in ("rate", "eps", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}, expected a positive number: correct it")
        for name in ("final", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected a number from 0 to 1: correct it")
        if self.warmup < 0 or self.weight_decay < 0:
            raise InputError(
                f"warmup is {self.warmup} and weight_decay {self.weight_decay}, expected 0 or more: 0 turns them off"
            )

    def rate_at(self, step: int, steps: int) -> float:
        """The rate of step 0, 1, … of `steps`.

        >>> [round(OptimizerConfig(rate=1.0, warmup=2, final=0.0).rate_at(step, 6), 2) for step in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
        """
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        way = (step - self.warmup) / max(steps - self.warmup, 1)
        return self.rate * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * way)))


@dataclass(frozen=True)
class TrainConfig:
    """A whole run. What `MAY_CHANGE` names decides none of its numbers; all else does.

    Attributes:
        data: Where tokens come from.
        preset: The model, by its name in `rebind.nn.lm.presets`.
        layers: The kind of its layers, or a pattern of kinds. None: the preset's.
        model: Other fields of its RebindConfig.
        length: Tokens a segment.
        batch: Segments a step, over all processes and all of `accumulate`.
        accumulate: Pieces that a batch is computed in, one after the other.
        carry: Whether memories go on from one segment to the next, with the gradient cut between.
        evaluate_tokens: Most held tokens that are read at an evaluation.
        precision: "float32", "bfloat16" (autocast; weights stay in float32), or "auto": bfloat16 on a GPU.
        keep: Checkpoints that are kept.
        record: Whether steps run as one CUDA graph. None: where they can and there is memory, up to 400 million
            parameters.
        sharded: Whether several processes share the weights and moments (FSDP2), or each has all of them (DDP).
        tensorboard: Whether the log is also written for TensorBoard.
    """

    data: DataConfig
    preset: str = "modern-10m"
    layers: str | tuple[str, ...] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    length: int = 256
    batch: int = 16
    accumulate: int = 1
    steps: int = 1_000
    carry: bool = False
    seed: int = 0
    evaluate_every: int = 250
    evaluate_tokens: int = 100_000
    save_every: int = 250
    keep: int = 2
    log_every: int = 10
    precision: str = "auto"
    compile: bool = False
    record: bool | None = None
    device: str = "cpu"
    sharded: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        counts = ("length", "batch", "accumulate", "steps", "evaluate_every", "evaluate_tokens", "save_every", "keep")
        for name in (*counts, "log_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number of 1 or more: correct it")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed!r}, expected a whole number of 0 or more, below 2⁶³: choose another")
        if self.evaluate_tokens == 1:
            raise InputError("evaluate_tokens is 1, expected 2 or more, of which the second is predicted: give more")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        if self.batch % self.accumulate:
            raise InputError(
                f"batch is {self.batch} and accumulate {self.accumulate}, expected a multiple: choose pieces that "
                f"divide the batch"
            )
        if self.record:
            self.require_recordable()
        known = {one.name for one in fields(RebindConfig) if not one.name.startswith("_")}
        for name in self.model:
            if name not in known:
                raise unknown_name("field of the model", name, RebindConfig.__annotations__)  # not transformers' own
        if self.layers is not None and "layer_kinds" in self.model:
            raise InputError(
                f"layers is {self.layers!r} and layer_kinds {self.model['layer_kinds']!r}, expected one of them: leave "
                f"layer_kinds out"
            )
        self.model_config(self.model.get("vocab_size", 1_000))  # a bad shape says so before the corpus is read

    def require_recordable(self, processes: int = 1) -> None:
        if not self.device.startswith("cuda"):
            raise InputError(f"record is on and the device is {self.device!r}, expected a GPU: leave it out")
        for name in ("carry", "compile", "sharded"):
            if getattr(self, name):
                raise InputError(f"record and {name} are on, expected one of them: leave the other out")
        if self.accumulate > 1:
            raise InputError(f"record is on and accumulate {self.accumulate}, expected 1: leave one of them out")
        if processes > 1:
            raise InputError(f"record is on and there are {processes} processes, expected one: leave it out")

    def recordable(self, processes: int) -> bool:
        try:
            self.require_recordable(processes)
        except InputError:
            return False
        return True

    def model_config(self, vocabulary: int, **special: Any) -> RebindConfig:
        """The model's config for a tokenizer of so many tokens."""
        kinds = list(self.layers) if isinstance(self.layers, tuple) else self.layers
        return preset(self.preset, kinds, **{"vocab_size": vocabulary, **special, **self.model})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers) if isinstance(self.layers, tuple) else self.layers}


def differences(begun: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What decides the numbers and is not the same: by its name, what it was and what it is."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*begun, *now} - (MAY_CHANGE if not prefix else set())):
        old, new = begun.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found[f"{prefix}{name}"] = (old, new)
    return found
