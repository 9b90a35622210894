"""The encoder-decoder: decoding, padding, beams, saving, training, and the input it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from rebind.errors import InputError, ShapeError, UnknownNameError
from rebind.nn import RebindForSeq2SeqLM, RebindSeq2SeqCache, RebindSeq2SeqConfig
from rebind.nn.seq2seq import SEQ2SEQ_KINDS
from tests.support import assert_close, raises

VOCABULARY = 29
PAD, START, END = 0, 1, 2
EVERY = pytest.mark.parametrize("kind", SEQ2SEQ_KINDS)


def config(kind="dpfp", **changes) -> RebindSeq2SeqConfig:
    options = {
        "attention": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "favor_features": 8,
        "dropout": 0.0,
    }
    return RebindSeq2SeqConfig(**{**options, **changes})


def model(kind="dpfp", dtype=torch.float64, **changes) -> RebindForSeq2SeqLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RebindForSeq2SeqLM(config(kind, **changes)).to(dtype).eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of several lengths as one batch, and its mask."""
    width = max(map(len, rows))
    sides = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
    ids = torch.stack([torch.nn.functional.pad(row, side, value=PAD) for row, side in zip(rows, sides, strict=True)])
    return ids, (ids != PAD).long()


ROWS = [tokens(length, seed=length) for length in (4, 9, 6)]


# Decoding


@EVERY
@pytest.mark.parametrize("cuts", [[1] * 11, [4, 1, 6]], ids=["tokens", "segments"])
@torch.no_grad()
def test_logits_token_by_token_are_the_teacher_forced_ones(kind, cuts):
    lm, (ids, mask), targets = model(kind), padded(ROWS), tokens(3, 11, seed=1)
    expected, cache, pieces = lm(ids, mask, targets).logits, None, []
    encoded = lm.encoder(ids, mask)
    for piece in targets.split(cuts, dim=1):
        out = lm(None, mask, piece, encoder_outputs=encoded, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, dim=1), expected, 1e-10)
    assert cache.get_seq_length() == 11


@EVERY
@pytest.mark.parametrize("left", [False, True])
@torch.no_grad()
def test_padding_of_the_source_changes_nothing(kind, left):
    lm, (ids, mask), targets = model(kind), padded(ROWS, left), tokens(3, 7, seed=1)
    together = lm(ids, mask, targets).logits
    assert_close(lm(ids.masked_fill(mask == 0, 7), mask, targets).logits, together, 1e-10)
    for row, source in enumerate(ROWS):
        assert_close(together[row], lm(source[None], None, targets[row : row + 1]).logits[0], 1e-10)


@torch.no_grad()
def test_positions_are_sinusoids():
    lm = model(hidden_size=4)
    torch.nn.init.zeros_(lm.get_input_embeddings().weight)
    angles = torch.tensor([3.0, 0.03], dtype=torch.float64)
    assert_close(lm.encoder.embedding(tokens(1, 4), None)[0, 3], torch.cat([angles.sin(), angles.cos()]), 1e-12)


@EVERY
@torch.no_grad()
def test_padding_of_the_target_changes_nothing(kind):
    lm, ids, target = model(kind), tokens(1, 5), tokens(1, 6, seed=1)
    expected = lm(ids, None, target).logits
    wide = torch.nn.functional.pad(target, (3, 0))
    mask = (wide != PAD).long()
    assert_close(lm(ids, None, wide, mask).logits[:, 3:], expected, 1e-10)
    cache = RebindSeq2SeqCache(2)
    for end in range(1, 10):
        out = lm(ids, None, wide[:, end - 1 : end], mask[:, :end], past_key_values=cache)
    assert_close(out.logits[:, 0], expected[:, -1], 1e-10)


