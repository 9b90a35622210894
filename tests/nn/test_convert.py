"""Layers and models of transformers, and of fla by its names, as ours and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import rebind
from rebind.compat import fla
from rebind.errors import InputError
from rebind.nn import (
    Attention,
    FastWeight,
    LatentAttention,
    RebindForCausalLM,
    from_pretrained_layer,
    to_pretrained_layer,
)
from tests.model_types import build
from tests.support import assert_close

LAYERS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid"]
MODELS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
LATENT = ["kimi_linear", "bailing_hybrid"]


def ids_for(model, *shape: int) -> torch.Tensor:
    return torch.randint(1, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def linear_layer(model) -> nn.Module:
    block = model.model.layers[0]
    return block.linear_attn if hasattr(block, "linear_attn") else block.self_attn


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_round_trip(theirs: nn.Module, copy_back) -> None:
    """Weights that went to ours come back as they were."""
    before = tensors(theirs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    copy_back()
    for one, other in zip(tensors(theirs), before, strict=True):
        assert_close(one, other, 1e-6)


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_a_fast_weight_layer(kind):
    theirs = linear_layer(build(kind).eval())
    ours = from_pretrained_layer(theirs)
    assert isinstance(ours, FastWeight)
    x = torch.randn(2, 40, theirs.hidden_size, generator=torch.Generator().manual_seed(1))
    assert_close(ours(x)[0], theirs(x), 1e-5)
    assert_round_trip(theirs, lambda: to_pretrained_layer(ours, theirs))


@pytest.mark.parametrize("bound", [None, -4.0])
@torch.no_grad()
def test_both_gates_of_kda(bound):
    options = {} if bound is None else {"kda_safe_gate": True, "kda_lower_bound": bound}
    theirs = linear_layer(build("bailing_hybrid", **options).eval())
    ours, x = from_pretrained_layer(theirs), torch.randn(1, 9, theirs.hidden_size)
    assert ours.gates.decay.gate.name == ("softplus" if not theirs.forget_gate.safe_gate else "sigmoid")
    assert_close(ours(x)[0], theirs(x), 1e-5)


@torch.no_grad()
def test_the_layer_of_glm():
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    config = modeling.Glm5NextTextConfig(hidden_size=32, linear_num_heads=3, linear_head_dim=8)
    torch.manual_seed(0)
    theirs, x = modeling.Glm5NextTextLinearAttention(config, 0).eval(), torch.randn(2, 30, 32)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    expected, ours = theirs(x), from_pretrained_layer(theirs)
    assert ours.gates.decay.gate.lowest == -5.0
    assert_close(ours(x)[0], expected, 1e-5)
    with rebind.optimize(theirs):
        assert_close(theirs(x), expected, 1e-5)


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_attention(kind):
    model = build(kind).eval()
    theirs = model.model.layers[3].self_attn
    ours, x = from_pretrained_layer(theirs), torch.randn(1, 12, model.config.hidden_size)
    assert isinstance(ours, Attention)
    rotary = model.model.rotary_emb
    positions = None if rotary is None else rotary(x, torch.arange(12)[None])
    expected, _ = theirs(x, position_embeddings=positions, attention_mask=None)
    assert_close(ours(x)[0], expected, 1e-5)
    assert_round_trip(theirs, lambda: to_pretrained_layer(ours, theirs))


def mixed(module: nn.Module) -> nn.Module:
    """Give buffers that are zero at first other values."""
    for name, buffer in module.named_buffers():
        if "correction" in name:
            buffer.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(3))
    return module


@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"rope_parameters": None}], ids=str)
@pytest.mark.parametrize("kind", LATENT)
@torch.no_grad()
def test_latent_attention(kind, options):
    if kind == "bailing_hybrid" and options:
        pytest.skip("it has one form")
    model = build(kind, **options).eval()
    theirs = model.model.layers[3].self_attn
    ours, x = from_pretrained_layer(theirs), torch.randn(1, 12, model.config.hidden_size)
    assert isinstance(ours, LatentAttention)
    more = {}
    if hasattr(model.model, "rotary_emb"):
        more = {"position_embeddings": model.model.rotary_emb(x, torch.arange(12)[None])}
    causal = torch.full((12, 12), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, attention_mask=causal, **more)
    assert_close(ours(x)[0], expected, 1e-5)
    assert_round_trip(theirs, lambda: to_pretrained_layer(ours, theirs))


@pytest.mark.parametrize("kind", [*MODELS, *LATENT])
@torch.no_grad()
def test_a_whole_model(kind, tmp_path, monkeypatch):
    theirs = mixed(build(kind).eval())
    ours, ids = RebindForCausalLM.from_transformers(theirs), ids_for(theirs, 2, 30)
    assert_close(ours(ids).logits, theirs(ids).logits, 1e-4)
    precise = copy.deepcopy(theirs).double()
    with rebind.optimize(precise), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)  # transformers computes in float32 otherwise
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        assert_close(RebindForCausalLM.from_transformers(precise)(ids).logits, precise(ids).logits, 1e-6)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    ours.save_pretrained(tmp_path)
    assert_close(RebindForCausalLM.from_pretrained(tmp_path)(ids).logits, ours(ids).logits, 1e-6)
    assert_round_trip(theirs, lambda: ours.to_transformers(theirs))


@torch.no_grad()
def test_experts_in_groups():
    theirs = mixed(build("kimi_linear", num_local_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3).eval())
    ours, ids = RebindForCausalLM.from_transformers(theirs), ids_for(theirs, 2, 30)
    assert ours.config.router_groups_per_tok == 2
    assert_close(ours(ids).logits, theirs(ids).logits, 1e-4)


@torch.no_grad()
def test_the_correction_of_a_router_keeps_its_digits(tmp_path):
    theirs = mixed(build("kimi_linear").eval())
    corrections = [buffer.clone() for name, buffer in theirs.named_buffers() if "correction" in name]
    theirs.bfloat16()
    for (name, _), correction in zip(list(theirs.named_buffers()), corrections, strict=True):
        theirs.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = correction
    ours = RebindForCausalLM.from_transformers(theirs)
    assert ours.dtype == torch.bfloat16
    ours.save_pretrained(tmp_path)
    for lm in (ours, RebindForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        own = [buffer for name, buffer in lm.named_buffers() if name.endswith("correction")]
        assert all(torch.equal(one, other) for one, other in zip(own, corrections, strict=True))


def test_what_is_not_known_is_refused():
    for call, code in (
        (lambda: from_pretrained_layer(nn.Linear(2, 2)), "unknown_layer"),
        (lambda: RebindForCausalLM.from_transformers(build("mamba2")), "unknown_model"),
        (lambda: RebindForCausalLM.from_transformers(nn.Linear(2, 2)), "unknown_model"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == code


def test_weights_go_back_into_layers_and_models_that_compute_the_same():
    qwen, olmo = build("qwen3_next"), build("olmo_hybrid")
    ours = RebindForCausalLM.from_transformers(qwen)
    doubled = from_pretrained_layer(linear_layer(olmo))
    doubled.gates.max_beta = 2.0 if doubled.gates.max_beta == 1.0 else 1.0
    before = tensors(olmo)
    for call in (
        lambda: ours.to_transformers(olmo),
        lambda: ours.to_transformers(build("qwen3_next", hidden_size=64)),
        lambda: to_pretrained_layer(ours.model.layers[0].mixer, qwen.model.layers[3].self_attn),
        lambda: to_pretrained_layer(doubled, linear_layer(olmo)),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == "layers_differ"
    assert all(torch.equal(one, other) for one, other in zip(tensors(olmo), before, strict=True))


# Layers with the names and attributes of flash-linear-attention, which runs on GPUs alone


class GatedNorm(nn.Module):
    def __init__(self, width, activation="swish"):
        super().__init__()
        self.weight, self.eps, self.activation = nn.Parameter(torch.randn(width)), 1e-5, activation

    def forward(self, x, gate=None):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return x if gate is None else x * (gate.sigmoid() if self.activation == "sigmoid" else functional.silu(gate))


class Convolution(nn.Conv1d):
    def __init__(self, width, bias):
        super().__init__(width, width, 4, groups=width, bias=bias, padding=3)

    def forward(self, x):
        return functional.silu(super().forward(x.mT)[..., : x.shape[1]]).mT


class FlaLayer(nn.Module):
    """What the three layers have in common; dim 12, two key heads of 5, four value heads of 7."""

    def __init__(self, heads=4, bias=False):
        super().__init__()
        self.hidden_size, self.num_heads, self.num_v_heads = 12, 2 if heads == 4 else heads, heads
        self.head_dim = self.head_k_dim = 5
        self.head_v_dim, self.allow_neg_eigval, self.use_gate = 7, True, True
        self.key_dim, self.value_dim = 5 * self.num_heads, 7 * heads
        widths = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        for name, width in widths.items():
            setattr(self, f"{name}_proj", nn.Linear(12, width, bias=False))
            setattr(self, f"{name}_conv1d", Convolution(width, bias))
        self.b_proj = nn.Linear(12, heads, bias=False)
        self.o_norm = GatedNorm(7)
        self.o_proj = nn.Linear(self.value_dim, 12, bias=False)

    def qkv(self, x):
        projected = {name: getattr(self, f"{name}_conv1d")(getattr(self, f"{name}_proj")(x)) for name in "qkv"}
        return tuple(projected[name].unflatten(-1, (-1, 7 if name == "v" else 5)) for name in "qkv")


class FlaGatedDeltaNet(FlaLayer):
    def __init__(self):
        super().__init__(bias=True)
        self.a_proj, self.g_proj = nn.Linear(12, 4, bias=False), nn.Linear(12, 28, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        options |= {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_qk_l2norm_in_kernel": True}
        out, _ = fla.chunk_gated_delta_rule(*self.qkv(x), self.a_proj(x), self.b_proj(x), **options)
        return self.o_proj(self.o_norm(out, self.g_proj(x).unflatten(-1, (4, 7))).flatten(-2))


class FlaKda(FlaLayer):
    def __init__(self, lower_bound):
        super().__init__()
        self.lower_bound = lower_bound
        self.f_proj = nn.Sequential(nn.Linear(12, 7, bias=False), nn.Linear(7, 20, bias=False))
        self.g_proj = nn.Sequential(nn.Linear(12, 7, bias=False), nn.Linear(7, 28))
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(20))
        self.o_norm.activation = "sigmoid"

    def forward(self, x):
        options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
        options |= {"A_log": self.A_log, "dt_bias": self.dt_bias, "use_qk_l2norm_in_kernel": True}
        decay = self.f_proj(x).unflatten(-1, (4, 5))
        out, _ = fla.chunk_kda(*self.qkv(x), decay, self.b_proj(x), lower_bound=self.lower_bound, **options)
        return self.o_proj(self.o_norm(out, self.g_proj(x).unflatten(-1, (4, 7))).flatten(-2))


class FlaDeltaNet(FlaLayer):
    def __init__(self):
        super().__init__(heads=3)
        self.use_gate, self.qk_activation, self.qk_norm, self.allow_neg_eigval = False, "silu", "l2", False

    def forward(self, x):
        out, _ = fla.chunk_delta_rule(*self.qkv(x), self.b_proj(x).sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.o_proj(self.o_norm(out).flatten(-2))


@pytest.mark.parametrize(
    "create",
    [FlaGatedDeltaNet, lambda: FlaKda(None), lambda: FlaKda(-5.0), FlaDeltaNet],
    ids=["gdn", "kda", "safe", "delta"],
)
@torch.no_grad()
def test_layers_of_fla(create):
    torch.manual_seed(0)
    theirs = create().double()
    ours, x = from_pretrained_layer(theirs), torch.randn(2, 21, 12, dtype=torch.float64)
    assert_close(ours(x)[0], theirs(x), 1e-9)
    assert_round_trip(theirs, lambda: to_pretrained_layer(ours, theirs))
