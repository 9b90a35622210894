"""Measure the model as a whole: perplexity of a text, answers to canary prompts, growth of the weights."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from rebind.edit.editor import Editor
from rebind.evals.metrics import perplexity

BUNDLED_TEXT = Path(__file__).parent / "data" / "held.txt"


class DriftMeter:
    """Measure how far a model is from its base model, on text and prompts that no edit is about."""

    def __init__(self, editor: Editor, text: str | None = None) -> None:
        self.editor = editor
        self.text = BUNDLED_TEXT.read_text(encoding="utf-8") if text is None else text
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        self.config = {"text": "bundled" if text is None else "custom", "text_digest": digest}

    def measure(self) -> dict[str, Any]:
        """Return perplexity, KL(base ‖ edited) on the canary prompts in nats, and ‖W' − W‖ / ‖W‖ of the sites."""
        drift = self.editor.drift()
        return {
            "perplexity": _finite(perplexity(*self.editor.language_model.text_nll(self.text))),
            "kl": _finite(drift.kl),
            "largest_kl": _finite(drift.largest),
            "growth": _finite(drift.growth),
            "sites": {site: _finite(value) for site, value in self.editor.weights.growth().items() if value},
        }


def _finite(value: float) -> float | None:
    """Return a number for JSON, or None for a number that is not finite."""
    return round(value, 6) if math.isfinite(value) else None
