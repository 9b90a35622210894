"""nn/parts."""
