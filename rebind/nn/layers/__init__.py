"""nn/layers."""
