"""Look inside a model: where it recalls facts, what each layer would say, and which layers to edit.

- `tracing`, `traces`: causal tracing, its settings and results
- `attention_outputs`: the modules in which attention ends
- `lens`: the logit lens
- `layer_search`, `trial_facts`: the layers where edits work best, by trial edits
- `plots`: figures of traces and lenses
"""

from __future__ import annotations

from rebind.analysis.layer_search import Candidate, LayerChoice, saved_layer_choice, search_layers
from rebind.analysis.lens import Lens, logit_lens
from rebind.analysis.plots import draw_lens, draw_trace
from rebind.analysis.traces import AverageTrace, Trace, TraceSettings, average_traces
from rebind.analysis.tracing import Tracer
from rebind.analysis.trial_facts import TRIAL_FACTS, TrialFact, trial_facts_from

__all__ = [
    "TRIAL_FACTS",
    "AverageTrace",
    "Candidate",
    "LayerChoice",
    "Lens",
    "Trace",
    "TraceSettings",
    "Tracer",
    "TrialFact",
    "average_traces",
    "draw_lens",
    "draw_trace",
    "logit_lens",
    "saved_layer_choice",
    "search_layers",
    "trial_facts_from",
]
