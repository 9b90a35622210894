"""Multi-query associative recall.

- `experiment`: accuracy against the size of the state; `models`: the task and the models
"""
