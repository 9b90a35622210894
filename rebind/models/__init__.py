"""Everything about someone else's language model, behind one object: `LanguageModel`.

language_model   LanguageModel: load, encode, score, generate
prompts          prompts as text and as tokens: start tokens, chat template, context
scoring          how strongly the model believes targets; the likelihood of text
generation       continuations of prompts, and free samples
load             weights and tokenizer from a name, a folder, a file or an object
locate           where the weights are: the embedded model, a folder, a GGUF file, the Hub
gguf             GGUF files, converted once to a folder in the cache
tokenizer        loading a tokenizer; start tokens; decoding a continuation
transformers_io  transformers without progress bars and chatter
fingerprint      a digest of the weights that is the same on every device
sites            the down projections that can be edited, found by structure
trunk            running the model in pieces
mlp_output       what a block does with the output of its down projection
batching         batches that fit in memory
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebind.models.language_model import LanguageModel
    from rebind.models.prompts import EncodedPrompt, Prompt
    from rebind.models.scoring import FactScore
    from rebind.models.sites import Site, find_sites, memory_of, module_at, write_memory
    from rebind.models.trunk import Tokens, Trunk

_HOMES = {
    "EncodedPrompt": "prompts",
    "FactScore": "scoring",
    "LanguageModel": "language_model",
    "Prompt": "prompts",
    "Site": "sites",
    "Tokens": "trunk",
    "Trunk": "trunk",
    "find_sites": "sites",
    "memory_of": "sites",
    "module_at": "sites",
    "write_memory": "sites",
}
__all__ = [
    "EncodedPrompt",
    "FactScore",
    "LanguageModel",
    "Prompt",
    "Site",
    "Tokens",
    "Trunk",
    "find_sites",
    "memory_of",
    "module_at",
    "write_memory",
]


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rebind.models.{_HOMES[name]}"), name)