@EVERY
@torch.no_grad()
def test_the_decoder_sees_all_of_the_source_and_none_of_the_future(kind):
    lm, ids, targets = model(kind), tokens(1, 6), tokens(1, 8, seed=1)
    expected = lm(ids, None, targets).logits
    later = targets.clone()
    later[:, 5:] = 3 + (later[:, 5:] - 2) % (VOCABULARY - 3)
    assert_close(lm(ids, None, later).logits[:, :5], expected[:, :5], 1e-12)
    for place in range(6):
        changed = ids.clone()
        changed[:, place] = 3 + (changed[:, place] - 2) % (VOCABULARY - 3)
        assert (lm(changed, None, targets).logits - expected).abs().amax(-1).min() > 1e-6
    assert (lm(ids.flip(1), None, targets).logits - expected).abs().amax(-1).min() > 1e-6  # the order matters


# Generation


@EVERY
@pytest.mark.parametrize("beams", [1, 4])
def test_batches_are_translated_as_their_sentences(kind, beams):
    lm, (ids, mask) = model(kind), padded(ROWS)
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False}
    together = lm.generate(ids, attention_mask=mask, **options)
    for row, source in enumerate(ROWS):
        alone = lm.generate(source[None], **options)[0]
        assert torch.equal(together[row, : len(alone)], alone)
        assert (together[row, len(alone) :] <= END).all()  # padding, or the end again


@EVERY
def test_beams_carry_their_own_states(kind):
    """Without a cache every beam is computed from its tokens; tokens and scores must be the same."""
    lm, (ids, mask) = model(kind), padded(ROWS)
    options = {"attention_mask": mask, "max_new_tokens": 10, "num_beams": 4, "num_return_sequences": 4}
    options |= {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected, got = lm.generate(ids, use_cache=False, **options), lm.generate(ids, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert_close(got.sequences_scores, expected.sequences_scores, 1e-5)
    moved = expected.beam_indices[:, :10] - expected.beam_indices[:, :1]
    assert (moved != 0).any()  # the beams were reordered


@torch.no_grad()
def test_rows_and_copies_of_a_cache_include_their_sources():
    lm, (ids, mask), targets = model("linear"), padded(ROWS), tokens(3, 5, seed=1)
    cache, rows = RebindSeq2SeqCache(2), torch.tensor([2, 0, 2])
    lm(ids, mask, targets, past_key_values=cache)
    cache.reorder_cache(rows)
    token = tokens(3, 1, seed=2)
    expected = lm(ids[rows], mask[rows], torch.cat([targets[rows], token], dim=1)).logits[:, -1:]
    for each in (copy.copy(cache), cache):
        assert_close(lm(ids[rows], mask[rows], token, past_key_values=each).logits, expected, 1e-10)


@torch.no_grad()
def test_only_the_cache_of_softmax_grows():
    sizes = {}
    for kind in SEQ2SEQ_KINDS:
        lm = model(kind)
        sizes[kind] = [lm(tokens(1, s), None, tokens(1, t)).past_key_values.size for s, t in ((3, 4), (30, 40))]
    assert sizes["linear"] == [2 * 2 * 2 * 9 * 8] * 2  # layers, self and cross, heads, values and their sum, keys
    assert sizes["dpfp"] == [2 * 2 * 2 * 9 * 32] * 2
    assert sizes["performer"] == [2 * 2 * 2 * 9 * 16] * 2
    assert sizes["softmax"] == [2 * 2 * 16 * (s + t) for s, t in ((3, 4), (30, 40))]
    assert model("softmax").state_size(30, 40) == sizes["softmax"][1]
    assert model("dpfp").state_size() == 2 * 2 * 2 * 8 * 32


# Saving


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_if_the_config_says_so(tied, tmp_path):
    lm = model(tie_word_embeddings=tied)
    assert (lm.lm_head.weight is lm.get_input_embeddings().weight) is tied
    assert lm.get_input_embeddings().weight.norm(dim=-1).mean().item() == pytest.approx(1, abs=0.2)
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) is tied


# Training


def test_the_loss_is_that_of_the_labels_and_ignores_minus_100():
    lm, ids, labels = model(), tokens(2, 6), tokens(2, 5, seed=1)
    labels[1, 3:] = -100
    read = torch.tensor([[START, *labels[0, :-1].tolist()], [START, *labels[1, :3].tolist(), PAD]])
    assert torch.equal(lm.prepare_decoder_input_ids_from_labels(labels), read)
    logits = lm(ids, None, read).logits
    expected = torch.nn.functional.cross_entropy(logits[labels != -100], labels[labels != -100])
    out = lm(ids, labels=labels)
    assert_close(out.loss, expected, 1e-12)
    assert out.past_key_values is None
    assert_close(lm(ids, labels=labels, num_items_in_batch=torch.tensor(4)).loss, expected * 2, 1e-12)
    smooth = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    lm.config.label_smoothing = 0.1
    assert_close(lm(ids, labels=labels).loss, expected, 1e-12)
    assert_close(lm.train()(ids, labels=labels).loss, smooth, 1e-12)


@EVERY
def test_autocast_trains_and_decodes(kind):
    lm, (ids, mask), labels = model(kind, torch.float32), padded(ROWS), tokens(3, 5, seed=1)
    expected = lm(ids, mask, labels=labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(ids, mask, labels=labels).loss
        loss.backward()
        with torch.no_grad():
            out = lm(ids, mask, labels)
            out = lm(ids, mask, labels[:, :1], past_key_values=out.past_key_values)
    assert_close(loss, expected, 0.05)
    assert torch.isfinite(out.logits).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in lm.parameters())
    if kind != "softmax":
        assert out.past_key_values.states[-1].memory.dtype == torch.float32
        weight = lm.decoder.layers[0].cross
        with torch.autocast("cpu", torch.bfloat16):
            source = torch.randn(1, 300, 16, generator=torch.Generator().manual_seed(0))
            rounded = torch.cat([weight.write(source[:, :1]).memory, weight.write(source[:, 1:]).memory]).sum(0)
            assert_close(weight.write(source).memory[0], rounded, 1e-5)  # sums in float32


class Collator(DataCollatorForSeq2Seq):
    """Pads without a tokenizer."""

    def __call__(self, features, return_tensors=None):
        ids, mask = padded([row["input_ids"] for row in features])
        labels, _ = padded([row["labels"] for row in features])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(labels == PAD, -100)}


