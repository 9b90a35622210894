"""Sites: one per layer in every family, the right one, readable and writable; a reason where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, BertConfig, GPT2Config, GPT2Model, T5Config
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError, ShapeError
from rebind.models.sites import Site, find_sites, memory_of, module_at, write_memory
from tests.families import (
    EXPECTED,
    FAMILIES,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    ROUTED,
    ROUTED_TABLE,
    SKIPPED,
    TABLE,
    tokens,
)
from tests.support import Draw, assert_close

PROMISED = {
    *("gpt2", "gpt-neo", "gpt-j", "gpt-neox", "opt", "bloom", "falcon", "falcon-new", "phi", "phi3", "llama"),
    *("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3", "olmo", "olmo2", "stablelm", "cohere"),
    *("gpt-bigcode", "starcoder2", "mpt", "llama4", "granite"),
}


def snapshot(model):
    """Return the bytes of every tensor."""
    return {name: (t.dtype, t.contiguous().numpy().tobytes()) for name, t in model.state_dict().items()}


def run(model, site):
    """Return the input and output of a site in one forward pass, copied: Falcon adds to the output in place."""
    caught = []
    module = module_at(model, site.name)
    hook = module.register_forward_hook(lambda _, inputs, output: caught.append((inputs[0].clone(), output.clone())))
    with torch.no_grad():
        model(tokens())
    hook.remove()
    assert len(caught) == 1
    return caught[0]


def test_no_promised_family_is_missing():
    assert set(TABLE) >= PROMISED
    assert set(FAMILIES) | set(ROUTED) | set(SKIPPED) == set(TABLE) | set(ROUTED_TABLE)
    assert all("has no" in reason for reason in SKIPPED.values()), SKIPPED


@pytest.mark.parametrize("name", FAMILIES)
def test_one_site_a_layer(name):
    model, expected = FAMILIES[name](), EXPECTED[name]
    block = expected.down.partition("{}")[0]
    assert find_sites(model) == [
        Site(layer, f"{block}{layer}", expected.down.format(layer), expected.inner, HIDDEN) for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_memory_is_what_the_module_multiplies_by(name):
    model = FAMILIES[name]()
    for site in find_sites(model):
        module = module_at(model, site.name)
        keys, values = run(model, site)
        assert (keys.shape[-1], values.shape[-1]) == (site.d_k, site.d_v)
        bias = 0 if module.bias is None else module.bias
        assert_close(keys @ memory_of(module).mT + bias, values, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_write_changes_the_output_and_restores_bit_for_bit(name):
    model = FAMILIES[name]()
    before, draw = snapshot(model), Draw(1, torch.float32)
    for site in find_sites(model):
        module = module_at(model, site.name)
        keys, values = run(model, site)
        old, weight = memory_of(module).clone(), module.weight
        change = draw.normal(site.d_v, site.d_k)
        write_memory(module, old + change)
        assert module.weight is weight  # in place
        assert_close(module(keys), values + keys @ change.mT, 1e-4)
        assert sum(a != b for a, b in zip(before.values(), snapshot(model).values(), strict=True)) == 1
        write_memory(module, old)
        assert snapshot(model) == before


def refused(model, code):
    with pytest.raises(InputError) as caught:
        find_sites(model)
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("name", ROUTED)
def test_experts_are_refused(name):
    refused(ROUTED[name](), "mixture_of_experts")


# Traps: where widths alone would mislead


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gpt-neox", "opt", "falcon", "starcoder2"])
def test_square_maps_do_not_hide_the_mlp(name):
    """With the inner width equal to the hidden size, attention's maps look like the MLP's."""
    options = {"intermediate_size": HIDDEN, "n_inner": HIDDEN, "ffn_dim": HIDDEN, "ffn_hidden_size": HIDDEN}
    model = FAMILIES[name](**{key: value for key, value in options.items() if key in EXPECTED[name].options})
    assert [site.name for site in find_sites(model)] == [EXPECTED[name].down.format(i) for i in range(LAYERS)]
    assert {(site.d_k, site.d_v) for site in find_sites(model)} == {(HIDDEN, HIDDEN)}


def test_a_fused_projection_of_attention_is_not_a_fused_gate():
    """Phi-3 with grouped queries: qkv is twice the hidden size, as a gate and an up projection would be."""
    model = FAMILIES["phi3"](num_key_value_heads=HEADS // 2, intermediate_size=HIDDEN)
    assert model.model.layers[0].self_attn.qkv_proj.out_features == 2 * HIDDEN
    assert find_sites(model)[1].name == "model.layers.1.mlp.down_proj"


def test_attention_defined_after_the_mlp():
    model = FAMILIES["llama"](intermediate_size=HIDDEN)
    for block in model.model.layers:
        attention = block.self_attn
        del block.self_attn
        block.self_attn = attention
    assert [name for name, _ in model.model.layers[0].named_children()][-1] == "self_attn"
    assert find_sites(model)[0].name == "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("by", ["name", "class"])
def test_attention_is_known_by_its_name_or_its_class(by):
    """OPT, whose MLP lies bare in the block and has no name to prefer it by."""
    model = FAMILIES["opt"](ffn_dim=HIDDEN)
    for block in model.model.decoder.layers:
        attention = block.self_attn
        del block.self_attn
        if by == "name":
            block.self_attn = nn.Sequential(attention.q_proj, attention.out_proj)
        else:
            block.looks_back = attention
    assert find_sites(model)[0].name == "model.decoder.layers.0.fc2"


def test_a_lone_square_map_is_no_mlp():
    model = FAMILIES["opt"]()
    for block in model.model.decoder.layers:
        block.rotation = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    assert find_sites(model)[0].name == "model.decoder.layers.0.fc2"


def test_a_longer_list_inside_a_block_is_not_the_blocks():
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        block.extras = nn.ModuleList(nn.Linear(HIDDEN, 6) for _ in range(LAYERS + 2))
    assert find_sites(model)[0].name == "model.layers.0.mlp.down_proj"
    for block in model.model.layers:
        block.experts = nn.ModuleList(copy.deepcopy(block.mlp) for _ in range(LAYERS + 2))
    refused(model, "mixture_of_experts")


def test_square_maps_in_another_order_are_told_by_name():
    """Llama's own code calls gate, down and up w1, w2 and w3."""
    model = FAMILIES["llama"](intermediate_size=HIDDEN)
    for block in model.model.layers:
        mlp = nn.Module()
        mlp.w1, mlp.w2, mlp.w3 = block.mlp.gate_proj, block.mlp.down_proj, block.mlp.up_proj
        block.mlp = mlp
    assert find_sites(model)[2].name == "model.layers.2.mlp.w2"


