"""From target states to one write per site.

- `subject_states`: the keys and hidden states of subjects, on the model as edited so far
- `solve`: the writes, and the choice of λ
"""

from __future__ import annotations

from rebind.edit.solve.solve import choose_lambda, solve_writes, weights_restored
from rebind.edit.solve.subject_states import SubjectStates

__all__ = ["SubjectStates", "choose_lambda", "solve_writes", "weights_restored"]
