"""A life of facts: in the weights, in a dense memory, and moved from one to the other.

- `experiment`: what is measured; `life`: an editor that gets facts in batches
"""
