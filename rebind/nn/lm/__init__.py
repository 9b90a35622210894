"""nn/lm."""
