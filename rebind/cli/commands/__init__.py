"""One module per command of `rebind`. None of them imports torch before the command runs.

The commands that edit a model are here, `analysis` has those that look at one, and `building` those that train models
and measure operations and memories.
"""
