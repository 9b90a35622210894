"""Published models with `rebind.optimize`: the same logits, gradients and text, and back again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rebind
from rebind.errors import InputError
from tests.model_types import build
from tests.support import assert_close

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid"]
EVERY = pytest.mark.parametrize("kind", FAMILIES)
GATED_DELTA = pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "kimi_linear"])


def tokens(model, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model.config.vocab_size, shape, generator=generator)


def loss_and_gradients(model, ids) -> list[torch.Tensor]:
    loss = model(ids, labels=ids, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@EVERY
def test_logits_and_gradients(kind):
    """As near to a run in float64 as those of transformers, which computes in float32 whatever it is given."""
    model = build(kind).eval().requires_grad_()
    ids = tokens(model, 2, 70)
    expected = [model(ids).logits.detach(), *loss_and_gradients(model, ids)]
    with rebind.optimize(model):
        got = [model(ids).logits.detach(), *loss_and_gradients(model, ids)]
        precise = model.double()
        truth = [precise(ids).logits.detach(), *loss_and_gradients(precise, ids)]
    for one, other, true in zip(got, expected, truth, strict=True):
        size = true.norm()
        theirs, ours = (other - true).norm(), (one - true).norm()
        assert ours <= 2 * theirs + 1e-5 * size
        assert_close(one, other, 1e-3)


@EVERY
@torch.no_grad()
def test_bfloat16(kind):
    """No farther from the same model in float32 than transformers is."""
    model = build(kind).eval()
    ids = tokens(model, 2, 70)
    true = model(ids).logits
    model = model.bfloat16()
    theirs = (model(ids).logits - true).norm()
    with rebind.optimize(model):
        out = model(ids).logits
    assert out.dtype == torch.bfloat16
    assert (out - true).norm() <= 1.5 * theirs


@EVERY
@torch.no_grad()
def test_greedy_text_with_left_padding(kind):
    model = build(kind).eval()
    ids = tokens(model, 2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "output_logits": True}
    expected = model.generate(ids, **options, return_dict_in_generate=True)
    rebind.optimize(model)
    got = model.generate(ids, **options, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(torch.stack(got.logits), torch.stack(expected.logits), 1e-3)


@EVERY
@torch.no_grad()
def test_a_cache_in_segments(kind):
    model = build(kind).eval()
    ids = tokens(model, 2, 30)
    rebind.optimize(model)
    expected, cache, pieces = model(ids).logits, None, []
    for piece in ids.split([2, 17, 1, 10], dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, dim=1), expected, 1e-4)


@GATED_DELTA
@torch.no_grad()
def test_packed_documents_are_kept_apart(kind):
    """transformers refuses them without further packages."""
    model = build(kind).eval()
    ids, lengths = tokens(model, 1, 24), (5, 1, 18)
    bounds = torch.tensor([0, 5, 6, 24], dtype=torch.int32)
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
    expected = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
    with rebind.optimize(model):
        lengths_of_flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 18, "max_length_k": 18}
        for named in (lengths_of_flash, {**lengths_of_flash, "seq_idx": owner}):
            out = model(ids, position_ids=position_ids, use_cache=False, **named)
            assert_close(out.logits, expected, 1e-4)


def test_only_this_model_changes_and_only_while_it_should():
    model, other = build("qwen3_next").eval(), build("qwen3_next").eval()
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    assert not any("forward" in vars(layer) for layer in layers)
    with rebind.optimize(model) as inside:
        assert inside is model
        assert all("forward" in vars(layer) for layer in layers)
        assert not any("forward" in vars(module) for module in other.modules())
    assert not any("forward" in vars(layer) for layer in layers)
    report = rebind.optimize(model)
    assert repr(report) == "Optimization(3 layers: Qwen3NextGatedDeltaNet)"
    with rebind.optimize(model):  # was on before, and stays on
        pass
    assert all("forward" in vars(layer) for layer in layers)
    with pytest.raises(KeyError), rebind.optimize(other):
        raise KeyError
    assert not any("forward" in vars(module) for module in other.modules())
    rebind.optimize(model, off=True)
    assert not any("forward" in vars(module) for module in model.modules())
    rebind.optimize(model, off=True)  # nothing to undo


@EVERY
def test_norms_that_multiply_by_silu_of_a_gate_run_on_rebind(kind):
    model = build(kind).eval()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNormGated")]
    assert norms
    with rebind.optimize(model):
        assert all(("forward" in vars(norm)) == (norm.activation == "silu") for norm in norms)
    assert not any("forward" in vars(norm) for norm in norms)


def test_a_copy_runs_by_itself_and_weights_are_saved_as_before(tmp_path):
    model = build("qwen3_next").eval()
    ids = tokens(model, 1, 9)
    names = set(model.state_dict())
    rebind.optimize(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert model(ids).logits.abs().max() == 0
        assert twin(ids).logits.abs().max() > 0, "the copy uses its own weights"
    rebind.optimize(twin, off=True)
    assert not any("forward" in vars(module) for module in twin.modules())
    assert set(model.state_dict()) == names
    twin.save_pretrained(tmp_path)
    assert_close(type(twin).from_pretrained(tmp_path)(ids).logits, twin(ids).logits)


def test_a_model_that_is_saved_as_a_whole_is_loaded_as_before_and_can_be_optimized(tmp_path):
    model = build("qwen3_next").eval()
    ids = tokens(model, 1, 9)
    expected = model(ids).logits
    rebind.optimize(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(ids).logits, expected)
    assert len(rebind.optimize(loaded).layers) == 3
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    rebind.optimize(loaded, off=True)
    assert not any("forward" in vars(module) for module in loaded.modules())


def test_with_the_hooks_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = build("qwen3_next").eval()
    ids = tokens(model, 1, 9)
    expected = model(ids).logits
    hooked = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    rebind.optimize(hooked)
    assert_close(hooked(ids).logits, expected, 1e-4)
    rebind.optimize(hooked, off=True)
    assert torch.equal(hooked(ids).logits, expected)


def test_compiled_models_run_on_rebind_too(monkeypatch):
    from rebind.compat import optimize as module

    model = build("qwen3_next").eval()
    ids = tokens(model, 1, 9)
    rebind.optimize(model)
    expected, calls = model(ids).logits, []
    original = module.fla.chunk_gated_delta_rule
    monkeypatch.setattr(module.fla, "chunk_gated_delta_rule", lambda *a, **k: calls.append(1) or original(*a, **k))
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        assert_close(compiled(ids, use_cache=False).logits, expected, 1e-4)
    assert calls


def test_a_model_without_such_layers_is_refused():
    for model in (nn.Linear(2, 2), build("llama")):
        with pytest.raises(InputError) as caught:
            rebind.optimize(model)
        assert caught.value.code == "nothing_to_optimize"
    with pytest.raises(InputError) as caught:
        rebind.optimize("Qwen/Qwen3-Next-80B-A3B")
    assert caught.value.code == "not_a_model"
