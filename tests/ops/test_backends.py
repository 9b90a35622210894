"""The contract of a backend: the recurrence and all of its gradients, whatever the shape.

A backend is added by one entry in `CANDIDATES`; what it cannot take is left out there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

from rebind.memory import get_rule, rule_names
from rebind.ops import scan, scan_rule
from tests.ops.problems import CHANNELS, COEFFICIENTS, Problem, compare, home, outcome, problem, tolerance_of
from tests.support import Draw, assert_close

LENGTHS = (1, 2, 63, 64, 65, 100, 257)
WIDTHS = ((1, 8), (8, 1), (24, 80), (64, 24), (80, 64), (128, 256), (256, 128))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Candidate:
    """A backend to hold to the contract."""

    name: str
    dtype: torch.dtype = torch.float64  # the widest that it takes, in which most of the tests run
    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[tuple[int, int], ...] = WIDTHS
    dtypes: tuple[torch.dtype, ...] = DTYPES
    length: int = 70  # of most of the problems: two borders of the kernels' chunks of 32, and a tail
    slack: float = 1.0  # times the tolerance in narrower dtypes: kernels round what they multiply to these
    sizes: dict[str, int] = field(default_factory=dict)  # of problems, where they are not those of `problem`

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.dtype)


GPU = torch.cuda.is_available()
KERNELS = Candidate(
    "triton",
    dtype=torch.float32,
    lengths=LENGTHS if GPU else LENGTHS[:-1],
    widths=WIDTHS if GPU else WIDTHS[:4],  # the interpreter takes seconds for wide heads
    # The interpreter has no bfloat16.
    dtypes=(torch.float32, torch.bfloat16, torch.float16) if GPU else (torch.float32, torch.float16),
    length=70 if GPU else 50,  # one border of a chunk, and a tail beyond half of one; more in `test_lengths`
    slack=4.0,
    sizes={} if GPU else {"batch": 1, "heads": 2},
)
CANDIDATES = {"chunked": Candidate("chunked")} | ({"triton": KERNELS} if find_spec("triton") else {})


def over(attribute: str) -> Iterator[object]:
    """(candidate, value) for every value of an attribute of every candidate."""
    for candidate in CANDIDATES.values():
        for value in getattr(candidate, attribute):
            yield pytest.param(candidate, value, id=f"{candidate.name}-{value}")


every_candidate = pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)


def slow(candidate: Candidate, coefficients: tuple[str, ...]) -> bool:
    """Whether kernels for channels are interpreted, which have many small steps."""
    return candidate.name == "triton" and not GPU and "log_decays" in coefficients


def case_for(candidate: Candidate, *sizes: int, **options: Any) -> Problem:
    return problem(*sizes, **{**candidate.sizes, **options}).to(candidate.dtype)


def check(candidate: Candidate, *sizes: int, **options: Any) -> None:
    case = case_for(candidate, *sizes, **options)
    compare(outcome(case, candidate.name), outcome(case.double(), "reference"), candidate.tolerance)


every_form = pytest.mark.parametrize(
    "coefficients", [COEFFICIENTS, (), CHANNELS, ("log_decays",)], ids=["gated", "plain", "channels", "decays"]
)


@pytest.mark.parametrize(("candidate", "length"), over("lengths"))
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_lengths(candidate, length, coefficients):
    if slow(candidate, coefficients) and length not in (1, 65):
        pytest.skip("the interpreter is slow")
    check(candidate, length, coefficients=coefficients)


@pytest.mark.parametrize(("candidate", "widths"), over("widths"))
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_widths(candidate, widths, coefficients):
    if slow(candidate, coefficients) and max(widths) > 24:
        pytest.skip("the interpreter is slow")
    check(candidate, 65, *widths, batch=1, heads=1, coefficients=coefficients)


@every_candidate
@pytest.mark.parametrize("present", list(product((False, True), repeat=4)), ids=str)
def test_every_coefficient_may_be_left_out(candidate, present):
    *given, state = present
    names = [name for name, there in zip(COEFFICIENTS, given, strict=True) if there]
    check(candidate, candidate.length, coefficients=names, state=state)


@every_candidate
@pytest.mark.parametrize(
    "names", [("log_decays", "erase"), ("erase", "probe"), ("log_decay", "write", "probe")], ids=str
)
def test_forms_between_a_number_per_token_and_a_vector(candidate, names):
    check(candidate, 40, coefficients=names)


@every_candidate
@pytest.mark.parametrize("name", [name for name in rule_names() if not get_rule(name).several])
def test_rules(candidate, name):
    """Through the gates: `scan_rule` against writing the rule's `Write`s one by one."""
    draw, rule, length = Draw(3), get_rule(name), candidate.length
    case = problem(length, batch=1, heads=2, coefficients=(), seed=4).to(candidate.dtype)
    gates = {gate: (0.1 + 0.8 * draw.uniform(1, length, 2)).to(candidate.dtype) for gate in rule.gates}
    draws = Draw(5)
    slopes = draws.normal(1, length, 2, 5), draws.normal(1, 2, 5, 6)

    def grads(run, dtype, there="cpu"):
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in (case.tensors | gates).items()}
        out, final = (x.cpu() for x in run(**{n: x.to(there) for n, x in leaves.items()}))
        loss = (out * slopes[0].to(dtype)).sum() + (final * slopes[1].to(dtype)).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
        return {"out": out, "final": final, **dict(zip(leaves, found, strict=True))}

    def ours(q, k, v, state, **gates):
        return scan_rule(name, q, k, v, state=state, backend=candidate.name, **gates)

    def folded(q, k, v, state, **gates):
        outs = []
        for t in range(q.shape[1]):
            state = rule.write(k[:, t], v[:, t], **{gate: value[:, t] for gate, value in gates.items()}).apply(state)
            outs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outs, dim=1), state

    compare(grads(ours, candidate.dtype, home(candidate.name)), grads(folded, torch.float64), candidate.tolerance)


