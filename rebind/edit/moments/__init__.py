"""Second moments E[kkᵀ] of old keys, which tell a closed form how the model already uses its memories.

- `corpus`: the text that they are computed from
- `collect`: `Moments`, which computes and caches them
- `sums`: sums over a text, of one process or of several
- `old_keys`: the moments and their factors, as the closed forms use them
"""

from __future__ import annotations

from rebind.edit.moments.collect import Moments, config_digest, tokenizer_digest
from rebind.edit.moments.corpus import Corpus, OwnSamples, Texts, read_text
from rebind.edit.moments.old_keys import EXPERT_PRIOR, BlockFactor, OldKeys, OldStates, SecondMoment

__all__ = [
    "EXPERT_PRIOR",
    "BlockFactor",
    "Corpus",
    "Moments",
    "OldKeys",
    "OldStates",
    "OwnSamples",
    "SecondMoment",
    "Texts",
    "config_digest",
    "read_text",
    "tokenizer_digest",
]
