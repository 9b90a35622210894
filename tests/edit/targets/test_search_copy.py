"""A copy that was sped up computes what the model computes."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rebind.edit.targets.search_copy import MAX_KEYS, NAME, FusedRMSNorm, short_attention, speed_up
from tests.families import FAMILIES


def _module(heads: int, key_heads: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.num_key_value_groups = heads // key_heads  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("keys", [9, MAX_KEYS + 3])
def test_attention_is_that_of_torch(heads, key_heads, keys):
    """With its gradients, and with some keys hidden from each row."""
    torch.manual_seed(0)
    q = torch.randn(3, heads, 5, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, key_heads, keys, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seen = torch.rand(3, 1, 5, keys) < 0.7
    seen[..., 0] = True
    bias = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    module = _module(heads, key_heads)
    slope = torch.randn(3, 5, heads, 8, dtype=torch.float64)
    found = short_attention(module, q, k, v, bias, scaling=0.3)[0]
    expected = sdpa_attention_forward(module, q, k, v, seen, scaling=0.3)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(found, (q, k, v), slope), torch.autograd.grad(expected, (q, k, v), slope), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_without_a_mask_it_is_causal():
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    module = _module(4, 4)
    torch.testing.assert_close(
        short_attention(module, q, k, v, None)[0], sdpa_attention_forward(module, q, k, v, None)[0]
    )


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_computes_the_same(name):
    model = FAMILIES[name](seed=3).eval()
    if name.startswith("rebind"):
        model = model.double()  # in float32, norms of small reads magnify rounding
    ids = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        speed_up(model)
        after = model(input_ids=ids, attention_mask=mask).logits
    is_token = mask.bool()
    torch.testing.assert_close(after[is_token], before[is_token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "rebind-linear-sum"])
def test_inputs_wider_than_a_norms_weight_go_to_the_model(name):
    """torch has no kernel for them, and warns; reads of a memory are float32 in a narrow model."""
    model = FAMILIES[name](seed=3).to(torch.bfloat16)
    norms = {path: module for path, module in model.named_modules() if path.endswith("norm")}
    inputs = {path: torch.randn(3, *norm.weight.shape) for path, norm in norms.items()}
    before = {path: norm(inputs[path]) for path, norm in norms.items()}
    speed_up(model)
    assert norms
    for path, norm in norms.items():
        assert isinstance(norm.forward, FusedRMSNorm)
        assert torch.equal(norm(inputs[path]), before[path])


def test_a_gemma_keeps_its_own_norms_and_attention():
    llama, gemma = FAMILIES["llama"](seed=0), FAMILIES["gemma2"](seed=0)
    gemma.set_attn_implementation("eager")  # the default of some versions of transformers, but not of all
    for model in (llama, gemma):
        speed_up(model)
    assert llama.config._attn_implementation == NAME
    assert any(isinstance(getattr(module, "forward", None), FusedRMSNorm) for module in llama.modules())
    assert not any(isinstance(getattr(module, "forward", None), FusedRMSNorm) for module in gemma.modules())
    assert gemma.config._attn_implementation != NAME, "its attention is capped, which plain products are not"
