"""Editing methods in one layer of a language model.

- `experiment`: what each method stores and disturbs; `layer`: the layer as a memory
"""
