"""The parts of a run: its model, its optimizer, and each process's share of a batch."""

from __future__ import annotations

from typing import Any, cast

import torch

from rebind.errors import InputError
from rebind.nn.lm.model import RebindForCausalLM
from rebind.nn.training.config import TrainConfig
from rebind.nn.training.data import Corpus


def build_model(config: TrainConfig, corpus: Corpus, device: torch.device) -> RebindForCausalLM:
    tokenizer = corpus.tokenizer
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = config.model_config(len(tokenizer), **special)
    if made.vocab_size < len(tokenizer):
        raise InputError(
            f"the model has {made.vocab_size:,} tokens and the tokenizer {len(tokenizer):,}, expected as many or more: "
            f"leave vocab_size out, or train a smaller tokenizer"
        )
    model: Any = RebindForCausalLM(made)  # untyped: transformers wraps `to`
    return cast(RebindForCausalLM, model.to(device))


def build_optimizer(config: TrainConfig, model: RebindForCausalLM, *, fused: bool) -> torch.optim.AdamW:
    chosen = config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": chosen.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (chosen.beta1, chosen.beta2)
    return torch.optim.AdamW(groups, lr=chosen.rate, betas=betas, eps=chosen.eps, fused=fused or None)


def rows_a_piece(config: TrainConfig, count: int) -> int:
    if config.batch % (config.accumulate * count):
        raise InputError(
            f"batch is {config.batch}, expected a multiple of accumulate {config.accumulate} times {count} processes: "
            f"it counts the segments of all of them"
        )
    return config.batch // (config.accumulate * count)
