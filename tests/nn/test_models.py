"""Language models: decoding, padding, saving, training, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

from rebind.cuda_graphs import replay_of
from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.memory import checks
from rebind.memory.features import Favor
from rebind.nn import PRESETS, RebindCache, RebindConfig, RebindForCausalLM, RebindModel, preset
from rebind.nn.lm.kinds import KINDS
from tests.support import assert_close

VOCABULARY = 31
EVERY = pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
HYBRID = ["gated-delta", "attention", "performer-delta", "ttt-linear"]


def config(kind="gated-delta", **changes) -> RebindConfig:
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


def model(kind="gated-delta", dtype=torch.float64, **changes) -> RebindForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RebindForCausalLM(config(kind, **changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# Decoding


@EVERY
@torch.no_grad()
def test_logits_token_by_token_are_the_parallel_ones(kind):
    lm, ids = model(kind), tokens(2, 11)
    expected, cache, steps = lm(ids).logits, None, []
    for token in ids.split(1, dim=1):
        out = lm(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert_close(torch.cat(steps, dim=1), expected)
    assert cache.get_seq_length() == 11


@EVERY
def test_a_padded_run_looks_at_no_value(kind, monkeypatch):
    """As what a CUDA graph records must not: here of tensors without any."""
    lm, ids = model(kind), tokens(3, 12)
    past = lm(ids[:, :5], use_cache=True).past_key_values.detach()
    monkeypatch.setattr(checks, "_hidden", lambda flag: True)
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
    expected, said = lm(ids, attention_mask=mask).logits, []
    replay_of(lambda: said.append(lm(ids, attention_mask=mask).logits))()
    assert_close(said[-1][mask], expected[mask], 1e-5)


@EVERY
@torch.no_grad()
def test_segments_with_their_state_are_one_pass(kind):
    lm, ids = model(kind), tokens(2, 20)
    expected, cache, pieces = lm(ids).logits, RebindCache(len(lm.model.layers)), []
    for piece in ids.split([6, 1, 13], dim=1):
        pieces.append(lm(piece, past_key_values=cache).logits)
    assert_close(torch.cat(pieces, dim=1), expected)


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
def test_generate_with_a_cache_is_generate_without(kind):
    lm, ids = model(kind), tokens(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(lm.generate(ids, **options), lm.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("kind", ["gated-delta", "hybrid", "ttt-mlp"])
def test_beams_carry_their_own_states(kind):
    lm, ids = model(kind), tokens(2, 5)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(lm.generate(ids, **options), lm.generate(ids, use_cache=False, **options))


def test_a_conversation_goes_on_from_its_cache():
    lm, ids = model("delta"), tokens(1, 5)
    first = lm.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    asked = torch.cat([first.sequences, tokens(1, 3, seed=1)], dim=1)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(asked)}
    gone_on = lm.generate(asked, past_key_values=first.past_key_values, **options)
    assert torch.equal(gone_on, lm.generate(asked, **options))


@torch.no_grad()
def test_the_cache_does_not_grow_but_for_attention():
    lm, hybrid = model("delta"), model(["delta", "attention"])
    sizes = [(lm(tokens(1, n)).past_key_values.size, hybrid(tokens(1, n)).past_key_values.size) for n in (3, 30)]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] - sizes[0][1] == 27 * 2 * 16
    assert hybrid.state_size(30) - hybrid.state_size(3) == 27 * 2 * 16


def test_a_cache_cannot_be_wound_back():
    cache = model()(tokens(1, 4)).past_key_values
    with pytest.raises(InputError, match="cannot take back 2 tokens, a rewritten memory holds no past"):
        cache.crop(2)


# Saving


@EVERY
def test_saved_and_loaded_models_are_the_same(kind, tmp_path):
    lm, ids = model(kind, torch.float32), tokens(2, 7)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.01  # away from where it would be initialised
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, RebindForCausalLM)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert torch.equal(loaded(ids).logits, lm(ids).logits)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert isinstance(trunk, RebindModel)
    assert torch.equal(trunk(ids).last_hidden_state, lm.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("kind", "part", "least", "most"),
    [
        ("gated-delta", "A_log", 0.0, 2.8),
        ("gated-delta", "conv.weight", -0.5, 0.5),
        ("ttt-mlp", "initial_2", -0.2, 0.2),
        ("hopfield", "patterns", -6.0, 6.0),
    ],
)
def test_what_a_checkpoint_lacks_is_initialised(kind, part, least, most, tmp_path):
    model(kind, torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = {name: 100 + weight for name, weight in load_file(file).items() if part not in name}
    save_file(held, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if part in name:
            assert least <= parameter.min() < parameter.max() <= most
        else:
            assert parameter.abs().max() > 50, f"{name} was drawn anew"


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


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_where_said(tied):
    lm = model(tie_word_embeddings=tied)
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) is tied


# Training


@EVERY
def test_gradients_reach_every_parameter(kind):
    lm, ids = model(kind).train(), tokens(2, 9)
    lm(ids, labels=ids).loss.backward()
    for name, parameter in lm.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        assert torch.isfinite(parameter.grad).all()
        assert parameter.grad.abs().max() > 0, f"the gradient of {name} is 0"


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


def test_the_loss_is_the_next_tokens_cross_entropy():
    lm, ids = model(), tokens(2, 9)
    labels = ids.masked_fill(torch.arange(9) < 4, -100)
    expected = torch.nn.functional.cross_entropy(lm(ids).logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten())
    assert_close(lm(ids, labels=labels).loss.double(), expected, 1e-6)


@pytest.mark.parametrize("kind", ["gated-delta", "hybrid", "ttt-mlp"])
def test_checkpointed_gradients_are_the_same(kind):
    lm, ids = model(kind).train(), tokens(2, 9)
    lm(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    lm.gradient_checkpointing_enable()
    assert all(block.gradient_checkpointing for block in lm.model.layers)
    lm(ids, labels=ids).loss.backward()
    for name, parameter in lm.named_parameters():
        assert_close(parameter.grad, expected[name])


def test_segments_train_on_the_state_and_not_through_it():
    """Seed 002's Table 4: the state is carried over, the gradient is cut."""
    lm, ids = model("linear-delta").train(), tokens(1, 12)
    cache = RebindCache(len(lm.model.layers))
    lm(ids[:, :6], past_key_values=cache)
    assert cache.states[0].memory.requires_grad
    cache.detach()
    assert not cache.states[0].memory.requires_grad
    out = lm(ids[:, 6:], past_key_values=cache)
    assert_close(out.logits, lm(ids).logits[:, 6:])
    out.logits.sum().backward()


