"""Configs that have a name. A preset is a function of the layer kind that returns a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rebind.memory.checks import unknown_name
from rebind.nn.lm.config import RebindConfig

WIKITEXT_103 = 267_735  # words in its vocabulary

Kinds = str | list[str]
Preset = Callable[..., RebindConfig]


def schlag_small(kind: Kinds = "linear-delta", **changes: Any) -> RebindConfig:
    """Schlag et al.'s small setting: D = 128, trained on 256 tokens, heads of 16. Their 40M."""
    return _schlag(kind, 128, **changes)


def schlag_medium(kind: Kinds = "linear-delta", **changes: Any) -> RebindConfig:
    """Schlag et al.'s medium setting: D = 256, trained on 384 tokens, heads of 32. Their 90M."""
    return _schlag(kind, 256, **changes)


def modern_10m(kind: Kinds = "gated-delta", **changes: Any) -> RebindConfig:
    """8 layers of 256, for a vocabulary of 16,000."""
    return _modern(kind, 256, 8, 4, 704, 16_000, changes)


def modern_60m(kind: Kinds = "gated-delta", **changes: Any) -> RebindConfig:
    """12 layers of 512, for a vocabulary of 32,000."""
    return _modern(kind, 512, 12, 8, 1_408, 32_000, changes)


def modern_350m(kind: Kinds = "gated-delta", **changes: Any) -> RebindConfig:
    """24 layers of 1,024 with heads of 128, for a vocabulary of 32,000."""
    return _modern(kind, 1_024, 24, 8, 2_816, 32_000, changes)


PRESETS: dict[str, Preset] = {
    "schlag-small": schlag_small,
    "schlag-medium": schlag_medium,
    "modern-10m": modern_10m,
    "modern-60m": modern_60m,
    "modern-350m": modern_350m,
}


def preset(name: str, kind: Kinds | None = None, **changes: Any) -> RebindConfig:
    """The config of that name, with layers of that kind: `preset("schlag-small", "dpfp-delta", vocab_size=8_000)`."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name](**changes) if kind is None else PRESETS[name](kind, **changes)


def _schlag(kind: Kinds, width: int, **changes: Any) -> RebindConfig:
    """Section 6.3 and appendix F: 16 layers, 8 heads, ReLU MLPs of 2,048, dropout 0.1; in D.3, m = 16 and ν = 1."""
    options = {
        "vocab_size": WIKITEXT_103,
        "hidden_size": width,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 2_048,
        "mlp": "relu",
        "dropout": 0.1,
        "favor_features": 16,
        "dpfp_nu": 1,
    }
    return RebindConfig(**{**options, "layer_kinds": kind, **changes})


def _modern(
    kind: Kinds, width: int, depth: int, heads: int, hidden: int, vocabulary: int, changes: dict[str, Any]
) -> RebindConfig:
    options = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
    }
    return RebindConfig(**{**options, "layer_kinds": kind, **changes})
