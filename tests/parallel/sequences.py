"""What the processes of `test_processes` do: each holds a segment of a sequence, and checks it against the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from rebind.errors import InputError
from rebind.memory.rules import get_rule, rule_names
from rebind.nn import RebindConfig, RebindForCausalLM
from rebind.nn.training import OptimizerConfig, train
from rebind.ops import SequenceSplit, scan, scan_split, split_sequence
from rebind.ops.scan import scan_arguments
from rebind.parallel import join_processes
from tests.nn.training_runs import TINY, config
from tests.support import Draw, assert_close, raises

BATCH, TOKENS, HEADS, D_K, D_V, WRITES = 2, 24, 4, 5, 3, 2
LAYERS = ["gated_delta", "attention", "kda", "dpfp-delta", "linear-sum", "hopfield"]
SMALL = {"hidden_size": 16, "num_hidden_layers": len(LAYERS), "num_attention_heads": 2, "intermediate_size": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "one sequence": {"layers": ("gated_delta", "attention"), "context_parallel": 2},
    "rows and segments": {"layers": ("gated_delta", "mamba2"), "context_parallel": 2, "accumulate": 2},
    "shards": {"layers": ("delta", "attention"), "context_parallel": 2, "sharded": True},
}


def two(folder: Path) -> None:
    """Check scans and models, and train with every sequence in two processes."""
    join_processes()
    split = SequenceSplit.of()
    for rule in rule_names():
        check_rule(rule, split)
    check_options(split)
    check_model(split, window=None)
    check_refusals(split)
    for name in ("one sequence", "shards"):
        train(training(folder, name), folder / name)


def four(folder: Path) -> None:
    """Check a scan over four segments, and train with two rows of two segments."""
    join_processes()
    split = SequenceSplit.of()
    check_rule("gated_delta", split)
    check_rule("gla", split)
    check_model(split, window=9)
    train(training(folder, "rows and segments"), folder / "rows and segments")


def one(folder: Path) -> None:
    """Train the same by one process."""
    for name in VARIANTS:
        train(training(folder, name, context_parallel=1, sharded=False), folder / name)


def training(folder: Path, name: str, **changes: Any) -> Any:
    settings = {"optimizer": OptimizerConfig(learning_rate=2e-3, warmup=3), "model": {**TINY, "dropout": 0.0}}
    source = str(folder.parent / "corpus.txt")
    return config(source, **{**settings, **VARIANTS[name], "steps": 6, "evaluate_every": 6, **changes})


def check_rule(name: str, split: SequenceSplit) -> None:
    """Compare the outputs and gradients of a rule, with every gate, with those of the whole sequence."""
    rule, draw = get_rule(name), Draw(3)
    writes = WRITES if rule.several else 1
    rows = (BATCH, TOKENS * writes, HEADS)
    tensors = {"q": draw.unit(BATCH, TOKENS, HEADS, D_K), "k": draw.unit(*rows, D_K), "v": draw.normal(*rows, D_V)}
    for gate in rule.gates:
        width = {"key": (D_K,), "value": (D_V,)}.get(rule.channels.get(gate, ""), ())
        shape = (BATCH, TOKENS, HEADS) if gate == "alpha" else rows
        tensors[gate] = 0.1 + 0.8 * draw.uniform(*shape, *width)
    tensors["state"] = draw.normal(BATCH, HEADS, D_V, D_K)
    compare(tensors, split, lambda q, k, v, state, **gates: {**scan_arguments(rule, q, k, v, gates), "state": state})


def check_options(split: SequenceSplit) -> None:
    """Compare shared key heads, a denominator, mini-batches and a decay that forgets everything."""
    draw, keys = Draw(5), (BATCH, TOKENS, HEADS // 2)
    shared = {"q": draw.unit(*keys, D_K).abs(), "k": draw.unit(*keys, D_K).abs()}
    shared["v"] = draw.normal(BATCH, TOKENS, HEADS, D_V)
    decays = -draw.uniform(BATCH, TOKENS, HEADS)
    compare({**shared, "log_decay": decays}, split, dict)
    compare({**shared, "log_decay": decays}, split, lambda **tensors: {**tensors, "normalize": True})
    erase = 0.5 * draw.uniform(BATCH, TOKENS, HEADS)
    compare({**shared, "erase": erase}, split, lambda **tensors: {**tensors, "mini_batch": 4})
    decays[:, TOKENS // 3] = -torch.inf
    compare({**shared, "log_decay": decays, "erase": erase}, split, dict)
    compare({**shared, "log_decay": decays}, split, dict)


def compare(tensors: dict[str, Tensor], split: SequenceSplit, arguments: Any) -> None:
    """Compare a scan of this process's segment, with its gradients, with the scan of the whole sequence."""
    whole = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    own = {name: segment(tensor, name, split).clone().requires_grad_() for name, tensor in tensors.items()}
    expected, expected_end = scan(**arguments(**whole))
    out, end = scan_split(**arguments(**own), split=split)
    assert_close(out, segment(expected, "out", split), 1e-12)
    assert_close(end, expected_end, 1e-12)
    weight, end_weight = Draw(7).normal(*expected.shape), Draw(8).normal(*end.shape)
    (expected * weight).sum().add((expected_end * end_weight).sum()).backward()
    (out * segment(weight, "out", split)).sum().add((end * end_weight).sum() / split.count).backward()
    for name, tensor in own.items():
        slope = segment(whole[name].grad, name, split)
        if name == "state" and split.rank > 0:  # its gradient is in the first process
            slope = torch.zeros_like(slope)
        assert_close(tensor.grad, slope, 1e-10)


