"""An encoder-decoder for translation, for transformers. Importing this package registers it with the Auto classes.

- `config`: the config, and the kinds of attention that it can name
- `model`: the model
"""

from __future__ import annotations

from rebind.nn.lm.cache import RebindSeq2SeqCache
from rebind.nn.seq2seq.config import SEQ2SEQ_KINDS, RebindSeq2SeqConfig
from rebind.nn.seq2seq.model import RebindForSeq2SeqLM

__all__ = ["SEQ2SEQ_KINDS", "RebindForSeq2SeqLM", "RebindSeq2SeqCache", "RebindSeq2SeqConfig"]
