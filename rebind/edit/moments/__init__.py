"""Second moments of old keys, which tell a closed form what the model already uses its memories for.

- `corpus`: the text that keys are computed from
- `collect`: the moments of each site, computed once and cached (`Moments`), and their factors (`OldKeys`)
"""

from __future__ import annotations

from rebind.edit.moments.collect import Moments, OldKeys, SecondMoment
from rebind.edit.moments.corpus import Corpus, OwnSamples, Texts

__all__ = ["Corpus", "Moments", "OldKeys", "OwnSamples", "SecondMoment", "Texts"]
