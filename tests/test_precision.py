"""TensorFloat-32 for a while."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHOICES = [
    "pass",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
]


def run(program):
    """In a process of its own: torch's old switch may not be read after the new one has been used."""
    subprocess.run(
        [sys.executable, "-c", f"import torch\nfrom rebind.precision import tensor_float\n{program}"], check=True
    )


@pytest.mark.parametrize("choice", CHOICES)
def test_the_programs_choice_comes_back(choice):
    run(f"""
torch.cuda.is_available = lambda: True
def told():
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision
{choice}
before = told()
for on in (True, False):
    with tensor_float(on):
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if on else "ieee")
        told()
    assert told() == before, (told(), before)
""")


def test_what_is_said_for_all_operations_counts_again():
    run("""
torch.cuda.is_available = lambda: True
torch.backends.fp32_precision = "tf32"
with tensor_float(False):
    pass
torch.backends.fp32_precision = "ieee"
assert torch.backends.cuda.matmul.fp32_precision == "ieee"
""")


def test_nothing_happens_without_a_gpu():
    run("""
torch.cuda.is_available = lambda: False
with tensor_float(True):
    assert torch.get_float32_matmul_precision() == "highest"
""")
