"""The translation benchmark: German to English with several kinds of attention (`python -m benchmarks.translation`)."""
