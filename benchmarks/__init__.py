"""Measurements: one script a subject. `python -m benchmarks [SUBJECT ...]` runs them."""