def test_right_padding_changes_no_loss():
    lm, ids = model("hybrid"), tokens(1, 6)
    padded = torch.nn.functional.pad(ids, (0, 3))
    labels = padded.masked_fill(padded == 0, -100)
    got = lm(padded, attention_mask=(padded != 0).long(), labels=labels).loss
    assert_close(got, lm(ids, labels=ids).loss, 1e-6)


def test_it_learns_under_the_trainer(tmp_path):
    lm = model("gated-delta", torch.float32, initializer_range=0.02)
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
def test_dropout_works_while_training_only(part):
    """After the layer and after the MLP: each is seen with the other silenced."""
    block = model(dropout=0.5, dtype=torch.float32).model.layers[0]
    torch.nn.init.zeros_(block.get_submodule(part).weight)
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x, None, None)[0], block(x, None, None)[0])
    block.train()
    assert not torch.equal(block(x, None, None)[0], block(x, None, None)[0])


def test_logits_are_computed_where_asked():
    lm, ids = model(), tokens(2, 6)
    logits = lm(ids).logits
    assert torch.equal(lm(ids, logits_to_keep=2).logits, logits[:, -2:])
    assert torch.equal(lm(ids, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]])


# Presets


@pytest.mark.parametrize(
    ("name", "kind", "millions", "state"),
    [
        ("schlag-small", "linear-delta", 43.8, 16 * 8 * 16 * 16),
        ("schlag-small", "dpfp-delta", 43.8, 16 * 8 * 32 * 16),
        ("schlag-medium", "linear-delta", 89.6, 131_072),
        ("modern-10m", "delta", 10.6, 8 * 4 * 64 * 64),
        ("modern-60m", "gated-delta", 58.3, 12 * 8 * 64 * 64),
        ("modern-350m", "delta", 341.6, 24 * 8 * 128 * 128),
    ],
)
def test_presets_have_their_sizes(name, kind, millions, state):
    """Parameters, and seed 002's state: 0.13M numbers for the medium Delta Net."""
    with torch.device("meta"):
        lm = RebindForCausalLM(preset(name, kind))
    assert round(sum(parameter.numel() for parameter in lm.parameters()) / 1e6, 1) == millions
    assert lm.state_size() == state


def test_a_performer_built_on_meta_knows_its_projection():
    with torch.device("meta"):
        lm = RebindForCausalLM(config("performer-delta"))
    assert torch.equal(lm.model.layers[0].mixer.phi.projection, Favor(8, m=16).projection.float())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_changes(name):
    small = preset(name, ["attention", "delta"], vocab_size=50, num_hidden_layers=4)
    assert small.kinds == ["attention", "delta"] * 2
    assert small.vocab_size == 50
    assert preset(name).kinds[0] in KINDS


# What is refused


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layer_kinds": "gated_delta"}, UnknownNameError, "unknown layer kind .* did you mean 'gated-delta'"),
        ({"layer_kinds": ["delta"] * 3}, ShapeError, "names 3 layers and num_hidden_layers is 2, expected"),
        ({"layer_kinds": []}, ShapeError, "names 0 layers"),
        ({"num_attention_heads": 3}, ShapeError, "hidden_size is 16 and num_attention_heads 3, expected a multiple"),
        ({"vocab_size": 0}, InputError, "vocab_size is 0, expected a whole number of 1 or more"),
        ({"mlp": "swigloo"}, UnknownNameError, "did you mean 'swiglu'"),
        ({"dropout": 1.0}, InputError, "dropout is 1.0, expected 0 or more and less than 1"),
        ({"rope_theta": "abc"}, InputError, "rope_theta is 'abc', expected a number above 0"),
        ({"norm_eps": "x"}, InputError, "norm_eps is 'x', expected a number above 0"),
        ({"initializer_range": -1}, InputError, "initializer_range is -1, expected a number above 0"),
        ({"layer_kinds": 5}, InputError, "layer_kinds is 5, expected a kind or a list of kinds"),
    ],
)
def test_bad_configs_are_explained(changes, error, says):
    with pytest.raises(error, match=says):
        config(**changes)


def test_bad_calls_are_explained():
    lm, ids = model(), tokens(2, 5)
    with pytest.raises(UnknownNameError, match="unknown preset 'schlag-smal'.* did you mean 'schlag-small'"):
        preset("schlag-smal")
    with pytest.raises(InputError, match="got neither of input_ids and inputs_embeds"):
        lm()
    with pytest.raises(ShapeError, match=r"input_ids is \[5\], expected \[B, T\]"):
        lm(ids[0])
    with pytest.raises(ShapeError, match=r"attention_mask is \[2, 4\], expected \[2, 5\] or wider"):
        lm(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(InputError, match=r"past_key_values is RebindCache\(3 layers.* expected a RebindCache of 2"):
        lm(ids, past_key_values=RebindCache(3))
