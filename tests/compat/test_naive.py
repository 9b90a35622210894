"""Our rules and functions beside the naive files of flash-linear-attention, where it is installed.

    pip install --no-deps fla-core einops

Its naive files are plain torch. They are read as text, so that neither Triton nor a GPU is needed, and their float32 is
replaced by float64.
"""

from __future__ import annotations

import math
import re
import types
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rebind.compat import fla
from rebind.ops import scan_rule
from tests.support import Draw

FLA = find_spec("fla")
pytestmark = pytest.mark.skipif(FLA is None or find_spec("einops") is None, reason="fla or einops is not installed")

SCALE = 0.37
SIZES = [(1, 1, 1, 2, 1), (2, 7, 3, 5, 6), (1, 63, 2, 16, 8), (2, 100, 1, 12, 20)]  # B, T, H, K, V
BOUNDS = [0, 1, 30, 31, 63]


@cache
def naive(op: str) -> types.SimpleNamespace:
    """Return the functions of fla/ops/<op>/naive.py in float64."""
    text = (Path(FLA.submodule_search_locations[0]) / "ops" / op / "naive.py").read_text()
    text = re.sub(r"torch\.float\b(?!\d)|torch\.float32", "torch.float64", text.replace(".float()", ".double()"))
    namespace: dict[str, object] = {}
    exec(compile(text, op, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


def problem(B, T, H, K, V, rows=1, sequences=None):
    draw = Draw(7 * T + rows)
    x = {name: draw.normal(B, T, H, K) for name in ("q", "p", "kappa")}
    x |= {name: draw.normal(B, rows * T, H, width) for name, width in (("k", K), ("v", V))}
    x |= {name: torch.sigmoid(draw.normal(B, T, H, K)) for name in ("a", "b", "mix")}
    x |= {"k": functional.normalize(x["k"], dim=-1), "w": torch.sigmoid(draw.normal(B, T, H, V))}
    x |= {"g": -draw.normal(B, T, H).exp() / 3, "gk": -draw.normal(B, T, H, K).exp() / 3}
    x |= {"beta": 2 * torch.sigmoid(draw.normal(B, rows * T, H)), "state": draw.normal(sequences or B, H, K, V)}
    x |= {"g_atk": -draw.normal(B, T, H).exp() / 3, "beta_atk": torch.sigmoid(draw.normal(B, T, H))}
    return {name: tensor.requires_grad_() for name, tensor in x.items()}


def with_rule(name, query_scale=SCALE, **gates):
    """Return `scan_rule` as a function of a problem; gates are functions of it."""

    def run(x, **options):
        values = {gate: value(x) for gate, value in gates.items()}
        out, end = scan_rule(name, x["q"] * query_scale, x["k"], x["v"], state=x["state"].mT, **values, **options)
        return out, end.mT

    return run


def with_function(name, *arguments, **fixed):
    def run(x, **options):
        options |= {"initial_state": x["state"], "output_final_state": True}
        return getattr(fla, name)(*(x[one] for one in arguments), **fixed, **options)

    return run


def with_naive(op, name, *arguments, heads_first=False, times=1.0, **fixed):
    """Return a naive function as one of a problem; its output is multiplied by `times`."""

    def run(x):
        values = [x[one].transpose(1, 2) if heads_first else x[one] for one in arguments]
        out, end, *_ = getattr(naive(op), name)(
            *values, initial_state=x["state"], **{"output_final_state": True, **fixed}
        )
        return (out.transpose(1, 2) if heads_first else out) * times, end

    return run


def alpha(x):
    return x["g"].exp()


def alphas(x):
    return x["gk"].exp()


def beta(x):
    return x["beta"]


def low_rank(x):
    """What RWKV-7 makes of its gates, by the names of the naive function."""
    kappa = functional.normalize(x["kappa"] * x["k"], dim=-1)
    return {**x, "k": x["k"] * (1 + (x["a"] - 1) * x["mix"]), "a": -kappa, "b": x["a"] * kappa}


def step_sizes(x):
    """The step size per channel of PGDN and PKDA: a squashed running mean of k²."""
    mean, sizes = torch.zeros_like(x["k"][:, 0]), []
    for t in range(x["k"].shape[1]):
        mean = mean * x["g_atk"][:, t, :, None].exp() + x["beta_atk"][:, t, :, None] * x["k"][:, t] ** 2
        distance = (mean + 1e-6).log() + 0.2
        sizes.append(torch.exp(-math.log(1.5) * distance / (1 + distance.abs())))
    return torch.stack(sizes, dim=1)


def dplr(x, times=1.0):
    arguments = ("q", "k", "v", "a", "b", "gk")
    return with_naive("generalized_delta_rule/dplr", "dplr_recurrence", *arguments, heads_first=True, times=times)(x)


def unscaled(x):
    return x["q"].shape[-1] ** 0.5


GATED = with_naive("gated_delta_rule", "naive_recurrent_gated_delta_rule", "q", "k", "v", "beta", "g", scale=SCALE)
KDA = with_naive("kda", "naive_recurrent_kda", "q", "k", "v", "gk", "beta", scale=SCALE)
GDN2 = with_naive("gdn2", "naive_recurrent_gdn2", "q", "k", "v", "gk", "b", "w", scale=SCALE)
GLA = with_naive("gla", "naive_recurrent_gla", "q", "k", "v", "gk")
SIMPLE = with_naive("simple_gla", "naive_recurrent_simple_gla", "q", "k", "v", "g", scale=SCALE)
COMBA = with_naive("comba", "naive_chunk_comba", "q", "k", "v", "p", "g", "beta", scale=SCALE, chunk_size=16)
DELTA = with_naive("delta_rule", "delta_rule_recurrence", "q", "k", "v", "beta", heads_first=True)
CASES = {
    "chunk_delta_rule": (with_function("chunk_delta_rule", "q", "k", "v", "beta"), DELTA),
    "gated_delta": (with_rule("gated_delta", alpha=alpha, beta=beta), GATED),
    "chunk_gated_delta_rule": (
        with_function("chunk_gated_delta_rule", "q", "k", "v", "g", "beta", scale=SCALE),
        with_naive("gated_delta_rule", "naive_chunk_gated_delta_rule", "q", "k", "v", "g", "beta", scale=SCALE),
    ),
    "kda": (with_rule("kda", alpha=alphas, beta=beta), KDA),
    "chunk_kda": (with_function("chunk_kda", "q", "k", "v", "gk", "beta", scale=SCALE), KDA),
    "gdn2": (with_rule("gdn2", alpha=alphas, erase=lambda x: x["b"], write=lambda x: x["w"]), GDN2),
    "chunk_gdn2": (with_function("chunk_gdn2", "q", "k", "v", "gk", "b", "w", scale=SCALE), GDN2),
    "chunk_gla": (with_function("chunk_gla", "q", "k", "v", "gk"), GLA),
    "gla": (lambda x: with_rule("gla", 1 / unscaled(x), alpha=alphas)(x), GLA),
    "mamba2": (with_rule("mamba2", alpha=alpha), SIMPLE),
    "chunk_simple_gla": (with_function("chunk_simple_gla", "q", "k", "v", "g", scale=SCALE), SIMPLE),
    "comba": (
        with_rule("comba", alpha=alpha, beta=beta, feedback=lambda x: x["b"]),
        lambda x: COMBA({**x, "p": x["b"] * x["k"]}),
    ),
    "chunk_comba": (with_function("chunk_comba", "q", "k", "v", "p", "g", "beta", scale=SCALE), COMBA),
    "rwkv7": (
        with_rule(
            "rwkv7", 1.0, alpha=alphas, **{name: (lambda x, name=name: x[name]) for name in ("a", "kappa", "mix")}
        ),
        lambda x: dplr(low_rank(x), unscaled(x)),
    ),
    "chunk_rwkv7": (
        lambda x, **options: with_function("chunk_rwkv7", "q", "gk", "k", "v", "a", "b")(low_rank(x), **options),
        lambda x: dplr(low_rank(x), unscaled(x)),
    ),
    "chunk_dplr_delta_rule": (
        lambda x, **options: with_function("chunk_dplr_delta_rule", "q", "k", "v", "a", "b", "gk")(
            low_rank(x), **options
        ),
        lambda x: dplr(low_rank(x)),
    ),
    "preconditioned, PGDN": (
        lambda x: with_rule("preconditioned", alpha=alpha, beta=beta, scale=step_sizes)(
            {**x, "q": functional.normalize(x["q"], dim=-1), "k": functional.normalize(x["k"], dim=-1)}
        ),
        with_naive(
            "precond_gated_delta_rule",
            "naive_recurrent_precond_gated_delta_rule",
            *("q", "k", "v", "g_atk", "g", "beta_atk", "beta"),
            scale=SCALE,
        ),
    ),
    "preconditioned, PKDA": (
        with_rule("preconditioned", alpha=alphas, beta=beta, scale=step_sizes),
        with_naive(
            "precond_kda",
            "naive_recurrent_precond_kda",
            *("q", "k", "v", "gk", "g_atk", "beta_atk", "beta"),
            scale=SCALE,
        ),
    ),
}


def difference(one, other):
    """Return the largest difference, relative to the largest number."""
    return float(((one - other).abs().max() / other.abs().max().clamp_min(1e-12)).detach())


def assert_same(results, expected, leaves):
    for one, other in zip(results, expected, strict=True):
        assert difference(one, other) < 1e-12
    slopes = [Draw(5 + n).normal(*part.shape) for n, part in enumerate(expected)]
    got, wanted = (
        torch.autograd.grad(parts, leaves, slopes, retain_graph=True, materialize_grads=True)
        for parts in (results, expected)
    )
    for one, other in zip(got, wanted, strict=True):
        assert difference(one, other) < 1e-10


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_states_and_gradients(name, sizes):
    x, (ours, theirs) = problem(*sizes), CASES[name]
    assert_same(ours(x), theirs(x), list(x.values()))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("chunk_")])
