"""Analyze a model: where it recalls facts, what each layer would predict, and which layers to edit.

- `tracing`, `traces`: causal tracing, its settings and results
- `answers`: the next tokens and the continuation of a prompt; `lens`: the logit lens
- `layer_search`: find the layers where edits work best, by trial edits
- `plots`: figures of traces and lenses
"""

from __future__ import annotations

from rebind.analysis.layer_search import TRIAL_FACTS, LayerChoice, saved_layer_choice, search_layers, trial_facts_from
from rebind.analysis.lens import Lens, logit_lens
from rebind.analysis.plots import draw_lens, draw_trace
from rebind.analysis.traces import AverageTrace, Trace, TraceSettings, average_traces
from rebind.analysis.tracing import Tracer

__all__ = [
    "TRIAL_FACTS",
    "AverageTrace",
    "LayerChoice",
    "Lens",
    "Trace",
    "TraceSettings",
    "Tracer",
    "average_traces",
    "draw_lens",
    "draw_trace",
    "logit_lens",
    "saved_layer_choice",
    "search_layers",
    "trial_facts_from",
]
