"""Functions with the names and layouts of flash-linear-attention, against their recurrences written out."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch.nn import functional

from rebind.compat import fla
from rebind.errors import InputError
from tests.support import Draw, assert_close

B, T, H, HV, K, V = 2, 37, 2, 4, 5, 6


def inputs(rows=B, length=T, seed=0):
    draw = Draw(seed)
    return {
        "q": draw.normal(rows, length, H, K),
        "k": functional.normalize(draw.normal(rows, length, H, K), dim=-1),
        "v": draw.normal(rows, length, HV, V),
        "g": -draw.normal(rows, length, HV).exp() / 5,
        "gk": -draw.normal(rows, length, HV, K).exp() / 5,
        "beta": torch.sigmoid(draw.normal(rows, length, HV)),
        "state": draw.normal(rows, HV, K, V),
    }


def loop(q, k, v, g, beta, state, scale=K**-0.5):
    """S ← exp(g) S; S ← S + β k (v − Sᵀ k)ᵀ, or + k vᵀ without β; o = Sᵀ q · scale. S is [K, V]."""
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = torch.zeros_like(k) if g is None else g.unsqueeze(-1).expand_as(k) if g.ndim == 3 else g
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        value = v[:, t]
        if beta is not None:
            value = beta[:, t].unsqueeze(-1) * (value - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outs, dim=1), state


FORMS = {  # how each function is called, and the gates of the loop
    "chunk_gated_delta_rule": (("g", "beta"), ("g", "beta")),
    "fused_recurrent_gated_delta_rule": (("g", "beta"), ("g", "beta")),
    "chunk_delta_rule": (("beta",), (None, "beta")),
    "fused_recurrent_delta_rule": (("beta",), (None, "beta")),
    "chunk_kda": (("g", "beta"), ("gk", "beta")),
    "fused_recurrent_kda": (("g", "beta"), ("gk", "beta")),
    "chunk_gla": (("g",), ("gk", None)),
    "fused_recurrent_gla": (("gk",), ("gk", None)),
    "chunk_simple_gla": (("g",), ("g", None)),
    "fused_recurrent_simple_gla": (("g",), ("g", None)),
}
EVERY = pytest.mark.parametrize("name", FORMS)


def gates(name, x):
    """Return the gates as keywords of the function, and as arguments of the loop."""
    names, (decay, beta) = FORMS[name]
    values = {"g": x.get(decay), "gk": x.get(decay), "beta": x.get(beta)}
    return {one: values[one] for one in names}, (x.get(decay), x.get(beta))


@EVERY
def test_outputs_states_and_gradients(name):
    x = inputs()
    keywords, of_loop = gates(name, x)
    leaves = [tensor.requires_grad_() for tensor in x.values()]
    state = {"initial_state": x["state"], "output_final_state": True}
    out, final = getattr(fla, name)(x["q"], x["k"], x["v"], **keywords, **state)
    expected, last = loop(x["q"], x["k"], x["v"], *of_loop, x["state"])
    assert_close(out, expected)
    assert_close(final, last)
    slopes = Draw(5).normal(*out.shape), Draw(6).normal(*final.shape)
    pairs = [((one * slopes[0]).sum() + (two * slopes[1]).sum()) for one, two in ((out, final), (expected, last))]
    got, wanted = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in pairs)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


@EVERY
def test_one_token_without_gradients(name):
    """Decoding, which takes the faster step, and leaves the state that it was given alone."""
    x = inputs(length=1)
    keywords, of_loop = gates(name, x)
    before = x["state"].clone()
    out, final = getattr(fla, name)(
        x["q"], x["k"], x["v"], **keywords, initial_state=x["state"], output_final_state=True
    )
    expected, last = loop(x["q"], x["k"], x["v"], *of_loop, before)
    assert_close(out, expected)
    assert_close(final, last)
    assert torch.equal(x["state"], before)


@EVERY
def test_packed_sequences(name):
    x = inputs(rows=1)
    keywords, of_loop = gates(name, x)
    bounds, state = torch.tensor([0, 9, 10, T]), Draw(3).normal(3, HV, K, V)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": bounds, "scale": 0.3}
    out, final = getattr(fla, name)(x["q"], x["k"], x["v"], **keywords, **options)
    for n, (a, b) in enumerate(((0, 9), (9, 10), (10, T))):
        parts = [None if tensor is None else tensor[:, a:b] for tensor in (x["q"], x["k"], x["v"], *of_loop)]
        expected, last = loop(*parts, state[n : n + 1], scale=0.3)
        assert_close(out[:, a:b], expected)
        assert_close(final[n : n + 1], last)


def test_without_a_state_none_is_returned_and_the_first_is_zero():
    x = inputs()
    out, final = fla.chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])
    assert final is None
    assert_close(out, loop(x["q"], x["k"], x["v"], x["g"], x["beta"], torch.zeros_like(x["state"]))[0])


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"])
def test_what_fla_computes_in_its_kernels(name):
    x = inputs()
    channels = (HV, K) if "kda" in name else (HV,)
    raw, rate, bias = Draw(7).normal(B, T, *channels), Draw(8).normal(HV), Draw(9).normal(*channels)
    factor = rate.exp().reshape(-1, *[1] * (len(channels) - 1))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (x["q"], 3 * x["k"]))
    beta = 2 * torch.sigmoid(x["g"])
    decays = {None: -factor * functional.softplus(raw + bias)}
    if "kda" in name:
        decays[-5.0] = -5.0 * torch.sigmoid(factor * (raw + bias))
    for bound, decay in decays.items():
        expected, last = loop(q, k, x["v"], decay, beta, x["state"])
        out, final = getattr(fla, name)(
            x["q"],
            3 * x["k"],
            x["v"],
            raw,
            x["g"],
            A_log=rate,
            dt_bias=bias.flatten(),
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
            state_v_first=True,
            initial_state=x["state"].mT,
            output_final_state=True,
            **({} if bound is None else {"lower_bound": bound}),
        )
        assert_close(out, expected)
        assert_close(final, last.mT)


@pytest.mark.parametrize("length", [1, T])
@torch.no_grad()
def test_gates_of_gdn2(length):
    x, draw = inputs(length=length), Draw(11)
    b, w = torch.sigmoid(draw.normal(B, length, HV, K)), torch.sigmoid(draw.normal(B, length, HV, V))
    options = {"initial_state": x["state"], "output_final_state": True}
    out, final = fla.chunk_gdn2(x["q"], x["k"], x["v"], x["gk"], b, w, **options)
    assert torch.equal(fla.fused_recurrent_gdn2(x["q"], x["k"], x["v"], x["gk"], b, w, **options)[0], out)
    state, outs = x["state"], []
    q, k = (y.repeat_interleave(HV // H, dim=2) for y in (x["q"], x["k"]))
    for t in range(length):
        state = state * x["gk"][:, t].exp().unsqueeze(-1)
        value = w[:, t] * x["v"][:, t] - torch.einsum("bhkv,bhk->bhv", state, b[:, t] * k[:, t])
        state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * K**-0.5)
    assert_close(out, torch.stack(outs, dim=1))
    assert_close(final, state)


def test_a_constant_decay_per_head():
    x, gamma = inputs(), -torch.rand(HV).double()
    out, _ = fla.chunk_simple_gla(x["q"], x["k"], x["v"], g_gamma=gamma, initial_state=x["state"])
    assert_close(out, loop(x["q"], x["k"], x["v"], gamma.expand(B, T, HV), None, x["state"])[0])


def test_linear_attention_with_its_denominator():
    x = inputs()
    q, k = x["q"].abs(), x["k"].abs()
    wide_k, wide_q = (y.repeat_interleave(HV // H, dim=2) for y in (k, q))
    weights = torch.einsum("bthk,bshk->bhts", wide_q, wide_k).tril()
    expected = torch.einsum("bhts,bshv->bthv", weights / weights.sum(-1, keepdim=True), x["v"])
    assert_close(fla.chunk_linear_attn(q, k, x["v"])[0], expected, 1e-8)  # it adds 1e-10 to the denominator
    first, state = fla.chunk_linear_attn(q[:, :20], k[:, :20], x["v"][:, :20], output_final_state=True)
    assert [list(part.shape) for part in state] == [[B, HV, K, V], [B, 1, HV, K]]
    second, _ = fla.fused_recurrent_linear_attn(
        q[:, 20:], k[:, 20:], x["v"][:, 20:], initial_state=state, normalize=True
    )
    assert_close(torch.cat([first, second], dim=1), expected, 1e-8)
    plain, last = fla.fused_recurrent_linear_attn(q, k, x["v"], initial_state=x["state"], output_final_state=True)
    for one, other in zip((plain, last), loop(q, k, x["v"], None, None, x["state"]), strict=True):
        assert_close(one, other)


def test_bfloat16_and_its_states():
    x = {name: tensor.bfloat16() for name, tensor in inputs().items()}
    out, final = fla.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], output_final_state=True
    )
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)


def test_what_is_not_supported_is_refused():
    x = inputs()
    qkv = x["q"], x["k"], x["v"]
    calls = [
        ("unknown_argument", lambda: fla.chunk_gated_delta_rule(*qkv, x["g"], x["beta"], head_first=True)),
        ("unknown_argument", lambda: fla.chunk_kda(*qkv, x["gk"], x["beta"], cp_context=object())),
        ("unsupported_option", lambda: fla.fused_recurrent_gla(*qkv, gk=x["gk"], reverse=True)),
        ("unsupported_option", lambda: fla.fused_recurrent_gla(*qkv, gv=x["v"])),
        ("unsupported_option", lambda: fla.chunk_kda(*qkv, x["gk"], x["beta"], return_intermediate_states=True)),
        ("missing_gate", lambda: fla.chunk_kda(*qkv, x["gk"], x["beta"], use_gate_in_kernel=True)),
        ("invalid_gate", lambda: fla.chunk_kda(*qkv, x["gk"], x["beta"], allow_neg_eigval=True)),
        ("invalid_state", lambda: fla.chunk_linear_attn(*qkv, normalize=False, initial_state=(x["q"], x["q"]))),
        ("wrong_shape", lambda: fla.chunk_gated_delta_rule(*qkv, x["g"][:, 1:], x["beta"])),
        ("wrong_shape", lambda: fla.chunk_gated_delta_rule(*qkv, x["g"], x["beta"][..., :1])),
        ("wrong_shape", lambda: fla.chunk_gated_delta_rule(*qkv, x["g"], x["beta"], initial_state=x["state"].mT)),
        (
            "sequences_do_not_match",
            lambda: fla.chunk_gated_delta_rule(*(y.transpose(1, 2) for y in qkv), x["g"], x["beta"]),
        ),
    ]
    for code, call in calls:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.code == code
    out, _ = fla.chunk_gated_delta_rule(*qkv, x["g"], x["beta"], chunk_size=32, cp_context=None)
    assert out.shape == x["v"].shape


def test_every_function_takes_what_fla_calls_it_with():
    for name in FORMS:
        parameters = inspect.signature(getattr(fla, name)).parameters
        assert {"q", "k", "v", "scale", "initial_state", "output_final_state", "cu_seqlens"} <= set(parameters)


# Rules that read apart from their keys


def low_rank_loop(q, k, v, a, b, g, state, scale=1.0):
    """S ← diag(exp g) S + b (aᵀ S) + k vᵀ; o = Sᵀ q · scale. S is [K, V], and everything but v is [B, T, HV, K]."""
    outs = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhkv,bhk->bhv", state, a[:, t])
        state = state * g[:, t].exp().unsqueeze(-1) + b[:, t].unsqueeze(-1) * read.unsqueeze(-2)
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * scale)
    return torch.stack(outs, dim=1), state


def low_rank_inputs(length=T, rows=B):
    draw = Draw(21)
    x = {name: draw.normal(rows, length, HV, K) for name in ("q", "k", "a", "b")}
    x |= {"v": draw.normal(rows, length, HV, V), "g": -draw.normal(rows, length, HV, K).exp() / 5}
    x |= {"a": functional.normalize(x["a"], dim=-1), "state": draw.normal(rows, HV, K, V)}
    return {name: tensor.requires_grad_() for name, tensor in x.items()}


def assert_same(results, expected, leaves):
    """Compare outputs, states and their gradients."""
    for one, other in zip(results, expected, strict=True):
        assert_close(one, other)
    slopes = [Draw(5 + n).normal(*part.shape) for n, part in enumerate(expected)]
    got, wanted = (
        torch.autograd.grad(sum((part * slope).sum() for part, slope in zip(parts, slopes, strict=True)), leaves)
        for parts in (results, expected)
    )
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other)


def test_diagonal_plus_low_rank():
    x = low_rank_inputs()
    order = ("q", "k", "v", "a", "b", "g")
    options = {"initial_state": x["state"], "output_final_state": True}
    for name in ("chunk_dplr_delta_rule", "fused_recurrent_dplr_delta_rule"):
        results = getattr(fla, name)(*(x[one] for one in order), **options)
        assert_same(results, low_rank_loop(**x, scale=K**-0.5), list(x.values()))


def test_rwkv7_is_not_scaled_in_its_chunk_form():
    x = low_rank_inputs()
    order = ("q", "g", "k", "v", "a", "b")
    out, final = fla.chunk_rwkv7(*(x[one] for one in order), initial_state=x["state"], lower_bound=-9.0)
    expected, last = low_rank_loop(**x)
    assert final is None
    assert_close(out, expected)
    out, final = fla.fused_recurrent_rwkv7(*(x[one] for one in order), initial_state=x["state"])
    assert_close(out, expected * K**-0.5)
    assert_close(final, last)


@pytest.mark.parametrize("norm", [False, True])
def test_comba_reads_before_the_decay(norm):
    x = {name: tensor.requires_grad_() for name, tensor in inputs().items() if name != "gk"}
    p = Draw(31).normal(B, T, H, K).requires_grad_()
    options = {"scale": 0.3, "initial_state": x["state"], "output_final_state": True, "use_qk_l2norm_in_kernel": norm}
    results = fla.chunk_comba(x["q"], x["k"], x["v"], p, x["g"], x["beta"], **options)
    again = fla.fused_recurrent_comba(x["q"], x["k"], p, x["v"], x["g"], x["beta"], **options)
    q, k, probe = (y.repeat_interleave(HV // H, dim=2) for y in (x["q"], x["k"], p))
    if norm:
        q, k, probe = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k, probe))
    beta, g = x["beta"].unsqueeze(-1), x["g"].unsqueeze(-1).expand_as(k)
    expected = low_rank_loop(q, k, beta * x["v"], probe, -beta * k, g, x["state"], scale=0.3)
    assert_same(results, expected, [*x.values(), p])
    assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))


def test_comba_reads_at_its_keys_by_default():
    x = inputs()
    default, _ = fla.chunk_comba(x["q"], x["k"], x["v"], None, x["g"])
    explicit, _ = fla.chunk_comba(x["q"], x["k"], x["v"], x["k"], x["g"], torch.ones_like(x["beta"]))
    assert torch.equal(default, explicit)


@pytest.mark.parametrize("decays", [False, True])
def test_several_writes_per_token(decays):
    """Of n rows per token, the first decays and the last is read."""
    n, x = 3, inputs(length=3 * T)
    q, g = x["q"][:, :T], x["g"][:, :T] if decays else None
    results = fla.chunk_gated_delta_product(
        q, x["k"], x["v"], g, x["beta"], n, scale=0.3, initial_state=x["state"], output_final_state=True
    )
    rows_g = torch.zeros_like(x["g"])
    if g is not None:
        rows_g[:, ::n] = g
    expected, last = loop(q.repeat_interleave(n, dim=1), x["k"], x["v"], rows_g, x["beta"], x["state"], scale=0.3)
    assert_close(results[0], expected[:, n - 1 :: n])
    assert_close(results[1], last)
    with pytest.raises(InputError) as caught:
        fla.chunk_gated_delta_product(q, x["k"], x["v"], g, x["beta"], 2)
    assert caught.value.code == "sequences_do_not_match"


def test_ridge_regression_of_mesa():
    x, draw = inputs(), Draw(41)
    q, k = (y.repeat_interleave(HV // H, dim=2) for y in (x["q"], x["k"]))
    ridge, root = draw.normal(HV, K).exp() + 0.25, draw.normal(B, HV, K, K)
    keys, values, outs = root @ root.mT, x["state"], []
    out, final = fla.chunk_mesa_net(
        q, k, x["v"], x["g"], x["beta"], ridge, keys, values, output_final_state=True, max_CG_iteration=4 * K
    )
    for t in range(T):
        decay, write = x["g"][:, t, :, None, None].exp(), (x["beta"][:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1)
        keys = keys * decay + write * k[:, t].unsqueeze(-2)
        values = values * decay + write * x["v"][:, t].unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", values, torch.linalg.solve(keys + torch.diag_embed(ridge), q[:, t])))
    assert_close(out, torch.stack(outs, dim=1))
    for one, other in zip(final, (keys, values), strict=True):
        assert_close(one, other)
    assert fla.chunk_mesa_net(q, k, x["v"], x["g"], x["beta"], ridge, h_kv_init=x["state"])[1] == (None, None)


@pytest.mark.parametrize("length", [1, T])
@torch.no_grad()
def test_single_tokens_and_packed_sequences_of_low_rank_rules(length):
    x = low_rank_inputs(length, rows=1)
    order = ("q", "k", "v", "a", "b", "g")
    bounds = [0, 1] if length == 1 else [0, 9, 10, T]
    state = Draw(3).normal(len(bounds) - 1, HV, K, V)
    packed = {} if length == 1 else {"cu_seqlens": torch.tensor(bounds)}
    arguments = [x[one] for one in order]
    out, final = fla.chunk_dplr_delta_rule(*arguments, 1.0, initial_state=state, output_final_state=True, **packed)
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = {name: x[name][:, start:end] for name in order}
        expected, last = low_rank_loop(**part, state=state[n : n + 1])
        assert_close(out[:, start:end], expected)
        assert_close(final[n : n + 1], last)
