"""Configs with a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rebind.memory.checks import unknown_name
from rebind.nn.lm.config import RebindConfig

ConfigValue = str | int | float | list[str] | None


def _schlag(width: int) -> dict[str, ConfigValue]:
    """Schlag et al., section 6.3 and appendix F, with m and ν of appendix D.3 and the vocabulary of WikiText-103."""
    return {
        "vocab_size": 267_735,
        "hidden_size": width,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 2_048,
        "layer_kinds": "linear-delta",
        "mlp": "relu",
        "dropout": 0.1,
        "favor_features": 16,
        "dpfp_nu": 1,
    }


def _modern(width: int, depth: int, heads: int, hidden: int, vocabulary: int) -> dict[str, ConfigValue]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "layer_kinds": "gated_delta",
    }


PRESETS: dict[str, Mapping[str, ConfigValue]] = {
    "schlag-small": _schlag(128),  # trained on 256 tokens; 40M parameters in the paper
    "schlag-medium": _schlag(256),  # trained on 384 tokens; 90M parameters in the paper
    "modern-10m": _modern(256, 8, 4, 704, 16_000),
    "modern-60m": _modern(512, 12, 8, 1_408, 32_000),
    "modern-350m": _modern(1_024, 24, 8, 2_816, 32_000),
}


def preset(name: str, kind: str | list[str] | None = None, **fields: ConfigValue) -> RebindConfig:
    """Return the config of that name, with layers of that kind (or list of kinds) and with other fields changed.

    For example `preset("schlag-small", "dpfp-delta", vocab_size=8_000)`.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    values: dict[str, Any] = {**PRESETS[name], **({} if kind is None else {"layer_kinds": kind}), **fields}
    return RebindConfig(**values)
