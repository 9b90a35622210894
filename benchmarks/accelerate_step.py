"""Speed of a training step: ours, and the same step through `accelerate.Accelerator`.

    OMP_NUM_THREADS=1 python -m benchmarks.accelerate_step
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.accelerate_step

Both steps train a model of four `delta` layers on 512 random tokens: forward, loss, backward, clipping and AdamW. They
take turns, five steps each, and the table has the median of --rounds turns. Both start with the same weights, and the
benchmark fails if their losses differ. Results are added to --out, one row per number of processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.report import RESULTS
from rebind.bench.measure import machine
from rebind.nn import RebindForCausalLM
from rebind.nn.training import DataConfig, TrainConfig
from rebind.nn.training.data import SegmentBatches, TokenBatch
from rebind.nn.training.step import TrainingStep, build_optimizer
from rebind.parallel import join_processes
from rebind.storage import read_json_object, write_json

SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
VOCABULARY, STEPS_PER_TURN = 500, 5
CONFIG = TrainConfig(DataConfig("unused"), layers="delta", model=SHAPE, length=64, batch_size=8)

Step = Callable[[TokenBatch], Tensor]


def build_model() -> RebindForCausalLM:
    torch.manual_seed(0)
    return RebindForCausalLM(CONFIG.model_config(VOCABULARY)).train()


def our_step() -> Step:
    processes, _ = join_processes("cpu")
    model = build_model()
    step = TrainingStep(CONFIG, processes, model, build_optimizer(CONFIG.optimizer, model))
    return lambda batch: step.run(CONFIG.optimizer.learning_rate, batch, [])[0]


def accelerate_step() -> Step:
    accelerator = Accelerator(cpu=True)
    plain = build_model()
    model, optimizer = accelerator.prepare(plain, build_optimizer(CONFIG.optimizer, plain))
    rows = CONFIG.rows_per_piece(accelerator.num_processes)
    mine = slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)

    def run(batch: TokenBatch) -> Tensor:
        inputs, targets = batch.inputs[mine], batch.targets[mine]
        with accelerator.autocast():
            loss = model(input_ids=inputs, shift_labels=targets, return_logits=False, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CONFIG.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def measure(rounds: int) -> dict[str, float]:
    """Return the tokens per second of both steps."""
    tokens = torch.randint(VOCABULARY, (50_000,), generator=torch.Generator().manual_seed(0)).numpy()
    batches = SegmentBatches(tokens, CONFIG.length, CONFIG.batch_size)
    steps = {"ours": our_step(), "accelerate": accelerate_step()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        losses = {}
        for name in steps if turn % 2 else reversed(steps):
            for index in range(STEPS_PER_TURN):
                batch = batches.batch(turn * STEPS_PER_TURN + index)
                begin = time.perf_counter()
                losses[name] = steps[name](batch)
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - begin)
        torch.testing.assert_close(losses["ours"], losses["accelerate"])
    return {name: CONFIG.batch_size * CONFIG.length / statistics.median(times) for name, times in seconds.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "accelerate-step-cpu.json")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    processes, _ = join_processes("cpu")
    speeds = measure(options.rounds)
    if processes.is_main_process:
        print(f"{processes.num_processes} processes: " + ", ".join(f"{n} {v:,.0f} tokens/s" for n, v in speeds.items()))
        rows = (read_json_object(options.out) or {}).get("rows", {})
        rows[str(processes.num_processes)] = speeds
        write_json(options.out, {"machine": machine("accelerate"), "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
