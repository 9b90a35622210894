"""Laws of the scan, and of one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebind.errors import InputError, ShapeError
from rebind.memory import get_rule, rule_names, ttt
from rebind.memory.write import Write
from rebind.ops import scan, scan_rule, step
from tests.ops.problems import compare, problem, tolerance_of
from tests.support import Draw, assert_close, raises

EXACT = tolerance_of(torch.float64)
BACKENDS = ("reference", "chunked")


def run(case, backend="chunked", **options):
    named = dict(case.tensors)
    return scan(named.pop("q"), named.pop("k"), named.pop("v"), **named, **{**case.options, **options}, backend=backend)


def part(case, here, state):
    tensors = {name: x[:, here] for name, x in case.tensors.items() if name != "state"}
    return type(case)({**tensors, "state": state}, case.options)


@given(cut=st.integers(0, 90), chunk=st.integers(1, 70))
def test_cut_anywhere_and_continued(cut, chunk):
    case = problem(90, 4, 3, batch=1, heads=2)
    out, final = run(case, chunk=chunk)
    first, state = run(part(case, slice(0, cut), case.tensors["state"]), chunk=chunk)
    second, end = run(part(case, slice(cut, None), state), chunk=chunk)
    assert_close(torch.cat([first, second], dim=1), out, EXACT)
    assert_close(end, final, EXACT)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), chunk=st.integers(1, 20))
def test_packed_is_alone(lengths, chunk):
    case = problem(d_k=3, d_v=2, heads=2, lengths=lengths, chunk=chunk)
    out, final = run(case)
    begin = 0
    for n, length in enumerate(lengths):
        here = slice(begin, begin + length)
        alone = part(case, here, case.tensors["state"][n : n + 1])
        alone_out, alone_final = run(type(case)(alone.tensors), chunk=chunk)
        assert_close(out[:, here], alone_out, EXACT)
        assert_close(final[n : n + 1], alone_final, EXACT)
        begin += length


def test_a_chunk_is_the_composition_of_its_writes():
    """Law 1: composing the tokens' writes, then applying them once, is the scan's final state."""
    case = problem(20, coefficients=("log_decay", "erase"), batch=1, heads=1)
    t = {name: x[0] if name == "state" else x[0, :, 0] for name, x in case.tensors.items()}
    composite = Write.identity(6, 5, dtype=torch.float64)
    for i in range(20):
        gain = t["erase"][i] * t["k"][i]
        token = Write(t["k"][i, None], t["v"][i, None], gain[None], t["log_decay"][i].exp())
        composite = token @ composite
    _, final = run(case.change(write=case.tensors["erase"]))
    assert_close(final[0], composite.apply(t["state"]), EXACT)


@pytest.mark.parametrize("size", [1, 4, 16, 33, 100])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mini_batches_are_test_time_training(size, backend):
    case = problem(33, batch=2, heads=2, coefficients=())
    rate = 0.2 * Draw(8).uniform(2, 33, 2)
    heads_first = {name: x if name == "state" else x.transpose(1, 2) for name, x in case.tensors.items()}
    trained = ttt.run(
        ttt.Linear(),
        (heads_first["state"],),
        heads_first["q"],
        heads_first["k"],
        heads_first["v"],
        rate=rate.transpose(1, 2),
        mini_batch=size,
    )
    out, final = run(case.change(erase=2 * rate, write=2 * rate), backend, mini_batch=size)
    assert_close(out.transpose(1, 2), trained.out, EXACT)
    assert_close(final, trained.state[0], EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalized_is_attention(backend):
    """Linear attention with positive features is a causal average of the values."""
    draw = Draw(2)
    q, k, v = draw.uniform(2, 50, 3, 4), draw.uniform(2, 50, 3, 4), draw.normal(2, 50, 3, 6)
    out, final = scan(q, k, v, normalize=True, backend=backend)
    scores = torch.einsum("bthd,bshd->bhts", q, k).tril()
    expected = torch.einsum("bhts,bshd->bthd", scores / scores.sum(-1, keepdim=True), v)
    assert_close(out, expected, EXACT)
    assert final.shape == (2, 3, 7, 4)
    assert_close(final[:, :, -1], k.sum(1), EXACT)
    first, state = scan(q[:, :20], k[:, :20], v[:, :20], normalize=True, backend=backend)
    second, _ = scan(q[:, 20:], k[:, 20:], v[:, 20:], normalize=True, state=state, backend=backend)
    assert_close(torch.cat([first, second], dim=1), out, EXACT)


def test_normalized_float16_does_not_overflow():
    ones = torch.full((1, 3000, 1, 8), 4.0, dtype=torch.float16)
    out, _ = scan(ones, ones, ones, normalize=True)  # the divisor reaches 384 000
    assert out.dtype == torch.float16
    assert_close(out, ones, torch.finfo(torch.float16).eps)


class TestScanRule:
    def test_numbers_and_tensors_agree(self):
        t = problem(20).tensors
        q, k, v = t["q"], t["k"], t["v"]
        for name in rule_names():
            gates = dict.fromkeys(get_rule(name).gates, 0.3)
            full = {gate: torch.full(v.shape[:3], 0.3, dtype=v.dtype) for gate in gates}
            assert_close(scan_rule(name, q, k, v, **gates)[0], scan_rule(name, q, k, v, **full)[0], EXACT)

    def test_gates_broadcast(self):
        t = problem(20).tensors
        beta = Draw(3).uniform(1, 20, 1)
        got = scan_rule("delta", t["q"], t["k"], t["v"], beta=beta)[0]
        expected = scan_rule("delta", t["q"], t["k"], t["v"], beta=beta.expand(2, 20, 3).contiguous())[0]
        assert_close(got, expected, 0.0)

    def test_keys_shared_by_heads(self):
        case = problem(20, heads=4, key_heads=2)
        t, beta = case.tensors, Draw(3).uniform(2, 20, 4)
        got = scan_rule("longhorn", t["q"], 3 * t["k"], t["v"], beta=beta)[0]
        q, k = (t[name].repeat_interleave(2, dim=2) for name in "qk")
        assert_close(got, scan_rule("longhorn", q, 3 * k, t["v"], beta=beta)[0], EXACT)

    def test_small_gates_keep_their_digits(self):
        """RFA keeps 1 − β a token: rounded to float32 before its logarithm, β = 1e-7 would be 20 % off."""
        length, beta = 4096, 1e-7
        ones = torch.ones(1, length, 1, 1)
        _, final = scan_rule("rfa", ones, ones, 0 * ones, beta=torch.full((1, length, 1), beta), state=ones[:, :1])
        kept = 1 - float(final)
        assert kept == pytest.approx(length * beta, rel=0.03)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_gate_at_zero_forgets_and_has_finite_gradients(self, backend):
        t = problem(20).tensors
        alpha = Draw(4).uniform(2, 20, 3)
        alpha[:, 10] = 0
        alpha.requires_grad_()
        out, final = scan_rule("gated_delta", t["q"], t["k"], t["v"], alpha=alpha, state=t["state"], backend=backend)
        rest, same = scan_rule("gated_delta", *(t[x][:, 10:] for x in "qkv"), alpha=alpha[:, 10:], backend=backend)
        assert_close(out[:, 10:], rest, EXACT)
        assert_close(final, same, EXACT)
        (slope,) = torch.autograd.grad(out.sum() + final.sum(), alpha)
        assert torch.isfinite(slope).all()
        assert (slope[:, 10] == 0).all()

    def test_gates_are_checked(self):
        t = problem(5).tensors
        with raises(InputError, "unknown_gate"):
            scan_rule("delta", t["q"], t["k"], t["v"], alpha=0.5)
        with raises(InputError, "gate_out_of_range"):
            scan_rule("rfa", t["q"], t["k"], t["v"], beta=1.5)


class TestStep:
    @pytest.mark.parametrize("key_heads", [1, 2, 4])
    @pytest.mark.parametrize("coefficients", [(), ("erase",), ("log_decay",), ("log_decay", "erase", "write")], ids=str)
    @pytest.mark.parametrize("normalize", [False, True])
    def test_tokens_one_at_a_time_are_the_scan(self, key_heads, coefficients, normalize):
        case = problem(9, heads=4, key_heads=key_heads, coefficients=coefficients, d_v=6 if normalize else 5)
        tensors = dict(case.tensors)
        if normalize:
            tensors["q"], tensors["k"] = tensors["q"].abs(), tensors["k"].abs()
            tensors["v"] = tensors["v"][..., :5]
            tensors["state"][:, :, -1] = 1.0
        if "log_decay" in tensors:
            tensors["log_decay"][:, 4] = float("-inf")
        state, memory = tensors.pop("state"), case.tensors["state"].clone()
        out, final = scan(tensors["q"], tensors["k"], tensors["v"], state=state, normalize=normalize,
                          **{name: tensors[name] for name in coefficients})  # fmt: skip
        place = memory.data_ptr()
        for t in range(9):
            token = {name: x[:, t] for name, x in tensors.items()}
            got = step(token.pop("q"), token.pop("k"), token.pop("v"), memory, normalize=normalize, **token)
            assert_close(got, out[:, t], EXACT)
        assert_close(memory, final, EXACT)
        assert memory.data_ptr() == place

    def test_dtypes(self):
        case = problem(1).to(torch.bfloat16)
        t = case.tensors
        state = t["state"].clone()
        got = step(t["q"][:, 0], t["k"][:, 0], t["v"][:, 0], state, erase=t["erase"][:, 0])
        out, final = scan(t["q"], t["k"], t["v"], erase=t["erase"], state=t["state"])
        assert got.dtype == torch.bfloat16
        assert state.dtype == torch.float32
        compare({"out": got, "final": state}, {"out": out[:, 0], "final": final}, tolerance_of(torch.bfloat16))

    @pytest.mark.parametrize(
        ("change", "error", "code"),
        [
            ({"q": torch.ones(2, 1, 3, 6).double()}, ShapeError, "sequences_do_not_match"),
            ({"k": torch.ones(2, 3, 7).double()}, ShapeError, "sequences_do_not_match"),
            ({name: torch.ones(2, 2, 6).double() for name in "qk"}, ShapeError, "heads_do_not_match"),
            ({"state": torch.ones(2, 3, 6, 5).double()}, ShapeError, "state_does_not_match"),
            ({"state": torch.ones(2, 3, 5, 6).bfloat16()}, InputError, "wrong_dtype"),
            ({"erase": torch.ones(2, 4).double()}, ShapeError, "coefficient_does_not_match"),
            ({"v": torch.ones(2, 3, 5, device="meta").double()}, InputError, "devices_differ"),
        ],
    )
    def test_bad_input(self, change, error, code):
        t = problem(1).tensors
        token = {"q": t["q"][:, 0], "k": t["k"][:, 0], "v": t["v"][:, 0], "state": t["state"], **change}
        with raises(error, code):
            step(**token)