@every_candidate
@pytest.mark.parametrize(
    "lengths", [(65,), (1,), (0,), (0, 0), (1, 0, 64, 0, 1), (3, 70, 64, 63, 1), (0, 7, 0)], ids=str
)
@every_form
def test_packing(candidate, lengths, coefficients):
    if candidate.name == "triton" and not sum(lengths):
        pytest.skip("nothing to compute is left to the chunked backend")
    if slow(candidate, coefficients) and (lengths != (3, 70, 64, 63, 1) or "probe" not in coefficients):
        pytest.skip("the interpreter is slow")
    check(candidate, lengths=lengths, coefficients=coefficients)


@every_candidate
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("lengths", [None, (30, 0, 40)], ids=["rows", "packed"])
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_heads_that_share_keys(candidate, key_heads, lengths, coefficients):
    if slow(candidate, coefficients) and (key_heads == 1 or lengths is None):
        pytest.skip("the interpreter is slow")
    if candidate.name == "triton" and not GPU and (key_heads == 1) != (lengths is None):
        pytest.skip("the interpreter is slow: each number of heads and each layout has one case")
    check(candidate, 70, heads=4, key_heads=key_heads, lengths=lengths, coefficients=coefficients)


@every_candidate
@pytest.mark.parametrize("size", [1, 3, 16, 64, 1000])
@pytest.mark.parametrize("lengths", [None, (30, 0, 40)], ids=["rows", "packed"])
def test_mini_batches(candidate, size, lengths):
    if candidate.name == "triton" and size not in (16, 32, 64):
        pytest.skip("the kernels take a power of two that is a chunk")
    check(candidate, 70, coefficients=("erase", "write"), lengths=lengths, mini_batch=size)


