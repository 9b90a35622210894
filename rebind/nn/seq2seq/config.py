"""What an encoder-decoder is made of, as transformers keeps it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import unknown_name
from rebind.nn.parts.mlp import MLPS
from rebind.nn.seq2seq.kinds import SEQ2SEQ_KINDS


class RebindSeq2SeqConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """An encoder and a decoder, with one kind of attention in all three places.

    Attributes:
        attention: A kind of `rebind.nn.seq2seq.kinds`: "softmax", "linear", "performer" or "dpfp".
        vocab_size: Tokens, the same on both sides.
        hidden_size: The residual stream.
        encoder_layers: Blocks that read the source.
        decoder_layers: Blocks that write the target.
        num_attention_heads: Heads of every layer.
        intermediate_size: The MLP's hidden layer.
        mlp: "relu" or "swiglu".
        dpfp_nu: ν of DPFP, whose features are 2ν times as wide as a head.
        favor_features: m of FAVOR+, whose features are 2m wide.
        dropout: After the embedding, every layer and every MLP, while training.
        label_smoothing: Share of a target's weight that goes to all tokens alike, while training.
        tie_word_embeddings: Whether the output layer is the embedding, which source and target share in any case.
        decoder_start_token_id: What the decoder reads before the target's first token.
    """

    model_type = "rebind-seq2seq"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 8_000
    attention: str = "dpfp"
    hidden_size: int = 256
    encoder_layers: int = 3
    decoder_layers: int = 3
    num_attention_heads: int = 4
    intermediate_size: int = 1_024
    mlp: str = "relu"
    dpfp_nu: int = 2
    favor_features: int = 128
    dropout: float = 0.1
    label_smoothing: float = 0.0
    norm_eps: float = 1e-6
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._check_sizes()
        if self.attention not in SEQ2SEQ_KINDS:
            raise unknown_name("attention", self.attention, SEQ2SEQ_KINDS)
        if self.mlp not in MLPS:
            raise unknown_name("mlp", self.mlp, MLPS)
        for name in ("dropout", "label_smoothing"):
            share = getattr(self, name)
            if not isinstance(share, (int, float)) or not 0 <= share < 1:
                raise InputError(f"{name} is {share!r}, expected 0 or more and less than 1: 0 turns it off")
        if not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise InputError(
                f"decoder_start_token_id is {self.decoder_start_token_id}, expected a token from 0 to "
                f"{self.vocab_size - 1}: the decoder must begin with one, often the bos or pad token"
            )

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "encoder_layers", "decoder_layers", "num_attention_heads",
            "intermediate_size", "dpfp_nu", "favor_features",
        ):  # fmt: skip
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"{name} is {size!r}, expected a whole number of 1 or more: check the config")
        if self.hidden_size % 2 or self.hidden_size % self.num_attention_heads:
            raise ShapeError(
                f"hidden_size is {self.hidden_size} and num_attention_heads {self.num_attention_heads}, expected an "
                f"even multiple of the heads: positions take half sines, half cosines, and heads share it evenly"
            )
