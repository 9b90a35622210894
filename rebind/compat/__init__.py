"""For people who come from flash-linear-attention or transformers.

- `fla`: the functions of flash-linear-attention, with their names, layouts and return values
- `optimize`: published models of transformers on the operations of rebind
"""