def test_packed_sequences(name):
    x, (ours, theirs) = problem(1, BOUNDS[-1], 2, 9, 7, sequences=len(BOUNDS) - 1), CASES[name]
    parts = [
        theirs({key: y[n : n + 1] if key == "state" else y[:, BOUNDS[n] : BOUNDS[n + 1]] for key, y in x.items()})
        for n in range(len(BOUNDS) - 1)
    ]
    expected = [torch.cat(pieces, dim=1 - n) for n, pieces in enumerate(zip(*parts, strict=True))]
    assert_same(ours(x, cu_seqlens=torch.tensor(BOUNDS)), expected, list(x.values()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("decays", [False, True])
def test_several_writes_per_token(sizes, decays):
    x = problem(*sizes, rows=3)
    g, gates = (x["g"], {"alpha": alpha}) if decays else (None, {})
    expected = naive("gated_delta_product").naive_recurrent_gated_delta_product(
        x["q"], x["k"], x["v"], g, x["beta"], SCALE, initial_state=x["state"], num_householder=3
    )
    rule = with_rule("gated_delta_product" if decays else "delta_product", beta=beta, **gates)
    assert_same(rule(x), expected, list(x.values()))
    options = {"scale": SCALE, "initial_state": x["state"], "output_final_state": True}
    results = fla.chunk_gated_delta_product(x["q"], x["k"], x["v"], g, x["beta"], 3, **options)
    assert_same(results, expected, list(x.values()))


@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention(normalize):
    x = problem(2, 63, 3, 5, 6)
    q, k = x["q"].exp(), x["k"].exp()
    start = (x["state"], x["q"][:, :1].exp()) if normalize else x["state"]
    options = {"initial_state": start, "output_final_state": True, "normalize": normalize}
    results, expected = (
        run(q, k, x["v"], **options)
        for run in (fla.chunk_linear_attn, naive("linear_attn").naive_recurrent_linear_attn)
    )
    flat = [(out, *(end if normalize else (end,))) for out, end in (results, expected)]
    assert_same(*flat, list(x.values()))


def test_ridge_regression():
    x = problem(2, 40, 3, 5, 5)
    ridge, root = 0.25 + torch.rand(3, 5).double(), Draw(3).normal(2, 3, 5, 5)
    keys, weights = root @ root.mT, x["beta"] / 2
    out, ends = fla.chunk_mesa_net(
        x["q"], x["k"], x["v"], x["g"], weights, ridge, keys, x["state"], True, max_CG_iteration=20
    )
    theirs = naive("mesa_net").naive_mesa_net_exact
    with torch.device("cpu"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # it creates its states without a dtype
        try:
            expected = theirs(x["q"], x["k"], x["v"], x["g"], ridge, weights, keys, x["state"])
        finally:
            torch.set_default_dtype(default)
    assert_same((out, *ends), expected, list(x.values()))
