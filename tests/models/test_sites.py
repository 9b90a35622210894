"""Sites: one per layer in every family, the right one, readable and writable; a reason where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, BertConfig, GPT2Config, GPT2Model, T5Config
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError, ShapeError
from rebind.models.sites import Site, find_sites, is_quantized, memory_of, module_at, write_memory
from tests import families
from tests.families import EXPECTED, FAMILIES, HIDDEN, INNER, LAYERS
from tests.model_types import build
from tests.support import Draw, assert_close, raises
from tests.tiny import weights

LLAMA_DOWN = "model.layers.{}.mlp.down_proj"


def run(model, module):
    """Return the input and output of a module in one forward pass, copied: Falcon adds to the output in place."""
    calls = []
    with (
        module.register_forward_hook(lambda _, args, out: calls.append((args[0].clone(), out.clone()))),
        torch.no_grad(),
    ):
        model(families.tokens())
    (call,) = calls
    return call


def refused(model, code):
    with raises(InputError, code) as caught:
        find_sites(model)
    return caught.value


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_has_a_site_that_can_be_written(name):
    model, expected = FAMILIES[name](), EXPECTED[name]
    block = expected.down.partition("{}")[0]
    sites = find_sites(model)
    assert sites == [
        Site(layer, f"{block}{layer}", expected.down.format(layer), expected.inner, HIDDEN) for layer in range(LAYERS)
    ]
    before, draw = weights(model), Draw(1, torch.float32)
    for site in sites:
        module = module_at(model, site.name)
        keys, values = run(model, module)
        bias = 0 if module.bias is None else module.bias
        assert_close(keys @ memory_of(module).mT + bias, values, 1e-5)
        old, weight = memory_of(module).clone(), module.weight
        change = draw.normal(site.d_v, site.d_k)
        write_memory(module, old + change)
        assert module.weight is weight  # in place
        assert_close(module(keys), values + keys @ change.mT, 1e-4)
        assert sum(a != b for a, b in zip(before.values(), weights(model).values(), strict=True)) == 1
        write_memory(module, old)
        assert weights(model) == before


# Traps: where shapes alone would mislead


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gpt-neox", "opt", "falcon", "starcoder2"])
def test_square_maps_do_not_hide_the_mlp(name):
    """With the inner width equal to the hidden size, the maps of attention look like those of the MLP."""
    options = {"intermediate_size": HIDDEN, "n_inner": HIDDEN, "ffn_dim": HIDDEN, "ffn_hidden_size": HIDDEN}
    model = FAMILIES[name](**{key: value for key, value in options.items() if key in EXPECTED[name].options})
    sites = find_sites(model)
    assert [site.name for site in sites] == [EXPECTED[name].down.format(layer) for layer in range(LAYERS)]
    assert {(site.d_k, site.d_v) for site in sites} == {(HIDDEN, HIDDEN)}


def attention_last(block):
    attention = block.self_attn
    del block.self_attn
    block.self_attn = attention


def add_list(block):
    block.extras = nn.ModuleList(nn.Linear(HIDDEN, 6) for _ in range(LAYERS + 2))


def add_bottleneck(block):
    block.per_layer_gate, block.per_layer_projection = nn.Linear(HIDDEN, 6), nn.Linear(6, HIDDEN)


def rename_maps(block):
    """Name gate, down and up as the code of Llama does: with square maps the name decides."""
    mlp = nn.Module()
    mlp.w1, mlp.w2, mlp.w3 = block.mlp.gate_proj, block.mlp.down_proj, block.mlp.up_proj
    block.mlp = mlp


@pytest.mark.parametrize(
    ("change", "inner", "down"),
    [
        (attention_last, HIDDEN, LLAMA_DOWN),
        (add_list, INNER, LLAMA_DOWN),
        (add_bottleneck, INNER, LLAMA_DOWN),
        (rename_maps, HIDDEN, "model.layers.{}.mlp.w2"),
    ],
)
def test_other_maps_in_a_block_are_not_the_down_projection(change, inner, down):
    model = FAMILIES["llama"](intermediate_size=inner)
    for block in model.model.layers:
        change(block)
    assert [site.name for site in find_sites(model)] == [down.format(layer) for layer in range(LAYERS)]


def attention_by_name(block):
    block.self_attn = nn.Sequential(block.self_attn.q_proj, block.self_attn.out_proj)


def attention_by_class(block):
    block.looks_back = block.self_attn
    del block.self_attn


def add_rotation(block):
    block.rotation = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))


@pytest.mark.parametrize("change", [attention_by_name, attention_by_class, add_rotation])
def test_attention_is_known_by_its_name_or_its_class(change):
    """In OPT the maps of the MLP are directly in the block, with no name of a module to prefer them by."""
    model = FAMILIES["opt"](ffn_dim=HIDDEN)
    for block in model.model.decoder.layers:
        change(block)
    assert find_sites(model)[0].name == "model.decoder.layers.0.fc2"


def test_a_longer_tower_beside_the_language_model_is_not_it():
    model = FAMILIES["llama"]()
    model.vision_tower = nn.ModuleList(copy.deepcopy(model.model.layers[0]) for _ in range(LAYERS + 2))
    assert find_sites(model)[0].name == LLAMA_DOWN.format(0)


# Reading and writing


def test_the_type_decides_the_orientation_even_of_square_maps():
    linear, conv, square = nn.Linear(4, 4), Conv1D(4, 4), torch.arange(16.0).view(4, 4)
    linear.weight.data, conv.weight.data = square.clone(), square.clone()
    assert torch.equal(memory_of(linear), square)
    assert torch.equal(memory_of(conv), square.mT)


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
    with raises(ShapeError, "memory_shape"):
        write_memory(make(), torch.zeros(3, 5))


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

    def __init__(self, in_features, out_features):
        super().__init__()
        self.base_layer = nn.Linear(in_features, out_features)
        self.in_features, self.out_features = in_features, out_features


def packed(in_features, out_features):
    module = nn.Linear(in_features, out_features)
    module.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.uint8), requires_grad=False)
    return module


@pytest.mark.parametrize("make", [Linear4bit, QuantLinear, packed, Adapter])
def test_quantized_maps_are_sites_and_wrapped_ones_are_refused(make):
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        block.mlp.gate_proj, block.mlp.up_proj = make(HIDDEN, INNER), make(HIDDEN, INNER)
        block.mlp.down_proj = make(INNER, HIDDEN)
    if make is Adapter:
        assert LLAMA_DOWN.format(0) in refused(model, "adapter").problem
    else:
        assert find_sites(model)[0].name == LLAMA_DOWN.format(0)
        assert is_quantized(model.model.layers[0].mlp.down_proj)


def test_models_that_do_not_predict_the_next_token_are_refused():
    t5 = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    bert = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    refused(AutoModelForSeq2SeqLM.from_config(T5Config(**t5)), "not_causal")
    refused(AutoModelForMaskedLM.from_config(BertConfig(**bert, intermediate_size=24)), "not_causal")
    refused(GPT2Model(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2)), "not_causal")
    refused(nn.Linear(3, 5), "not_causal")


def test_blocks_with_two_mlps_or_none():
    model = FAMILIES["llama"]()
    for block in model.model.layers:
        block.second_mlp = copy.deepcopy(block.mlp)
    assert find_sites(model)[0].name == "model.layers.0.second_mlp.down_proj", "the last one"
    for block in model.model.layers:
        block.mlp = block.second_mlp = nn.Identity()
    assert find_sites(model)[0].name == "model.layers.0.self_attn.o_proj", "what writes into the stream"
    for block in model.model.layers:
        block.self_attn = nn.Identity()
    refused(model, "unknown_architecture")


def test_a_weight_that_several_blocks_own_is_no_site():
    """As in Zamba: writing it would change all of these blocks."""
    model = FAMILIES["llama"]()
    layers = model.model.layers
    layers[1].mlp = layers[0].mlp
    names = [site.name for site in find_sites(model)]
    assert names[0].endswith("0.self_attn.o_proj")
    assert names[2] == LLAMA_DOWN.format(2)


class Mxfp4Experts(nn.Module):
    """The kind of gpt-oss with kernels for MXFP4."""

    def __init__(self):
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(2, HIDDEN, 3, 16, dtype=torch.uint8), requires_grad=False)


def test_quantized_experts_are_refused():
    model = build("gpt_oss")
    for block in model.model.layers:
        block.mlp.experts = Mxfp4Experts()
    assert "without quantization" in refused(model, "quantized_weights").advice


def test_two_stacks_of_blocks_and_unknown_experts_are_refused():
    model = FAMILIES["llama"]()
    model.model.other_layers = copy.deepcopy(model.model.layers)
    refused(model, "several_stacks")
    refused(build("jetmoe"), "unknown_experts")
