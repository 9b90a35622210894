"""Documents packed in one row: models read each as if it were alone, whatever names them, and swallow no argument."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from rebind.errors import InputError, ShapeError
from tests.nn.test_models import EVERY, model, tokens
from tests.support import assert_close

LENGTHS = (3, 1, 9, 5)


def documents() -> list[torch.Tensor]:
    return [tokens(1, length, seed=length) for length in LENGTHS]


def one_by_one(lm, texts) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Return the logits of each document, the mean loss of all predicted tokens, and its gradients."""
    outs = [lm(text, labels=text, num_items_in_batch=1) for text in texts if text.shape[1] > 1]
    loss = sum(out.loss for out in outs) / sum(length - 1 for length in LENGTHS)
    gradients = torch.autograd.grad(loss, list(lm.parameters()))
    return [lm(text).logits[0] for text in texts], loss, list(gradients)


@EVERY
def test_the_collator_of_transformers(kind):
    lm, texts = model(kind), documents()
    logits, loss, gradients = one_by_one(lm, texts)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": text[0].tolist()} for text in texts])
    out = lm(**batch)
    assert_close(out.logits[0], torch.cat(logits))
    assert_close(out.loss, loss)
    for one, other in zip(torch.autograd.grad(out.loss, list(lm.parameters())), gradients, strict=True):
        assert_close(one, other)


BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
OWNER = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
NAMED = {
    "cu_seqlens": {"cu_seqlens": BOUNDS},
    "flash attention": {"cu_seq_lens_q": BOUNDS.int(), "cu_seq_lens_k": BOUNDS.int(), "max_length_q": 9},
    "positions": {"position_ids": POSITIONS},
    "positions from 2": {"position_ids": POSITIONS + 2},
    "numbers": {"seq_idx": OWNER.int()},
}


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_every_name_of_documents(named):
    lm, texts = model("hybrid"), documents()
    logits, loss, _ = one_by_one(lm, texts)
    ids = torch.cat(texts, dim=1)
    out = lm(ids, labels=ids, output_hidden_states=True, **named)  # no document predicts the next one's first token
    assert_close(out.logits[0], torch.cat(logits))
    assert_close(out.loss, loss)
    assert out.past_key_values is None
    assert all(hidden.shape == out.hidden_states[0].shape for hidden in out.hidden_states)
    assert_close(lm.model(ids, **named).last_hidden_state, out.hidden_states[-1])


def test_rows_of_documents_with_padding_between_and_behind():
    lm, texts = model("hybrid"), documents()
    logits, loss, _ = one_by_one(lm, texts)
    first, second, third, fourth = (text[0] for text in texts)
    gap = torch.zeros(4, dtype=torch.long)
    ids = torch.stack([torch.cat([first, gap, third, second]), torch.cat([fourth, gap, gap, gap])[:17]])
    mask = ids != 0
    positions = torch.zeros_like(ids)
    positions[0, :3], positions[0, 7:16], positions[1, :5] = torch.arange(3), torch.arange(9), torch.arange(5)
    out = lm(ids, attention_mask=mask.long(), position_ids=positions, labels=ids.masked_fill(~mask, -100))
    assert_close(out.logits[0, :3], logits[0])
    assert_close(out.logits[0, 7:16], logits[2])
    assert_close(out.logits[0, 16:], logits[1])
    assert_close(out.logits[1, :5], logits[3])
    assert_close(out.loss, loss)
    assert torch.isfinite(out.logits).all()


@pytest.mark.parametrize("named", [{}, {"position_ids": torch.arange(18)[None]}, {"cu_seqlens": torch.tensor([0, 18])}])
def test_a_single_document_is_a_sequence(named):
    lm, ids = model("hybrid"), torch.cat(documents(), dim=1)
    out = lm(ids, **named)
    assert_close(out.logits, lm(ids).logits)
    assert out.past_key_values.get_seq_length() == 18


def test_positions_of_left_padding_are_no_documents():
    """`generate` sends them; padding has any position."""
    lm, ids = model("hybrid"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    out = lm(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    assert_close(out.logits[0, 2:], lm(ids[:1, 2:]).logits[0])


def test_trainer_with_packed_documents(tmp_path):
    lm = model("gated_delta", torch.float32)
    rows = [{"input_ids": text[0].tolist()} for text in documents()]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    result = Trainer(lm, arguments, train_dataset=rows, data_collator=collate).train()
    assert result.training_loss > 0


def test_what_no_model_knows_is_refused():
    lm, ids = model("hybrid"), torch.cat(documents(), dim=1)
    shifted = POSITIONS.roll(1, dims=1)
    calls = [
        (InputError, "unknown_argument", {"token_type_ids": torch.zeros_like(ids)}),
        (InputError, "unknown_argument", {"cu_seqlen": BOUNDS}),
        (InputError, "unknown_argument", {"output_attentions": True}),
        (InputError, "documents_disagree", {"cu_seqlens": BOUNDS, "position_ids": torch.arange(18)[None]}),
        (InputError, "documents_disagree", {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS[:-1]}),
        (InputError, "position_ids_with_gaps", {"position_ids": 2 * POSITIONS}),
        (ShapeError, "wrong_position_ids_shape", {"position_ids": POSITIONS[:, 1:]}),
        (ShapeError, "wrong_seq_idx_shape", {"seq_idx": OWNER[0]}),
        (InputError, "invalid_boundaries", {"cu_seqlens": BOUNDS[:-1]}),
        (InputError, "invalid_boundaries", {"cu_seqlens": BOUNDS.tolist()}),
        (InputError, "cache_with_documents", {"cu_seqlens": BOUNDS, "use_cache": True}),
        (InputError, "mask_with_documents", {"cu_seqlens": BOUNDS, "attention_mask": (shifted != 0).long()}),
    ]
    for error, code, named in calls:
        with pytest.raises(error) as caught:
            lm(ids, **named)
        assert caught.value.code == code, named
    with pytest.raises(InputError) as caught:
        lm.model(ids, labels=ids)
    assert caught.value.code == "unknown_argument"
