"""Language models: decoding, padding, saving, training, and the input they refuse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Trainer,
    TrainingArguments,
)

from rebind.cuda_graphs import record_graph
from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.nn import RebindCache, RebindConfig, RebindForCausalLM, RebindModel, preset
from rebind.nn.lm import KINDS
from rebind.nn.lm.model import Block
from rebind.nn.seq2seq import SEQ2SEQ_KINDS
from tests.nn.test_seq2seq import model as seq2seq_model
from tests.support import assert_close, raises

VOCABULARY = 31
EVERY = pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
HYBRID = ["gated_delta", "attention", "performer-delta", "ttt-linear"]


def config(kind="gated_delta", **changes) -> RebindConfig:
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 4 if kind == "hybrid" else 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "layer_kinds": HYBRID if kind == "hybrid" else kind,
        "ttt_mini_batch": 4,
        "initializer_range": 0.2,  # far from 0, so that tokens differ
        "pad_token_id": 0,
    }
    return RebindConfig(**{**options, **changes})


def model(kind="gated_delta", dtype=torch.float64, **changes) -> RebindForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RebindForCausalLM(config(kind, **changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# Decoding


@EVERY
@pytest.mark.parametrize("cuts", [[1] * 20, [6, 1, 13]], ids=["tokens", "segments"])
@torch.no_grad()
def test_logits_in_pieces_are_those_of_one_pass(kind, cuts):
    lm, ids = model(kind), tokens(2, 20)
    expected, cache, pieces = lm(ids).logits, None, []
    for piece in ids.split(cuts, dim=1):
        out = lm(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, dim=1), expected)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("kind", ["hybrid", "mamba2", "ttt-mlp"])
def test_a_padded_run_reads_no_value(kind, monkeypatch):
    """A CUDA graph could not record it otherwise. Fake tensors have no values to read."""
    lm, ids = model(kind), tokens(3, 12)
    past = lm(ids[:, :5], use_cache=True).past_key_values.detach()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = lm(ids[:, 5:], attention_mask=torch.ones(3, 12), past_key_values=past, labels=ids[:, 5:])
        out.loss.backward()
    assert out.logits.shape == (3, 7, VOCABULARY)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@EVERY
def test_a_padded_run_can_be_recorded(kind):
    lm = model(kind, torch.float32).cuda()
    ids = tokens(3, 12).cuda()
    mask = torch.arange(12, device="cuda") >= torch.tensor([[0], [2], [5]], device="cuda")
    expected, outputs = lm(ids, attention_mask=mask).logits, []
    record_graph(lambda: outputs.append(lm(ids, attention_mask=mask).logits))()
    assert_close(outputs[-1][mask], expected[mask], 1e-5)


@EVERY
def test_left_padded_prompts_generate_what_they_do_alone(kind):
    lm = model(kind)
    prompts = [tokens(1, length, seed=length) for length in (3, 9, 6)]
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([torch.nn.functional.pad(prompt, (width - prompt.shape[1], 0)) for prompt in prompts])
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    together = lm.generate(ids, attention_mask=(ids != 0).long(), **options)
    for row, prompt in enumerate(prompts):
        alone = lm.generate(prompt, **options)
        assert torch.equal(together.sequences[row, width:], alone.sequences[0, prompt.shape[1] :])
        for one, other in zip(together.logits, alone.logits, strict=True):
            assert_close(one[row], other[0], 1e-9)


@EVERY
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_a_cache_is_generate_without(kind, beams):
    lm, ids = model(kind), tokens(2, 5)
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(lm.generate(ids, **options), lm.generate(ids, use_cache=False, **options))


def test_a_conversation_continues_from_its_cache():
    lm, ids = model("delta"), tokens(1, 5)
    first = lm.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(1, 3, seed=1)], dim=1)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(turn)}
    continued = lm.generate(turn, past_key_values=first.past_key_values, **options)
    assert torch.equal(continued, lm.generate(turn, **options))


@torch.no_grad()
def test_only_the_cache_of_attention_grows():
    lm, hybrid = model("delta"), model(["delta", "attention"])
    sizes = [(lm(tokens(1, n)).past_key_values.size, hybrid(tokens(1, n)).past_key_values.size) for n in (3, 30)]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] - sizes[0][1] == 27 * 2 * 16
    assert hybrid.state_size(30) - hybrid.state_size(3) == 27 * 2 * 16


# Saving


@pytest.mark.parametrize("kind", [*KINDS, "hybrid", *SEQ2SEQ_KINDS])
def test_saved_and_loaded_models_are_the_same(kind, tmp_path):
    is_pair = kind in SEQ2SEQ_KINDS
    lm, ids = (seq2seq_model if is_pair else model)(kind, torch.float32), tokens(2, 7).clamp(max=28)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.01  # away from where it would be initialized
    lm.save_pretrained(tmp_path)
    loaded = (AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM).from_pretrained(tmp_path)
    assert type(loaded) is type(lm)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert torch.equal(loaded(ids, labels=ids).logits, lm(ids, labels=ids).logits)
    if not is_pair:
        trunk = AutoModel.from_pretrained(tmp_path)
        assert isinstance(trunk, RebindModel)
        assert torch.equal(trunk(ids).last_hidden_state, lm.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("kind", "part", "least", "most"),
    [
        ("gated_delta", "A_log", 0.0, 2.8),
        ("gated_delta", "conv.weight", -0.5, 0.5),
        ("ttt-mlp", "initial_2", -0.2, 0.2),
        ("hopfield", "patterns", -6.0, 6.0),
    ],
)
def test_what_a_checkpoint_lacks_is_initialized(kind, part, least, most, tmp_path):
    model(kind, torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: 100 + weight for name, weight in load_file(file).items() if part not in name}
    save_file(weights, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if part in name:
            assert least <= parameter.min() < parameter.max() <= most
        else:
            assert parameter.abs().max() > 50, f"{name} was not loaded"


@EVERY
@torch.no_grad()
def test_bfloat16_loads_and_generates(kind, tmp_path):
    lm, ids = model(kind, torch.float32, initializer_range=0.05), tokens(2, 7)
    lm.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    # TTT starts steep: the inner LayerNorm divides by the size of W_0 k, which is small.
    assert_close(half(ids).logits.float(), lm(ids).logits, 0.3 if kind.startswith("ttt") else 0.1)
    assert half.generate(ids, max_new_tokens=3, attention_mask=torch.ones_like(ids)).shape == (2, 10)


# Training


@pytest.mark.parametrize("kind", [*KINDS, "hybrid", *SEQ2SEQ_KINDS])
def test_gradients_reach_every_parameter_checkpointed_or_not(kind):
    build = seq2seq_model if kind in SEQ2SEQ_KINDS else model
    lm, ids = build(kind, tie_word_embeddings=False).train(), tokens(2, 9).clamp(max=28)
    lm(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    for name, gradient in expected.items():
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0, f"the gradient of {name} is 0"
    lm.zero_grad()
    lm.gradient_checkpointing_enable()
    assert all(block.gradient_checkpointing for block in lm.modules() if isinstance(block, Block))
    lm(ids, labels=ids).loss.backward()
    for name, parameter in lm.named_parameters():
        assert_close(parameter.grad, expected[name])


@EVERY
def test_autocast_trains_and_decodes(kind):
    lm, ids = model(kind, torch.float32, initializer_range=0.05), tokens(2, 9)
    expected = lm(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(ids, labels=ids).loss
        loss.backward()
        cache = lm(ids, attention_mask=(ids > 3).long()).past_key_values
        with torch.no_grad():
            later = lm(ids[:, :1], past_key_values=cache).logits
    assert_close(loss, expected, 0.05)
    assert torch.isfinite(later).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in lm.parameters())


def test_segments_train_on_the_state_and_not_through_it():
    """Table 4 of Schlag et al.: the state is carried over, the gradient is not."""
    lm, ids = model("linear-delta").train(), tokens(1, 12)
    cache = RebindCache(len(lm.model.layers))
    lm(ids[:, :6], past_key_values=cache)
    assert cache.states[0].memory.requires_grad
    cache.detach()
    assert not cache.states[0].memory.requires_grad
    out = lm(ids[:, 6:], past_key_values=cache)
    assert_close(out.logits, lm(ids).logits[:, 6:])
    out.logits.sum().backward()


def test_it_learns_under_the_trainer(tmp_path):
    lm = model("gated_delta", torch.float32, initializer_range=0.02)
    rows = [{"input_ids": row, "labels": row} for row in tokens(1, 12).repeat(8, 1)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=30, per_device_train_batch_size=8, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        bf16=True,
    )  # fmt: skip
    before = lm(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss
    trainer = Trainer(lm, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    after = lm.eval()(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss
    assert after < before / 2


@pytest.mark.parametrize("part", ["mixer.o_proj", "mlp.down_proj"])
def test_dropout_works_in_training_only(part):
    """After the layer and after the MLP; each is tested with the other at zero."""
    block = model(dropout=0.5, dtype=torch.float32).model.layers[0]
    torch.nn.init.zeros_(block.get_submodule(part).weight)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x, None, None)[0], block(x, None, None)[0])
    block.train()
    assert not torch.equal(block(x, None, None)[0], block(x, None, None)[0])


def test_the_loss_is_the_next_tokens_cross_entropy():
    lm, ids = model(tie_word_embeddings=False), tokens(2, 9)
    assert lm.lm_head.weight is not lm.model.embed_tokens.weight
    labels = ids.masked_fill(torch.arange(9) < 4, -100)
    logits = lm(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten())
    assert_close(lm(ids, labels=labels).loss, expected, 1e-6)
    assert_close(lm(ids, labels=labels, num_items_in_batch=20).loss, expected / 2, 1e-6)
    assert_close(lm(ids, logits_to_keep=2).logits, logits[:, -2:], 1e-12)
    assert_close(lm(ids, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]], 1e-12)


# Presets


@pytest.mark.parametrize(
    ("name", "kind", "millions", "state"),
    [
        ("schlag-small", "linear-delta", 43.8, 16 * 8 * 16 * 16),
        ("schlag-small", "dpfp-delta", 43.8, 16 * 8 * 32 * 16),
        ("schlag-medium", "linear-delta", 89.6, 131_072),
        ("modern-10m", "delta", 10.6, 8 * 4 * 64 * 64),
        ("modern-60m", "gated_delta", 58.3, 12 * 8 * 64 * 64),
        ("modern-350m", "delta", 341.6, 24 * 8 * 128 * 128),
    ],
)
def test_presets_have_their_sizes(name, kind, millions, state):
    """Parameters, and the state: 0.13M numbers for the medium Delta Net, as in Schlag et al."""
    with torch.device("meta"):
        lm = RebindForCausalLM(preset(name, kind))
    assert round(sum(parameter.numel() for parameter in lm.parameters()) / 1e6, 1) == millions
    assert lm.state_size() == state
    small = preset(name, ["attention", "delta"], vocab_size=50, num_hidden_layers=4)
    assert (small.kinds, small.vocab_size) == (["attention", "delta"] * 2, 50)


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"layer_kinds": "gated-delta"}, UnknownNameError, "unknown_layer_kind"),
        ({"layer_kinds": ["delta"] * 3}, ShapeError, "pattern_does_not_fit"),
        ({"layer_kinds": []}, ShapeError, "pattern_does_not_fit"),
        ({"num_attention_heads": 3}, ShapeError, "indivisible_heads"),
        ({"vocab_size": 0}, InputError, "invalid_size"),
        ({"mlp": "swigloo"}, UnknownNameError, "unknown_mlp"),
        ({"mlp": "experts", "num_experts_per_tok": 9}, InputError, "too_many_experts"),
        (
            {"mlp": "experts", "router": "sigmoid", "router_groups": 4, "num_experts_per_tok": 3},
            InputError,
            "too_many_experts",
        ),
        ({"decay_gate": "sigmoid", "lowest_decay": 5.0}, InputError, "growing_decay"),
        ({"layer_kinds": "attention", "rotary_fraction": 1.5}, InputError, "invalid_setting"),
        ({"layer_kinds": "attention", "rope_theta": 0.0}, InputError, "invalid_setting"),
        ({"layer_kinds": "attention", "num_key_value_heads": 0}, InputError, "invalid_size"),
    ],
)
def test_bad_configs_are_refused(changes, error, code):
    with raises(error, code):
        model(**changes)


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda lm, ids: preset("schlag-smal"), UnknownNameError, "unknown_preset"),
        (lambda lm, ids: lm(ids[0]), ShapeError, "wrong_token_shape"),
        (lambda lm, ids: lm(ids, attention_mask=torch.ones(2, 4)), ShapeError, "wrong_attention_mask_shape"),
        (lambda lm, ids: lm(ids, past_key_values=RebindCache(3)), InputError, "cache_of_other_model"),
        (lambda lm, ids: lm(ids).past_key_values.crop(2), InputError, "cache_not_croppable"),
        (lambda lm, ids: lm(), InputError, "wrong_tokens"),
        (lambda lm, ids: lm(ids, inputs_embeds=lm.model.embed_tokens(ids)), InputError, "wrong_tokens"),
        (lambda lm, ids: lm(ids, labels=ids[:, 1:]), ShapeError, "wrong_labels_shape"),
    ],
)
def test_bad_calls_are_refused(call, error, code):
    with raises(error, code):
        call(model(), tokens(2, 5))


def test_a_config_exposes_what_layers_have(tmp_path):
    options = {
        "layer_kinds": ["kda", "gated_delta", "attention"],
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "memory_heads": 6,
        "key_heads": 3,
        "d_k": 5,
        "d_v": 7,
        "conv_bias": True,
        "max_beta": 2.0,
        "decay_gate": "sigmoid",
        "decay_rank": 4,
        "lowest_decay": -3.0,
        "output_gate": "sigmoid",
        "output_gate_rank": 3,
        "output_gate_bias": True,
        "query_scale": 0.5,
        "key_norm_eps": 1e-6,
        "norm_eps": 1e-5,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "qk_norm": "head",
        "sliding_window": 5,
        "rotary_fraction": 0.4,
        "attention_gate": "sigmoid",
    }
    lm, ids = model(**options), tokens(2, 12)
    kda, _, attention = (block.mixer for block in lm.model.layers)
    assert (kda.heads, kda.key_heads, kda.d_k, kda.d_v) == (6, 3, 5, 7)
    assert (kda.gates.max_beta, kda.gates.decay.gate.lowest, kda.gates.decay.expand.in_features) == (2.0, -3.0, 4)
    assert (kda.conv.bias.shape, kda.norm.eps, kda.output_gate.rank) == ((6 * 7 + 2 * 15,), 1e-5, 3)
    assert (attention.key_heads, attention.head_dim, attention.window, attention.qk_norm) == (2, 6, 5, "head")
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(again(ids).logits, lm(ids).logits)
    for name, value in options.items():
        assert getattr(again.config, name) == value


@pytest.mark.parametrize("name", ["layer_kind", "hiden_size", "output_gates", "key_head", "num_layers", "n_head"])
def test_a_misspelled_field_is_refused(name):
    """transformers would keep it as an attribute that nothing reads."""
    with raises(InputError, "unknown_field"):
        RebindConfig(**{name: 2})


def test_other_fields_of_transformers_are_kept():
    config = RebindConfig(sep_token_id=3, tokenizer_class="Tokens", torch_dtype="float32", _name_or_path="here")
    assert config.sep_token_id == 3
    assert RebindConfig.from_dict(config.to_dict()).tokenizer_class == "Tokens"
