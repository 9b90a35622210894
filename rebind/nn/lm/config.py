"""What a language model is made of, as transformers keeps it."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import unknown_name
from rebind.nn.lm.kinds import KINDS
from rebind.nn.parts.mlp import MLPS


class RebindConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """A stack of layers of the kinds in `rebind.nn.lm.kinds`, each followed by an MLP.

    Attributes:
        layer_kinds: A kind for all layers, or a pattern of kinds that is repeated to the model's depth.
        hidden_size: The residual stream.
        num_attention_heads: Heads of every layer.
        intermediate_size: The MLP's hidden layer.
        mlp: "swiglu" or "relu".
        key_dim: A head's keys, before φ. None: hidden_size / heads.
        value_dim: A head's values. None: hidden_size / heads.
        conv_size: Tokens that the short convolution of the modern kinds sees. None: no convolution.
        dpfp_nu: ν of DPFP.
        favor_features: m of FAVOR+, whose features are 2m wide.
        ttt_mini_batch: Tokens that TTT layers take together.
        hopfield_patterns: Patterns a head of a Hopfield layer.
        rope_theta: The base of attention's rotary positions. None: no positions.
        dropout: After every layer and MLP, while training.
    """

    model_type = "rebind"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    intermediate_size: int = 1_408
    layer_kinds: str | list[str] = "gated-delta"
    mlp: str = "swiglu"
    key_dim: int | None = None
    value_dim: int | None = None
    conv_size: int | None = 4
    dpfp_nu: int = 1
    favor_features: int = 16
    ttt_mini_batch: int = 16
    hopfield_patterns: int = 64
    rope_theta: float | None = 10_000.0
    dropout: float = 0.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._check_sizes()
        self._check_numbers()
        if self.mlp not in MLPS:
            raise unknown_name("mlp", self.mlp, MLPS)
        if not isinstance(self.layer_kinds, str | list | tuple):
            raise InputError(f"layer_kinds is {self.layer_kinds!r}, expected a kind or a list of kinds: name one")
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown_name("layer kind", kind, KINDS)

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer."""
        pattern = [self.layer_kinds] if isinstance(self.layer_kinds, str) else list(self.layer_kinds)
        if not pattern or self.num_hidden_layers % len(pattern):
            raise ShapeError(
                f"layer_kinds names {len(pattern)} layers and num_hidden_layers is {self.num_hidden_layers}, expected "
                f"a pattern whose length divides the depth: name every layer, or a pattern to repeat"
            )
        return pattern * (self.num_hidden_layers // len(pattern))

    def _check_numbers(self) -> None:
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}, expected 0 or more and less than 1: 0 turns it off")
        for name in ("norm_eps", "initializer_range", *(["rope_theta"] if self.rope_theta is not None else [])):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise InputError(f"{name} is {value!r}, expected a number above 0: check the config")

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{name} is {size!r}, expected a whole number of 1 or more: check the config")
        if self.hidden_size % self.num_attention_heads and None in (self.key_dim, self.value_dim):
            raise ShapeError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}, expected a "
                f"multiple: choose heads that divide it, or give key_dim and value_dim"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
