"""Editing methods in one layer of a language model.

- `experiment`: what each method stores and what it costs; `layer`: the layer as a memory
"""
