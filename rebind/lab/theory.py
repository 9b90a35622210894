"""Expected errors of random keys, to draw beside the measured ones.

Keys are uniform on the unit sphere of width d; values are independent of them, with mean zero and E‖v‖² = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interference(n: float, d: int) -> float:
    """Return the sum rule's squared error: the other n − 1 values are read with weights (k·k')², 1/d on average."""
    return (n - 1) / d


def delta_errors(n: int, d: int) -> Tensor:
    """Return the expected squared error [n] of n delta writes (β = 1) after the last of them, the oldest first.

    A later key k' = c·k + s·u with u ⟂ k turns what k reads into W k (1 − c²) + c v' − c s W u. With E[c²] = 1/d and
    E[c⁴] = 3/(d(d+2)) the expected energies of W and of W k follow exactly:

        ‖W‖²  ← (1 − 1/d) ‖W‖² + 1
        ‖Wk‖² ← E[(1−c²)²] ‖Wk‖² + 1/d + E[c²s²] (‖W‖² − ‖Wk‖²)/(d−1)

    and ⟨Wk, v⟩ fades by 1 − 1/d per write.
    """
    fourth = 3 / (d * (d + 2))
    remaining, leaking = 1 - 2 / d + fourth, (1 / d - fourth) / max(d - 1, 1)
    read_energy = torch.zeros(n, dtype=torch.float64)  # E‖W k_i‖² of the keys so far
    total_energy = 0.0  # E‖W‖²
    for t in range(n):
        read_energy[:t] = remaining * read_energy[:t] + 1 / d + leaking * (total_energy - read_energy[:t])
        read_energy[t] = 1.0
        total_energy = (1 - 1 / d) * total_energy + 1
    faded = (1 - 1 / d) ** torch.arange(n - 1, -1, -1, dtype=torch.float64)
    return read_energy - 2 * faded + 1
