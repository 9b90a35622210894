"""A batch of edits from a factor of C against solving the whole d×d system for every batch.

Keys are d = 4096 wide; n = 100 and n = 10 of them are new. C is factored once for the Woodbury route; the direct routes
start from C each time, as public editing code does (it solves by LU). Everything runs in float64.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from benchmarks.report import measure, report
from rebind.memory import factor, ridge
from rebind.memory.solve import Cholesky

D, LAM = 4096, 1.5


def moment(generator: torch.Generator) -> Tensor:
    """Return a second moment with a power-law spectrum, as activations have: eigenvalues i^(−1.5)."""
    keys = torch.randn(2 * D, D, generator=generator, dtype=torch.float64)
    keys *= torch.arange(1, D + 1, dtype=torch.float64) ** -0.75
    return keys.mT @ keys / (2 * D)


def explicit_inverse(C_inverse: Tensor, keys: Tensor) -> Tensor:
    """Compute the gain by the Woodbury identity as it is printed, with d×d inverses."""
    K = keys.mT / LAM**0.5
    inner = torch.linalg.inv(torch.eye(len(keys), dtype=K.dtype) + K.mT @ C_inverse @ K)
    inverse = C_inverse - C_inverse @ K @ inner @ K.mT @ C_inverse
    return keys @ inverse / LAM


def race(n: int, C: Tensor, f: Cholesky, C_inverse: Tensor, factoring: float, generator: torch.Generator) -> None:
    keys = torch.randn(n, D, generator=generator, dtype=torch.float64)
    keys *= torch.arange(1, D + 1, dtype=torch.float64) ** -0.75
    system = LAM * C + keys.mT @ keys

    def error(gain: Tensor) -> float:
        return float((gain @ system - keys).norm() / keys.norm())

    direct = "direct, LU of λC + KᵀK"
    report(
        f"solve-{n}",
        f"one batch of {n} keys, d = {D}",
        [
            measure("direct, inverse of λC + KᵀK", lambda: keys @ torch.linalg.inv(LAM * C + keys.mT @ keys), error, 3),
            measure(direct, lambda: torch.linalg.solve(LAM * C + keys.mT @ keys, keys.mT).mT, error, 5),
            measure("direct, Cholesky (ours, primal)", lambda: ridge(keys, C, LAM, form="primal").value, error, 5),
            measure("Woodbury, explicit inverses", lambda: explicit_inverse(C_inverse, keys), error, 5),
            measure("Woodbury from a factor (ours, dual)", lambda: ridge(keys, f, LAM).value, error, 15),
        ],
        baseline=direct,
        note=f"C was factored once, in {factoring:.2f} s, before the last row. Error: residual of G(λC + KᵀK) = K.",
    )


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    C = moment(generator)
    begin = time.perf_counter()
    f = factor(C)
    factoring = time.perf_counter() - begin
    C_inverse = torch.linalg.inv(C)
    for n in (100, 10):
        race(n, C, f, C_inverse, factoring, generator)


if __name__ == "__main__":
    main()
