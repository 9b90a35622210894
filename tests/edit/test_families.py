"""Families of models with something unusual: keys that blocks share, a short context."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from rebind.errors import InputError
from rebind.models.tokens import Tokens
from rebind.models.trunk import Trunk
from tests import tiny
from tests.edit.editors import FACTS, open_editor, rewrite
from tests.families import WIDE_HEADS, Family, build
from tests.support import raises


def family(config: str, **options: Any) -> Any:
    common = {**WIDE_HEADS, "vocab_size": len(tiny.tokenizer()), "max_position_embeddings": 128}
    return build(Family(config, "", {**common, "bos_token_id": 0, "eos_token_id": 0, **options}))


def test_blocks_are_not_skipped_if_others_use_their_keys():
    kinds = ["sliding_attention", "full_attention"] * 4
    shared = {"layer_types": kinds, "num_kv_shared_layers": 4, "sliding_window": 16, "global_head_dim": 12}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tiny.tokenizer())}
    model = family("Gemma4TextConfig", num_hidden_layers=8, **shared, **per_layer)
    trunk = Trunk(model, list(model.model.layers))
    tokens, where = Tokens.left_padded([[5, 6, 7, 8]], trunk.device), torch.tensor([[0, 3]])
    for layer in range(len(trunk.blocks) - 1):
        resumed = trunk.logits(tokens, where, resume=(layer, trunk.after(layer, tokens)))[0]
        assert torch.allclose(resumed, model(tokens.ids).logits[0, 3].to(resumed), atol=1e-4)
    for layer in (2, 3):  # block 3 is the last with keys of its own, and sees a change after block 2
        states = trunk.after(layer, tokens).requires_grad_()
        with raises(InputError, "shared_keys") if layer == 3 else nullcontext():
            (gradient,) = torch.autograd.grad(trunk.logits(tokens, where, resume=(layer, states)).sum(), states)
    assert float(gradient[0, 0].abs().max()) > 0


def test_windows_of_a_corpus_fit_a_short_context():
    rewrite(open_editor(tiny.gpt2(n_positions=40)), FACTS[0], layers=[1])
