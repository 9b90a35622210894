"""Train language models on text. Runs can be interrupted at any time, and resume exactly.

    from rebind.nn.training import DataConfig, TrainConfig, train

    result = train(TrainConfig(DataConfig("corpus.txt"), layers="delta", steps=500), "runs/delta")

- `config`: the settings of a run
- `data`: from text to tokens, and from tokens to batches
- `step`: loss, gradient and update in one process or several, recorded as a CUDA graph where that is faster
- `loop`: the run, from the first step to the last
- `checkpoint`, `outputs`: what it writes
- `evaluate`: perplexity
"""

from __future__ import annotations

from rebind.nn.training.config import DataConfig, OptimizerConfig, TrainConfig
from rebind.nn.training.evaluate import Perplexity, carried_perplexity, sliding_perplexity
from rebind.nn.training.loop import TrainingProgress, TrainingResult, TrainingUpdate, train

__all__ = [
    "DataConfig",
    "OptimizerConfig",
    "Perplexity",
    "TrainConfig",
    "TrainingProgress",
    "TrainingResult",
    "TrainingUpdate",
    "carried_perplexity",
    "sliding_perplexity",
    "train",
]
