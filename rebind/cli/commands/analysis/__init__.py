"""Commands that look at a model: causal tracing, the logit lens, the search for layers, and evaluation."""
