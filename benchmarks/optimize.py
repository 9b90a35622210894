"""Speed of published models, as transformers runs them and with `rebind.optimize`.

    OMP_NUM_THREADS=1 python -m benchmarks.optimize
    OMP_NUM_THREADS=1 python -m benchmarks.optimize --models kimi_linear --tokens 512

Models have random weights and about the proportions of the published ones, at an eighth or a quarter of their width: a
hybrid block of four layers, and few experts. Per model: prefill of --tokens tokens without gradients, a training step
(forward and backward), and one token after that context. Both models take turns and the best of --rounds turns counts,
in processor time on a CPU (--wall for wall time), since other programs lengthen only wall time. The benchmark fails if
the losses differ by more than rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import rebind
from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.storage import write_json

VOCABULARY = 2_048  # so that the output layer has the share of the parameters of a token that it has in Qwen3-Next, 8 %


def sizes(kind: str, width: int) -> dict[str, Any]:
    """Return the options of a config with that width."""
    head = width // 4
    shared = {"vocab_size": VOCABULARY, "pad_token_id": 0, "hidden_size": width, "num_hidden_layers": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": head}
    linear = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": head,
        "linear_value_head_dim": head,
    }
    grouped = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": head}
    options: dict[str, dict[str, Any]] = {
        "qwen3_next": {**linear, **grouped, **experts, "num_experts": 8, "shared_expert_intermediate_size": head},
        "qwen3_5_text": {**linear, **grouped, "intermediate_size": 3 * width},
        "olmo_hybrid": {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 3 * head // 4,
            "linear_value_head_dim": 3 * head // 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 3 * width,
        },
        "kimi_linear": {
            **experts,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": head,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": head,
            "qk_nope_head_dim": head // 2,
            "qk_rope_head_dim": head // 4,
            "v_head_dim": head // 2,
            "intermediate_size": 3 * width,
            "num_local_experts": 8,
        },
    }
    return {**shared, **options[kind]}


MODELS = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear")


def build(kind: str, width: int, device: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes(kind, width)))
    return model


def tasks(model: PreTrainedModel, ids: Tensor) -> dict[str, Callable[[], float]]:
    """Return what is measured; each returns a loss, by which the two ways are compared."""

    def train() -> float:
        model.train()
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def prefill() -> float:
        model.eval()
        return model(ids, labels=ids, use_cache=True).loss.item()

    with torch.no_grad():
        cache = model.eval()(ids, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> float:
        model.eval()
        for _ in range(8):
            logits = model(ids[:, :1], past_key_values=cache, use_cache=True).logits
        return logits.logsumexp(-1).mean().item()

    return {"prefill": prefill, "train": train, "decode, 8 tokens": decode}


def measure(kind: str, width: int, tokens: int, rounds: int, device: str, *, wall: bool) -> list[dict[str, Any]]:
    clock = time.perf_counter if wall or device != "cpu" else time.process_time
    ids = torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    models = {name: build(kind, width, device) for name in ("transformers", "rebind")}
    rebind.optimize(models["rebind"])
    work = {name: tasks(model, ids) for name, model in models.items()}
    rows = []
    for task in work["rebind"]:
        best, losses = dict.fromkeys(models, float("inf")), {}
        for turn in range(rounds + 1):
            for name in models if turn % 2 else reversed(models):
                start = clock()
                losses[name] = work[name][task]()
                if device != "cpu":
                    torch.cuda.synchronize()
                if turn:  # the first warms up
                    best[name] = min(best[name], clock() - start)
        one, other = losses.values()
        if abs(one - other) > 1e-4 * abs(other):
            raise SystemExit(f"{kind}, {task}: the losses are {losses}")
        speedup = best["transformers"] / best["rebind"]
        print(
            f"{kind:14} {width:5} {task:18} {best['transformers']:9.3f} s {best['rebind']:9.3f} s {speedup:6.2f}x",
            flush=True,
        )
        rows.append({"model": kind, "width": width, "task": task, "tokens": tokens, **best, "speedup": speedup})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of published models with and without rebind.optimize.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="Families to measure.")
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512], help="Widths of the models.")
    parser.add_argument("--tokens", type=int, default=2_048, help="Length of the sequence.")
    parser.add_argument("--rounds", type=int, default=3, help="Turns of both; the best counts.")
    parser.add_argument("--device", default="cpu", help="Where to run.")
    parser.add_argument("--wall", action="store_true", help="Measure wall time instead of processor time.")
    parser.add_argument("--out", type=Path, default=RESULTS / "optimize-cpu.json", help="File for the results.")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()  # transformers says once that its functions are the slow ones
    print(f"{'model':14} {'width':5} {'task':18} {'transformers':>11} {'rebind':>11}", flush=True)
    rows = []
    for kind, width in product(options.models, options.widths):
        rows += measure(kind, width, options.tokens, options.rounds, options.device, wall=options.wall)
        write_json(options.out, {"machine": machine("transformers"), "rows": rows})


if __name__ == "__main__":
    main()
