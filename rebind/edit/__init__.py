"""Slow weights: facts written into a pretrained language model in closed form."""
