"""The config of a language model, the kinds of layer that it can name, and presets: configs with a name.

The kinds `<φ>-<rule>` are the models of Schlag et al.: the sum is read with a denominator (eq. 19), the delta rule has
sum-normalized φ(k) and φ(q) (section 4.2), and there is neither a convolution nor an output gate. The other kinds are
built as in today's papers. To add a kind, add an entry to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from rebind.errors import InputError, ShapeError
from rebind.memory import ttt
from rebind.memory.checks import require_number, unknown_name
from rebind.nn.layers.attention import Attention, Rotary
from rebind.nn.layers.base import SequenceLayer
from rebind.nn.layers.fast_weight import FastWeight
from rebind.nn.layers.hopfield import HopfieldLayer
from rebind.nn.layers.latent import LatentAttention
from rebind.nn.layers.mesa import MesaLayer
from rebind.nn.layers.ttt import TTTLayer
from rebind.nn.parts.checks import head_width
from rebind.nn.parts.dense import MLPS
from rebind.nn.parts.feature_map import L2Normalizer, NoNormalizer, Normalizer, build_feature
from rebind.nn.parts.gates import DECAYS, DecayGate, OutputGate, SigmoidDecay, SoftplusDecay
from rebind.storage import read_json_object, write_file, write_json

ConfigValue = str | int | float | list[str] | None


MOST_LAYERS, LARGEST_SIZE = 4_096, 2**24  # far beyond any model: what is larger is a mistake, or an attack
MISSPELLED = 0.88  # how similar another name is, from 0 to 1: hiden_size is, and sep_token_id is not
OTHER_NAMES = {  # what other models call our fields
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim"),
    "layer_kinds": ("layer_types", "rule"),
    "d_k": ("head_k_dim", "linear_key_head_dim"),
    "d_v": ("head_v_dim", "linear_value_head_dim", "expand_v"),
    "key_heads": ("linear_num_key_heads", "num_k_heads"),
    "memory_heads": ("linear_num_value_heads", "num_v_heads"),
    "conv_size": ("linear_conv_kernel_dim", "conv_kernel_size"),
    "max_beta": ("allow_neg_eigval",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "rotary_fraction": ("partial_rotary_factor",),
}
CODE = "modeling_rebind"  # the module in a saved folder that programs import which do not know rebind


class SavedConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """A config whose folder names the classes that read it.

    Programs that have not imported `rebind.nn` find them there with `trust_remote_code=True`, if rebind is installed.
    """

    auto_classes: ClassVar[dict[str, str]]  # the class for each Auto class

    def __post_init__(self, **kwargs: Any) -> None:
        """Keep fields that are not ours, as all configs of transformers do, unless they mean one of ours."""
        fields = self.__dataclass_fields__
        for name in kwargs.keys() - fields.keys():
            alternatives = [ours for ours, others in OTHER_NAMES.items() if name in others and ours in fields]
            alternatives = alternatives or get_close_matches(name, fields, n=1, cutoff=MISSPELLED)
            if alternatives:
                raise InputError(
                    f"A config has no field {name!r}", expected=repr(alternatives[0]), code="unknown_field"
                )
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        file = Path(save_directory) / "config.json"
        names = {auto: f"{CODE}.{name}" for auto, name in self.auto_classes.items()}
        write_json(file, {**(read_json_object(file) or {}), "auto_map": names})
        imported = ", ".join(sorted(self.auto_classes.values()))
        write_file(file.with_name(f"{CODE}.py"), f"from rebind.nn import {imported}  # noqa: F401\n".encode())


class RebindConfig(SavedConfig):  # type: ignore[no-untyped-call]
    """A stack of sequence layers, each followed by an MLP."""

    model_type = "rebind"
    auto_classes: ClassVar[dict[str, str]] = {
        "AutoConfig": "RebindConfig",
        "AutoModel": "RebindModel",
        "AutoModelForCausalLM": "RebindForCausalLM",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 512  # width of the residual stream
    num_hidden_layers: int = 12
    num_attention_heads: int = 8  # of every layer
    intermediate_size: int = 1_408  # width of the hidden layer of the MLPs
    layer_kinds: str | list[str] = "gated_delta"  # of `KINDS`; a list is repeated to the depth
    mlp: str | list[str] = "swiglu"  # or "relu", or "experts" of which a token uses a few; a list as for layer_kinds
    # Fast weights
    memory_heads: int | None = None  # memories of a layer; None: num_attention_heads
    key_heads: int | None = None  # heads of keys and queries, each shared by equally many memories; None: as many
    d_k: int | None = None  # width of the keys of a head, before φ; None: hidden_size / memory heads
    d_v: int | None = None  # width of the values of a head; None: hidden_size / memory heads
    conv_size: int | None = 4  # tokens that the short convolution of today's kinds sees; None: no convolution
    conv_bias: bool = False
    max_beta: float = 1.0  # least upper bound of β; 2 lets a write turn a value into its opposite
    decay_gate: str = "softplus"  # or "sigmoid", whose ln α is at least `lowest_decay`
    decay_rank: int | None = None  # of the projection of the decay gate; None: full
    lowest_decay: float = -5.0
    output_gate: str | None = None  # "none", "silu" or "sigmoid"; None: that of the kind
    output_gate_rank: int | None = None  # of its projection; None: full
    output_gate_bias: bool = False
    query_scale: float = 1.0  # what queries are multiplied by, after their norm
    read_norm_eps: float | None = None  # ε of the norm of reads; None: norm_eps
    key_norm_eps: float | None = None  # ε of L2-normalized keys and queries; None: as little as rounding allows
    # Attention
    num_key_value_heads: int | None = None  # each shared by equally many heads; None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: str = "none"  # RMSNorm of queries and keys: of each "head", or of "all" heads side by side
    sliding_window: int | None = None  # tokens that a token sees; None: all before it
    rope_theta: float | None = 10_000.0  # base of the rotary positions; None: no positions
    rotary_fraction: float = 1.0  # part of the channels that is rotated
    attention_gate: str = "none"  # what reads are multiplied by: "none", "silu" or "sigmoid" of a projection
    attention_norm: str = "before"  # where the norms of a block with attention are: "before" its parts, or "after"
    # Latent attention
    latent_rank: int = 128  # numbers per token that keys and values are made of
    latent_shared_dim: int = 32  # width of the part of the keys that heads share, which rotary positions rotate
    latent_key_dim: int | None = None  # width of the other part; None: hidden_size / num_attention_heads
    latent_value_dim: int | None = None  # None: hidden_size / num_attention_heads
    latent_query_rank: int | None = None  # of the projection of queries; None: full
    latent_gate: bool = False  # whether the read of each head is multiplied by σ(w·x)
    # Experts
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 352  # width of the hidden layer of an expert
    shared_expert_intermediate_size: int | None = None  # of the expert that every token uses; None: there is none
    shared_expert_gate: bool = True  # whether what it adds is multiplied by σ(W x)
    norm_topk_prob: bool = True  # whether the weights of a token's experts sum to 1
    router: str = "softmax"  # how experts are scored; or "sigmoid", with a correction that training does not change
    router_groups: int = 1  # groups of experts, for "sigmoid"
    router_groups_per_tok: int = 1  # groups that a token uses
    router_scale: float = 1.0  # what the weights of a token's experts are multiplied by, for "sigmoid"
    # Other kinds
    dpfp_nu: int = 1  # ν of DPFP: features 2ν times as wide as d_k
    favor_features: int = 16  # m of FAVOR+: features 2m wide
    mesa_iterations: int = 30  # of conjugate gradients, per token
    ttt_mini_batch: int = 16
    hopfield_patterns: int = 64  # per head
    dropout: float = 0.0  # after the embedding, every layer and every MLP
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        require_number(
            "num_hidden_layers", self.num_hidden_layers, least=1, most=MOST_LAYERS, whole=True, code="invalid_size"
        )
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "moe_intermediate_size"):
            require_number(name, getattr(self, name), least=1, most=LARGEST_SIZE, whole=True, code="invalid_size")
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "dpfp_nu",
            "favor_features",
            "mesa_iterations",
            "ttt_mini_batch",
        ):
            require_number(name, getattr(self, name), least=1, most=LARGEST_SIZE, whole=True, code="invalid_size")
        require_number("dropout", self.dropout, most=1.0)
        for name in ("norm_eps", "initializer_range"):
            require_number(name, getattr(self, name))
        for width in (self.d_k, self.d_v):
            head_width(self.hidden_size, self.memory_heads or self.num_attention_heads, width)
        for mlp in self.mlps:
            if mlp not in (*MLPS, "experts"):
                raise unknown_name("mlp", mlp, (*MLPS, "experts"))
        if self.router not in ("softmax", "sigmoid"):
            raise unknown_name("router", self.router, ("softmax", "sigmoid"))
        if self.attention_norm not in ("before", "after"):
            raise unknown_name("attention norm", self.attention_norm, ("before", "after"))
        if self.decay_gate not in DECAYS:
            raise unknown_name("decay gate", self.decay_gate, DECAYS)
        for kind in self.kinds:  # which raises an error for a pattern that does not fit
            if kind not in KINDS:
                raise unknown_name("layer kind", kind, KINDS)

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer."""
        return self._repeat("layer kinds", self.layer_kinds)

    @property
    def mlps(self) -> list[str]:
        """The MLP of every block."""
        return self._repeat("MLPs", self.mlp)

    def _repeat(self, what: str, pattern: str | list[str]) -> list[str]:
        """Return a pattern repeated to the depth."""
        names = [pattern] if isinstance(pattern, str) else list(pattern)
        if not names or self.num_hidden_layers % len(names):
            problem = f"The pattern of {what} has {len(names)} entries for {self.num_hidden_layers} layers"
            raise ShapeError(problem, expected="a divisor of the number of layers", code="pattern_does_not_fit")
        return names * (self.num_hidden_layers // len(names))


LayerBuilder = Callable[[RebindConfig], SequenceLayer[Any]]


def _fast_weight(rule: str, normalizer: str, *, feature: str = "identity", output_gate: str = "none") -> LayerBuilder:
    """Return the builder of a fast-weight layer with a feature map or, without one, behind a short convolution."""

    def build(config: RebindConfig) -> FastWeight:
        layer: Callable[..., FastWeight] = partial(FastWeight, rule=rule)
        if rule == "mesa":
            layer = partial(MesaLayer, iterations=config.mesa_iterations)
        heads = config.memory_heads or config.num_attention_heads
        d_k = head_width(config.hidden_size, heads, config.d_k)
        normalizers: dict[str, Normalizer] = {
            "none": NoNormalizer(config.query_scale),
            "l2": L2Normalizer(config.key_norm_eps, config.query_scale),
        }
        decay: DecayGate = SoftplusDecay(config.decay_rank)
        if config.decay_gate != "softplus":
            decay = SigmoidDecay(config.decay_rank, config.lowest_decay)
        activation = output_gate if config.output_gate is None else config.output_gate
        gate = (
            None if activation == "none" else OutputGate(activation, config.output_gate_rank, config.output_gate_bias)
        )
        return layer(
            config.hidden_size,
            heads,
            feature=build_feature(feature, d_k, dpfp_nu=config.dpfp_nu, favor_features=config.favor_features),
            normalizer=normalizers.get(normalizer, normalizer),
            d_k=d_k,
            d_v=config.d_v,
            key_heads=config.key_heads,
            conv_size=config.conv_size if feature == "identity" else None,
            conv_bias=config.conv_bias,
            decay=decay,
            max_beta=config.max_beta,
            output_gate=gate,
            norm_eps=config.norm_eps if config.read_norm_eps is None else config.read_norm_eps,
        )

    return build


def _attention(config: RebindConfig) -> Attention:
    return Attention(
        config.hidden_size,
        config.num_attention_heads,
        head_dim=config.head_dim,
        key_heads=config.num_key_value_heads,
        rotary=None if config.rope_theta is None else Rotary(config.rope_theta, config.rotary_fraction),
        qk_norm=config.qk_norm,
        window=config.sliding_window,
        output_gate=config.attention_gate,
        norm_eps=config.norm_eps,
    )


def _latent(config: RebindConfig) -> LatentAttention:
    return LatentAttention(
        config.hidden_size,
        config.num_attention_heads,
        rank=config.latent_rank,
        shared_dim=config.latent_shared_dim,
        key_dim=config.latent_key_dim,
        d_v=config.latent_value_dim,
        query_rank=config.latent_query_rank,
        rotary=None if config.rope_theta is None else Rotary(config.rope_theta),
        head_gate=config.latent_gate,
    )


def _ttt(inner: ttt.InnerModel, rate: float) -> LayerBuilder:
    return lambda config: TTTLayer(
        config.hidden_size, config.num_attention_heads, inner=inner, mini_batch=config.ttt_mini_batch, rate=rate
    )


KINDS: dict[str, LayerBuilder] = {
    "attention": _attention,
    "latent": _latent,
    "linear-sum": _fast_weight("sum", "attention", feature="linear"),  # the Linear Transformer
    "linear-delta": _fast_weight("delta", "sum", feature="linear"),  # the Delta Net of Schlag et al.
    "performer-sum": _fast_weight("sum", "attention", feature="performer"),
    "performer-delta": _fast_weight("delta", "sum", feature="performer"),
    "dpfp-sum": _fast_weight("sum", "attention", feature="dpfp"),
    "dpfp-delta": _fast_weight("delta", "sum", feature="dpfp"),
    "rfa": _fast_weight("rfa", "attention", feature="performer"),
    "mamba2": _fast_weight("mamba2", "none", output_gate="silu"),
    "delta": _fast_weight("delta", "l2"),  # DeltaNet as it is built today
    "longhorn": _fast_weight("longhorn", "none"),
    "gated_delta": _fast_weight("gated_delta", "l2", output_gate="silu"),
    "gla": _fast_weight("gla", "none", output_gate="silu"),
    "kda": _fast_weight("kda", "l2", output_gate="sigmoid"),
    "gdn2": _fast_weight("gdn2", "l2", output_gate="silu"),
    "comba": _fast_weight("comba", "l2", output_gate="silu"),
    "rwkv7": _fast_weight("rwkv7", "none", output_gate="silu"),
    "mesa": _fast_weight("mesa", "l2", output_gate="silu"),
    "ttt-linear": _ttt(ttt.Linear(), rate=1.0),
    "ttt-mlp": _ttt(ttt.Mlp(), rate=0.1),
    "hopfield": lambda config: HopfieldLayer(  # mixes no tokens: put it between layers that do
        config.hidden_size, config.num_attention_heads, patterns=config.hopfield_patterns
    ),
}

SCHLAG: dict[str, ConfigValue] = {  # Schlag et al., section 6.3, appendices D.3 and F; the vocabulary of WikiText-103
    "vocab_size": 267_735,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "intermediate_size": 2_048,
    "layer_kinds": "linear-delta",
    "mlp": "relu",
    "dropout": 0.1,
}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
PRESETS: dict[str, Mapping[str, ConfigValue]] = {
    "schlag-small": {**SCHLAG, "hidden_size": 128},  # trained on 256 tokens; 40M parameters in the paper
    "schlag-medium": {**SCHLAG, "hidden_size": 256},  # trained on 384 tokens; 90M parameters in the paper
    "modern-10m": dict(zip(SIZES, (16_000, 256, 8, 4, 704), strict=True)),
    "modern-60m": dict(zip(SIZES, (32_000, 512, 12, 8, 1_408), strict=True)),
    "modern-350m": dict(zip(SIZES, (32_000, 1_024, 24, 8, 2_816), strict=True)),
}


def preset(name: str, kind: str | list[str] | None = None, **fields: ConfigValue) -> RebindConfig:
    """Return the config of that name, with layers of that kind (or list of kinds) and with other fields changed.

    For example `preset("schlag-small", "dpfp-delta", vocab_size=8_000)`.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    values: dict[str, Any] = {**PRESETS[name], **({} if kind is None else {"layer_kinds": kind}), **fields}
    return RebindConfig(**values)