def test_it_learns_under_the_trainer(tmp_path):
    lm = model("linear", torch.float32, label_smoothing=0.1)
    rows = [{"input_ids": row, "labels": row.flip(0)} for row in ROWS] * 4
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=60, per_device_train_batch_size=6, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
        predict_with_generate=True, generation_max_length=8, eval_strategy="no",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(lm, arguments, train_dataset=rows, eval_dataset=rows[:3], data_collator=Collator(None))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 4


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"kind": "sofmax"}, UnknownNameError, "unknown_attention"),
        ({"mlp": "gelu"}, UnknownNameError, "unknown_mlp"),
        ({"encoder_layers": 0}, InputError, "invalid_size"),
        ({"num_attention_heads": 3}, ShapeError, "indivisible_heads"),
    ],
)
def test_bad_configs_are_refused(changes, error, code):
    with raises(error, code):
        model(**changes)


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda lm, ids: lm(ids), InputError, "no_target"),
        (lambda lm, ids: lm(ids[0], labels=ids), ShapeError, "wrong_token_shape"),
        (lambda lm, ids: lm(ids, torch.ones(2, 4), labels=ids), ShapeError, "wrong_attention_mask_shape"),
        (lambda lm, ids: lm(ids, None, ids, torch.ones(2, 4)), ShapeError, "wrong_attention_mask_shape"),
        (lambda lm, ids: lm(ids, None, ids, past_key_values=RebindSeq2SeqCache(3)), InputError, "cache_of_other_model"),
    ],
)
def test_bad_calls_are_refused(call, error, code):
    with raises(error, code):
        call(model(), tokens(2, 5))


@pytest.mark.parametrize("name", ["position_ids", "cu_seqlens", "seq_idx", "inputs_embeds", "decoder_inputs_embeds"])
def test_arguments_that_it_does_not_know_are_refused(name):
    """Packed documents among them, which would otherwise read each other."""
    ids = tokens(1, 6)
    with raises(InputError, "unknown_argument"):
        model()(ids, labels=ids, **{name: ids})
    with raises(InputError, "unknown_argument"):
        model().encoder(ids, **{name: ids})
