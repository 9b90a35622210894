"""Target search: find the hidden state at a subject that makes the model say the target.

- `framings`: the ways in which a fact is asked: with and without start tokens, in a text, in a chat
- `kept`: prompts about the same subject, the answers to which stay
- `objective`: the loss that is minimized; `TargetSettings`
- `optimize`: the search itself; its result is a `TargetStates`
- `search_copy`: the faster copy of the model that the search runs on
- `search`: all of it together, for an editor (`TargetSearch`), with results stored so that an interrupted edit resumes
"""

from __future__ import annotations

from rebind.edit.targets.framings import FRAMINGS, ContextSettings
from rebind.edit.targets.objective import FactPrompts, TargetSettings
from rebind.edit.targets.optimize import TargetStates, find_targets
from rebind.edit.targets.search import TargetSearch, TargetStore

__all__ = [
    "FRAMINGS",
    "ContextSettings",
    "FactPrompts",
    "TargetSearch",
    "TargetSettings",
    "TargetStates",
    "TargetStore",
    "find_targets",
]