def test_a_second_bottleneck_beside_the_mlp():
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        block.per_layer_gate, block.per_layer_projection = nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN)
    assert find_sites(model)[0].name == "model.layers.0.mlp.down_proj"


def test_a_longer_tower_beside_the_language_model_is_not_it():
    model = FAMILIES["llama"]()
    blocks = [FAMILIES["llama"](seed).model.layers[0] for seed in range(LAYERS + 2)]
    model.vision_tower = nn.ModuleList(blocks)
    assert find_sites(model)[0].name == "model.layers.0.mlp.down_proj"


def test_orientation_is_the_type_s_even_when_square():
    linear, conv = nn.Linear(4, 4), Conv1D(4, 4)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(16.0).view(4, 4))
        conv.weight.copy_(torch.arange(16.0).view(4, 4))
    assert torch.equal(memory_of(linear), torch.arange(16.0).view(4, 4))
    assert torch.equal(memory_of(conv), torch.arange(16.0).view(4, 4).mT)


# Reading and writing


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 5), lambda: Conv1D(5, 3)], ids=["Linear", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_write_casts_and_keeps_the_storage(make, dtype):
    module = make().to(dtype)
    view, tied, memory = memory_of(module), module.weight.detach(), Draw(2).normal(5, 3)
    assert not view.requires_grad
    write_memory(module, memory)
    assert module.weight.dtype == dtype
    assert module.weight.requires_grad
    assert torch.equal(view, memory.to(dtype))  # a view taken before the write sees it
    assert torch.equal(tied, module.weight)


def test_tied_weights_follow():
    model = FAMILIES["llama-bias"]()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tied = nn.Linear(INNER, HIDDEN)
    tied.weight = module_at(model, find_sites(model)[0].name).weight
    write_memory(tied, torch.zeros(HIDDEN, INNER))
    assert not memory_of(module_at(model, find_sites(model)[0].name)).any()


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 5), lambda: Conv1D(5, 3)], ids=["Linear", "Conv1D"])
def test_a_transposed_memory_is_refused(make):
    with pytest.raises(ShapeError) as caught:
        write_memory(make(), torch.zeros(3, 5))
    assert caught.value.code == "memory_shape"


# Models without sites


class Linear4bit(nn.Linear):
    """The kind of bitsandbytes: packed integers under the name of nn.Linear."""

    def forward(self, x):
        raise NotImplementedError


class QuantLinear(nn.Module):
    """The kind of GPTQ: no weight at all."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("qweight", torch.zeros(in_features // 8, out_features, dtype=torch.int32))


class Adapter(nn.Module):
    """The kind of PEFT."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features


def packed(in_features, out_features):
    module = nn.Linear(in_features, out_features)
    module.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.uint8), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (Linear4bit, "quantized_weights"),
        (QuantLinear, "quantized_weights"),
        (packed, "quantized_weights"),
        (lambda d_in, d_out: Adapter(nn.Linear(d_in, d_out)), "adapter"),
    ],
)
def test_quantized_and_wrapped_maps_are_refused(make, code):
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            setattr(block.mlp, name, make(HIDDEN, INNER))
        block.mlp.down_proj = make(INNER, HIDDEN)
    assert "model.layers.0.mlp.down_proj" in refused(model, code).problem


def test_models_that_do_not_predict_the_next_token_are_refused():
    t5 = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    bert = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    refused(AutoModelForSeq2SeqLM.from_config(T5Config(**t5)), "not_causal")
    refused(AutoModelForMaskedLM.from_config(BertConfig(**bert, intermediate_size=24)), "not_causal")
    refused(GPT2Model(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2)), "not_causal")
    refused(nn.Linear(3, 5), "not_causal")


def test_blocks_with_no_mlp_or_two():
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        block.second_mlp = copy.deepcopy(block.mlp)
    assert "second_mlp.down_proj (56 → 32)" in refused(model, "mlp_not_found").problem
    for block in model.model.layers:
        block.mlp = block.second_mlp = nn.Identity()
    refused(model, "mlp_not_found")


def test_no_blocks_at_all():
    model = FAMILIES["llama"]()
    model.model.layers = nn.ModuleList()
    refused(model, "unknown_architecture")