@every_candidate
@pytest.mark.parametrize("coefficients", [(), ("erase",)], ids=str)
def test_mini_batches_of_simpler_rules(candidate, coefficients):
    check(candidate, candidate.length, coefficients=coefficients, mini_batch=16)


@every_candidate
@pytest.mark.parametrize("size", [1, 16, 50, 128])
def test_the_chunk_does_not_matter(candidate, size):
    if candidate.name == "triton":
        pytest.skip("the kernels have their own chunk")
    check(candidate, 150, chunk=size)
    check(candidate, 150, chunk=size, coefficients=CHANNELS)


@every_candidate
@pytest.mark.parametrize("lengths", [None, (30, 0, 100)], ids=["rows", "packed"])
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_forgetting_everything(candidate, lengths, coefficients):
    """ln α = −inf: the token's own write is all there is, gradients are finite, and that of ln α is 0."""
    if slow(candidate, coefficients) and lengths is None:
        pytest.skip("the interpreter is slow")
    case = case_for(candidate, 130, lengths=lengths, coefficients=coefficients)
    log_decay = case.tensors["log_decay"].clone()
    log_decay[:, ::7] = float("-inf")
    log_decay[:, 50:53] = float("-inf")
    log_decay[:, :, 1] = float("-inf")
    case = case.change(log_decay=log_decay)
    got = outcome(case, candidate.name)
    compare(got, outcome(case.double(), "reference"), candidate.tolerance)
    assert (got["d_log_decay"][log_decay == float("-inf")] == 0).all()


@every_candidate
@pytest.mark.parametrize("lengths", [None, (3, 70, 0, 1)], ids=["rows", "packed"])
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, ("log_decay", "probe"), CHANNELS], ids=str)
@pytest.mark.parametrize("key_heads", [None, 1])
def test_probes_that_read_before_the_decay(candidate, lengths, coefficients, key_heads):
    if slow(candidate, coefficients) and (lengths is None or key_heads is None):
        pytest.skip("the interpreter is slow")
    length = candidate.length
    check(candidate, length, lengths=lengths, coefficients=coefficients, key_heads=key_heads, probe_before_decay=True)


@every_candidate
def test_without_a_decay_or_an_erase_probes_read_one_memory(candidate):
    for coefficients in (("log_decay", "write"), ("erase", "probe"), ()):
        case = case_for(candidate, 40, coefficients=coefficients)
        before = outcome(case.with_options(probe_before_decay=True), candidate.name)
        compare(before, outcome(case, candidate.name), 0.0)


@pytest.mark.parametrize("coefficients", [COEFFICIENTS, CHANNELS], ids=["gated", "channels"])
def test_a_probe_reads_what_is_about_to_be_forgotten(coefficients):
    case = problem(70, coefficients=coefficients, probe_before_decay=True)
    log_decay = case.tensors["log_decay"].clone()
    log_decay[:, ::7] = log_decay[:, 31:34] = float("-inf")
    case = case.change(log_decay=log_decay)
    got = outcome(case, "chunked")
    compare(got, outcome(case, "reference"), tolerance_of(torch.float64))
    assert (got["d_log_decay"][log_decay == float("-inf")] == 0).all()


@every_candidate
@pytest.mark.parametrize("of", ["out", "final"])
def test_one_result_alone(candidate, of):
    case = case_for(candidate, candidate.length)
    compare(outcome(case, candidate.name, of=[of]), outcome(case.double(), "reference", of=[of]), candidate.tolerance)


@every_candidate
def test_strides(candidate):
    """Tensors laid out otherwise, and a cotangent that is one number expanded."""
    case = case_for(candidate, candidate.length)
    moved = {name: x.transpose(1, -1).contiguous().transpose(1, -1) for name, x in case.tensors.items()}
    assert not moved["q"].is_contiguous()

    def slopes(tensors, backend):
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        named = {name: x.to(home(backend)) for name, x in leaves.items()}
        out, _ = scan(named.pop("q"), named.pop("k"), named.pop("v"), **named, backend=backend)
        return dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))

    compare(slopes(moved, candidate.name), slopes(case.double().tensors, "reference"), candidate.tolerance)


