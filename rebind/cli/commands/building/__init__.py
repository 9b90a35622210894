"""Commands for model builders and researchers: training, generation, benchmarks and the lab."""
