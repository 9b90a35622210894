"""The synthetic retrieval tasks of Schlag et al.

- `capacity`: setting 1, keys that are written once; `overwrite`: setting 2, keys that occur again
- `task`: the sequences; `models`: the models; `training`: training of stacks of models
- `kernels`: two recurrences as GPU kernels
"""
