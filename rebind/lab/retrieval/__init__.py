"""The synthetic retrieval tasks of Schlag et al.

- `capacity`: setting 1, keys that are written once; `overwrite`: setting 2, keys that occur again
- `task`: the sequences; `models`: what a model reads; `training`: how stacks of models are trained
- `kernels`: two recurrences as GPU kernels
"""
