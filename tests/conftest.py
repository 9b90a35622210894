"""Shared by all tests: seeded tensors and a comparison that says by how much it failed."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported, which is later

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")
torch.set_num_threads(1)
