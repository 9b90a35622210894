"""What is expected of random keys, to draw beside what is measured.

Keys are uniform on the unit sphere of width d, values independent of them with mean zero and E‖v‖² = 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def interference(n: float, d: int) -> float:
    """The sum rule's squared error: each of the other n − 1 values is read with weight (k·k')², 1/d on average."""
    return (n - 1) / d


def least_squares(n: float, d: int) -> float:
    """What no matrix can fit: of n answers a d-dimensional share is met, the rest is not. 0 up to n = d."""
    return max(0.0, 1 - d / n)


def delta_errors(n: int, d: int) -> Tensor:
    """Expected squared error of each of n delta writes (β = 1), the oldest first, when all are made: [n].

    A later key k' = c·k + s·u with u ⟂ k turns what k reads into W k (1 − c²) + c v' − c s W u. With E[c²] = 1/d and
    E[c⁴] = 3/(d(d+2)) the expected energies of W and of W k follow exactly:

        ‖W‖²  ← (1 − 1/d) ‖W‖² + 1
        ‖Wk‖² ← E[(1−c²)²] ‖Wk‖² + 1/d + E[c²s²] (‖W‖² − ‖Wk‖²)/(d−1)

    and ⟨Wk, v⟩ fades by 1 − 1/d a write.
    """
    fourth = 3 / (d * (d + 2))
    kept, leaked = 1 - 2 / d + fourth, (1 / d - fourth) / max(d - 1, 1)
    read = torch.zeros(n, dtype=torch.float64)  # E‖W k_i‖² of the keys so far
    whole = 0.0  # E‖W‖²
    for t in range(n):
        read[:t] = kept * read[:t] + 1 / d + leaked * (whole - read[:t])
        read[t] = 1.0
        whole = (1 - 1 / d) * whole + 1
    faded = (1 - 1 / d) ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
    return read - 2 * faded + 1


def hopfield_error(load: float) -> float:
    """Share of wrong bits in a large classical network's recall at n/N = load, 0.5 where nothing is recalled.

    Amit, Gutfreund and Sompolinsky's mean field at temperature zero: the overlap is erf(y) for the largest root y of
    y (√(2·load) + (2/√π) e^{−y²}) = erf(y). The root vanishes at 0.138.
    """
    if load <= 0:
        return 0.0

    def gap(y: float) -> float:
        return math.erf(y) - y * (math.sqrt(2 * load) + 2 / math.sqrt(math.pi) * math.exp(-y * y))

    above = 1 / math.sqrt(2 * load)  # the root lies below: erf is at most 1
    steps = 4000
    for number in range(steps):
        y = above * (1 - number / steps)
        if gap(y) > 0 and y > 1e-2:
            low, high = y, above * (1 - (number - 1) / steps)
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if gap(middle) > 0 else (low, middle)
            return (1 - math.erf(low)) / 2
    return 0.5
