"""An encoder-decoder for translation, for transformers. Importing this package registers it with the Auto classes.

- `config`: the config
- `kinds`: the kinds of attention that a config can name
- `model`: the model
- `cache`: the states of the decoder and the source, as `generate` carries them
"""

from __future__ import annotations

from rebind.nn.seq2seq.cache import RebindSeq2SeqCache
from rebind.nn.seq2seq.config import RebindSeq2SeqConfig
from rebind.nn.seq2seq.kinds import SEQ2SEQ_KINDS
from rebind.nn.seq2seq.model import RebindForSeq2SeqLM

__all__ = ["SEQ2SEQ_KINDS", "RebindForSeq2SeqLM", "RebindSeq2SeqCache", "RebindSeq2SeqConfig"]
