"""Upper bounds that the library and the command line share.

They are far beyond any use, and small enough that a mistyped number ends at once, with an error that names it.
"""

from __future__ import annotations

MAX_SEED = 2**32 - 1  # torch takes 64 bits, and seeds are multiplied by a million to tell batches apart
MAX_SEEDS = 1_000  # per point of an experiment
MAX_CONTEXTS = 1_000  # sampled to put before a prompt
MAX_CHOICES = 1_000  # next tokens to show
MAX_DRAWS = 1_000  # samples of noise that a trace averages over
MAX_THREADS = 4_096
MAX_SECONDS = 86_400  # of one measurement
MAX_VOCABULARY = 1_000_000  # of a trained tokenizer: it allocates for all of them at once