def segment(tensor: Tensor, name: str, split: SequenceSplit) -> Tensor:
    return tensor if name == "state" else tensor.chunk(split.count, dim=1)[split.rank]


def small_model(**fields: Any) -> RebindForCausalLM:
    torch.manual_seed(0)
    return RebindForCausalLM(RebindConfig(vocab_size=40, layer_kinds=LAYERS, **{**SMALL, **fields})).double()


def check_model(split: SequenceSplit, window: int | None) -> None:
    """Compare the loss of a model of many kinds of layers, and the gradients of its weights."""
    model, other = small_model(sliding_window=window), small_model(sliding_window=window)
    ids = torch.randint(0, 40, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    loss = other(inputs, shift_labels=targets, use_cache=False).loss
    loss.backward()
    with split_sequence(split):
        own = (
            model(
                segment(inputs, "", split),
                shift_labels=segment(targets, "", split),
                use_cache=False,
                return_logits=False,
            ).loss
            / split.count
        )
        own.backward()
    total = own.detach().clone()
    distributed.all_reduce(total)
    assert_close(total, loss, 1e-12)
    for (name, parameter), whole in zip(model.named_parameters(), other.parameters(), strict=True):
        slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        distributed.all_reduce(slope)
        assert whole.grad is not None, name
        assert_close(slope, whole.grad, 1e-10)


def check_refusals(split: SequenceSplit) -> None:
    """Layers that cannot be split say so, and so do segments that are too short."""
    torch.manual_seed(0)
    ttt = RebindForCausalLM(RebindConfig(vocab_size=40, layer_kinds="ttt-linear", **{**SMALL, "num_hidden_layers": 1}))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with split_sequence(split):
        with raises(InputError, "layer_not_split"):
            ttt(ids, use_cache=False)
        with raises(InputError, "split_sequence_not_plain"):
            small_model()(ids, attention_mask=torch.tensor([[0] + [1] * 7]), use_cache=False)
        with raises(InputError, "segment_too_short"):
            small_model()(ids[:, :2], use_cache=False)
    keys = torch.zeros(1, 6, 1, 2)
    if split.rank == 0:
        with raises(InputError, "mini_batch_crosses_segments"):
            scan_split(keys, keys, keys, split=split, mini_batch=4)
