"""Shared by all tests: seeded tensors and a comparison that says by how much it failed."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("default")
torch.set_num_threads(1)
