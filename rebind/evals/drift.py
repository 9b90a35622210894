"""The model as a whole, before and after: perplexity of held text, answers to unrelated prompts, growth of weights."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from rebind.edit.editor import Editor
from rebind.errors import InputError
from rebind.evals.asking import Model, text_nll
from rebind.evals.metrics import perplexity

HELD = Path(__file__).parent / "data" / "held.txt"


class Held:
    """What should stay as it is in a model; `measure` says how far the model as it stands is from its base."""

    def __init__(self, editor: Editor, text: str | None = None) -> None:
        self.editor = editor
        self.name = "bundled" if text is None else "given"
        self.text = HELD.read_text(encoding="utf-8") if text is None else text
        if not self.text.strip():
            raise InputError("the held text is empty, expected some hundreds of words: pass another file")

    @property
    def described(self) -> dict[str, Any]:
        return {"text": self.name, "text_digest": hashlib.sha256(self.text.encode()).hexdigest()}

    def measure(self) -> dict[str, Any]:
        """Perplexity of the text; KL from the base on the canaries, in nats; ‖W' − W‖ / ‖W‖, the largest and all."""
        editor = self.editor
        nll, tokens = text_nll(Model.of(editor), self.text)
        moved = editor.drift()
        return {
            "perplexity": _finite(perplexity(nll, tokens)),
            "kl": _finite(moved.kl),
            "largest_kl": _finite(moved.largest),
            "growth": _finite(moved.growth),
            "sites": {site: _finite(value) for site, value in editor.weights.growth().items() if value},
        }


def _finite(value: float) -> float | None:
    """A number for JSON; None for what a broken model makes of it."""
    return round(value, 6) if math.isfinite(value) else None
