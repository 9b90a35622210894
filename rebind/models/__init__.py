"""A causal language model from transformers behind one object, `LanguageModel`.

- `language_model`: load, encode, score, generate, and a digest of the weights
- `prompts`: prompts as text and as tokens, with start tokens, chat template and context
- `scoring`, `generation`: how strongly the model believes a target; how it continues a prompt
- `judging`: whether text that the model generates says a target
- `locate`, `load`: from a name, a folder or a file to weights and a tokenizer
- `sites`, `experts`: the memories that can be edited, including routed experts
- `mlp_output`: how a block adds the output of a memory to the residual stream
- `trunk`, `tokens`, `caches`: running the model in pieces, on padded rows behind shared prefixes
- `batching`: batches that fit in memory
- `plausible`: reject a config whose sizes its weights cannot have
- `weights`: offloaded, sharded and quantized weights; the fingerprint
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebind.models.language_model import LanguageModel
    from rebind.models.prompts import EncodedPrompt, Prompt
    from rebind.models.scoring import FactScore
    from rebind.models.sites import Site, find_sites

__all__ = ["EncodedPrompt", "FactScore", "LanguageModel", "Prompt", "Site", "find_sites"]

_MODULES = {
    "EncodedPrompt": "prompts",
    "FactScore": "scoring",
    "LanguageModel": "language_model",
    "Prompt": "prompts",
    "Site": "sites",
    "find_sites": "sites",
}


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when something that needs them is used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rebind.models.{_MODULES[name]}"), name)
