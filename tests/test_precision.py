"""TensorFloat-32 for a while."""

from __future__ import annotations

from tests.fresh import failures

IMPORTS = "import torch\nfrom rebind.precision import tensor_float"
CHOICES = [
    "pass",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
]
THE_PROGRAMS_CHOICE_COMES_BACK = """
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
"""
WHAT_IS_SAID_FOR_ALL_OPERATIONS_COUNTS_AGAIN = """
torch.cuda.is_available = lambda: True
torch.backends.fp32_precision = "tf32"
with tensor_float(False):
    pass
torch.backends.fp32_precision = "ieee"
assert torch.backends.cuda.matmul.fp32_precision == "ieee"
"""
NOTHING_HAPPENS_WITHOUT_A_GPU = """
torch.cuda.is_available = lambda: False
with tensor_float(True):
    assert torch.get_float32_matmul_precision() == "highest"
"""


def test_the_programs_choice_comes_back():
    """Each case has a process of its own: torch's old switch may not be read after the new one has been used."""
    programs = {choice: THE_PROGRAMS_CHOICE_COMES_BACK.format(choice=choice) for choice in CHOICES}
    programs["all operations"] = WHAT_IS_SAID_FOR_ALL_OPERATIONS_COUNTS_AGAIN
    programs["no GPU"] = NOTHING_HAPPENS_WITHOUT_A_GPU
    assert failures(IMPORTS, programs) == []
