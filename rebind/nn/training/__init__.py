"""Training language models: text in, checkpoints that hold everything out. It needs transformers.

from rebind.nn.training import DataConfig, TrainConfig, train

result = train(TrainConfig(DataConfig("corpus.txt"), preset="modern-10m", layers="delta", steps=500), "runs/x")
"""

from rebind.nn.training.config import DataConfig, OptimizerConfig, TrainConfig
from rebind.nn.training.evaluate import Perplexity, by_position, carried, sliding
from rebind.nn.training.loop import Progress, Result, train

__all__ = [
    "DataConfig",
    "OptimizerConfig",
    "Perplexity",
    "Progress",
    "Result",
    "TrainConfig",
    "by_position",
    "carried",
    "sliding",
    "train",
]
