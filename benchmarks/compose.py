"""4096 delta writes, applied one at a time and as one composite in WY form."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from benchmarks.report import measure, report
from rebind.memory import Write, chain, get_rule

LENGTH, WIDTH = 4096, 64


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(LENGTH, WIDTH, generator=generator), dim=-1)
    values = torch.randn(LENGTH, WIDTH, generator=generator)
    beta = torch.rand(LENGTH, generator=generator)
    memory = torch.randn(WIDTH, WIDTH, generator=generator)
    rule = get_rule("delta")
    writes = rule.write(keys, values, beta=beta)
    single = [Write(writes.keys[i], writes.values[i], writes.gain[i]) for i in range(LENGTH)]
    exact = reduce(
        lambda state, i: rule.write(keys[i].double(), values[i].double(), beta=beta[i].double()).apply(state),
        range(LENGTH),
        memory.double(),
    )

    def error(result: Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    rows = [
        measure("apply one at a time", lambda: reduce(lambda W, w: w.apply(W), single, memory), error, 3),
        measure("compose one at a time", lambda: reduce(lambda a, w: w @ a, single).apply(memory), error, 1),
        *(
            measure(f"chain, chunks of {chunk}", lambda chunk=chunk: chain(writes, chunk).apply(memory), error, 9)
            for chunk in (16, 64, 256, LENGTH)
        ),
    ]
    report(
        "compose",
        f"{LENGTH} delta writes, d = {WIDTH}, float32",
        rows,
        baseline="apply one at a time",
        note="Error: against one write at a time in float64.",
    )


if __name__ == "__main__":
    main()
