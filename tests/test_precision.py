"""TensorFloat-32 for a while."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHOICES = [
    "pass",
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_programs_choice_comes_back(choice):
    """Made by either of torch's switches: the old may not be read after the new, hence a program each."""
    program = f"""
import torch
from rebind.precision import tensor_float
{choice}
seen = torch.backends.cuda.matmul.fp32_precision
for on in (True, False):
    with tensor_float(on):
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if on else "ieee")
    assert torch.backends.cuda.matmul.fp32_precision == seen
"""
    subprocess.run([sys.executable, "-c", program], check=True)