@every_candidate
@pytest.mark.parametrize("lengths", [None, (1, 0, 66, 3)], ids=["rows", "packed"])
@every_form
def test_nothing_is_read_before_it_is_written(candidate, lengths, coefficients, monkeypatch):
    """With every fresh buffer full of NaN, results do not change."""
    if slow(candidate, coefficients) and (lengths is None or "probe" not in coefficients):
        pytest.skip("the interpreter is slow")
    case = case_for(candidate, candidate.length, lengths=lengths, coefficients=coefficients)
    expected = outcome(case, candidate.name)
    filled = []

    def poisoned(make):
        def call(*args, **kwargs):
            made = make(*args, **kwargs)
            filled.append(made)
            return made.fill_(float("nan")) if made.is_floating_point() else made

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
    compare(outcome(case, candidate.name), expected, 0.0)
    assert filled, "nothing was poisoned: this test has become blind"


@pytest.mark.parametrize(("candidate", "dtype"), over("dtypes"))
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, ("log_decay",), CHANNELS], ids=["gated", "decay", "channels"])
def test_dtypes(candidate, dtype, coefficients):
    size = {"length": 70, "heads": 1} if slow(candidate, coefficients) else {"length": 130}
    case = problem(d_k=24, d_v=16, batch=1, coefficients=coefficients, **size).to(dtype)
    got = outcome(case, candidate.name)
    assert got["out"].dtype == dtype
    assert got["final"].dtype == torch.promote_types(dtype, torch.float32)
    assert all(got[f"d_{name}"].dtype == x.dtype for name, x in case.tensors.items())
    compare(got, outcome(case.double(), "reference"), candidate.slack * tolerance_of(dtype))


@every_candidate
def test_coefficients_and_states_of_other_dtypes(candidate):
    case = problem(candidate.length, **candidate.sizes).to(torch.float32)
    other = case.change(
        log_decay=case.tensors["log_decay"].double(),
        erase=case.tensors["erase"].bfloat16(),
        state=case.tensors["state"].half(),
    )
    got = outcome(other, candidate.name)
    assert got["final"].dtype == torch.float32
    for name in ("log_decay", "erase", "state"):
        assert got[f"d_{name}"].dtype == other.tensors[name].dtype
    compare(got, outcome(other.double(), "reference"), candidate.slack * tolerance_of(torch.bfloat16))


@every_candidate
@pytest.mark.parametrize("empty", ["length", "batch", "sequences"])
def test_nothing_to_do(candidate, empty):
    if candidate.name == "triton":
        pytest.skip("left to the chunked backend")
    case = {
        "length": problem(0),
        "batch": problem(5, batch=0),
        "sequences": problem(lengths=()),
    }[empty].to(candidate.dtype)
    got = outcome(case, candidate.name)
    compare(got, outcome(case.double(), "reference"), candidate.tolerance)
    assert_close(got["final"], case.tensors["state"], 0.0)


@every_candidate
def test_results_share_no_memory_with_what_was_given(candidate):
    for length in (5,) if candidate.name == "triton" else (0, 5):
        case = problem(length).to(candidate.dtype)
        tensors = {name: x.to(home(candidate.name)) for name, x in case.tensors.items()}
        out, final = scan(tensors.pop("q"), tensors.pop("k"), tensors.pop("v"), **tensors, backend=candidate.name)
        before = {name: x.clone() for name, x in case.tensors.items()}
        out.fill_(7)
        final.fill_(7)
        for name, x in case.tensors.items():
            assert torch.equal(x, before[name]), name


@every_candidate
def test_same_inputs_same_bytes(candidate):
    case = case_for(candidate, 130, lengths=(70, 60))
    compare(outcome(case, candidate.name), outcome(case, candidate.name), 0.0)
