"""Multi-query associative recall.

- `experiment`: accuracy against the size of the state
- `task`: the sequences, and the settings; `models`, `training`: what learns them, and how
"""
