"""Quantized models: edits stay beside the matrices, which keep every bit, and undoing them is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.errors import InputError
from rebind.models.sites import is_quantized, memory_of, module_at, write_memory
from rebind.models.weights.quantized import base_matrix, change_of
from tests import tiny
from tests.edit.editors import FACTS, open_editor, rewrite
from tests.support import raises

IDS = torch.arange(3, 15)[None]


def large() -> Any:
    """Return a model with as many channels as libraries need."""
    return tiny.llama(hidden_size=64, intermediate_size=128)


class EightBits(nn.Module):
    """A linear map in eight bits, without a weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("integers", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.integers * self.scale, self.bias)


def replace_linears(make: Callable[[nn.Linear], nn.Module]) -> Any:
    model = large()
    for block in model.model.layers:
        for part in (block.mlp, block.self_attn):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, make(child))
    return model.requires_grad_(False)


def by_torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = large()
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    return model


def by_bitsandbytes(bits: int) -> Any:
    layers = pytest.importorskip("bitsandbytes").nn

    def make(linear: nn.Linear) -> nn.Module:
        shape, bias = (linear.in_features, linear.out_features), linear.bias is not None
        if bits == 4:
            module = layers.Linear4bit(*shape, bias=bias, compute_dtype=torch.float32)
        else:
            module = layers.Linear8bitLt(*shape, bias=bias, has_fp16_weights=False)
        module.load_state_dict(linear.state_dict())
        return module.to("cpu")

    return replace_linears(make)


KINDS = {
    "stand-in": lambda: replace_linears(EightBits),
    "torchao": by_torchao,
    "bitsandbytes-4": lambda: by_bitsandbytes(4),
    "bitsandbytes-8": lambda: by_bitsandbytes(8),
}


def bits_of(model: nn.Module) -> list[bytes]:
    """Return everything that a model stores."""
    stored = []
    for tensor in (*model.parameters(), *model.buffers()):
        parts = [] if type(tensor) in (nn.Parameter, Tensor) else getattr(tensor, "__tensor_flatten__", list)()[:1]
        tensors = [getattr(tensor, name) for names in parts for name in names] or [tensor.detach()]
        stored += [one.detach().contiguous().view(torch.uint8).numpy().tobytes() for one in tensors]
    return stored


@pytest.mark.parametrize("method", ["memit", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_edits_stay_beside_a_quantized_model(kind, method):
    model = KINDS[kind]()
    editor = open_editor(model)
    site = module_at(model, editor.sites[1].name)
    assert is_quantized(site)
    bits, plain = bits_of(model), model(IDS).logits
    before = editor.score(FACTS[:1])[0].nll
    edit = rewrite(editor, FACTS[0], method=method)
    assert editor.score(FACTS[:1])[0].nll < before
    assert bits_of(model) == bits, "no quantized matrix changed"
    changed = {name for name, module in model.named_modules() if change_of(module) is not None}
    assert changed == set(edit.sites)
    editor.undo(edit.id)
    assert torch.equal(model(IDS).logits, plain), "undo is exact"


def test_a_matrix_is_read_by_its_products_and_written_beside():
    linear = large().model.layers[0].mlp.down_proj
    module = EightBits(linear)
    matrix = module.integers * module.scale
    assert torch.equal(base_matrix(module), matrix)
    other, x = torch.randn_like(matrix), torch.randn(4, matrix.shape[1])
    write_memory(module, other)
    torch.testing.assert_close(memory_of(module), other)
    torch.testing.assert_close(module(x), x @ other.mT)
    write_memory(module, matrix)
    assert change_of(module) is None
    assert torch.equal(module(x), x @ matrix.mT)


def test_a_checkpoint_of_a_quantized_model_would_lack_its_edits(tmp_path):
    editor = open_editor(KINDS["stand-in"]())
    rewrite(editor, FACTS[0])
    with raises(InputError, "quantized_checkpoint"):
        editor.save(tmp_path / "model")
    assert editor.export_peft(tmp_path / "adapter").rank > 0
