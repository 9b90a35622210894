"""Many writes, fast: one operation for every rule.

W_t = α_t W_{t−1} (I − ε_t k_t k_tᵀ) + η_t v_t k_tᵀ        o_t = W_t q_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from rebind.memory.precision import working_dtype
from rebind.memory.rules import Coefficients, Gate, Rule, get_rule
from rebind.ops import autograd, dispatch
from rebind.ops.dispatch import Explanation
from rebind.ops.inputs import DEBUG, Inputs, checked


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    state: Tensor | None = None,
    normalise: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Write every token into a memory in turn, and read it after each.

    Args:
        q: Queries [B, T, Hk, Dk].
        k: Keys [B, T, Hk, Dk]. Fewer key than value heads are shared: value head h uses key head h // (H // Hk).
        v: Values [B, T, H, Dv].
        log_decay: ln α [B, T, H], 0 or less; −inf forgets everything before the token, and has gradient 0. None: α = 1.
        erase: ε [B, T, H]. None: 0.
        write: η [B, T, H]. None: 1.
        state: The memories to start from [N, H, Dv, Dk], N being B, or the number of packed sequences. None: zeros.
        normalise: Divide by what a further value of 1 returns (Schlag et al. eq. 19), in float32 or better. States
            then have Dv + 1 rows, the last for that value.
        chunk: Tokens worked on at a time; results do not depend on it but for rounding. None: the backend's choice.
        cu_seqlens: Boundaries [N + 1] of sequences laid end to end in a batch of one: 0, …, T.
        mini_batch: Tokens that read the memory as it was before the first of them (TTT-Linear: erase = write = 2η).
            Takes no decay; memory grows with the square of it. None: every token reads what the last one left.
        backend: "auto", "triton", "chunked" or "reference"; `explain` says what "auto" means here.

    Returns:
        The output [B, T, H, Dv] in v's dtype, and the memories at the end [N, H, Dv, Dk], in float32 or, for float64
        inputs, float64.
    """
    inputs = _inputs(q, k, v, log_decay, erase, write, state, normalise, chunk, cu_seqlens, mini_batch)
    out, final = autograd.run(inputs, backend)
    return (_normalised(out).to(v.dtype), final) if normalise else (out, final)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    state: Tensor | None = None,
    normalise: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """Which backend `scan` would run with these arguments, and why not the others."""
    inputs = _inputs(q, k, v, log_decay, erase, write, state, normalise, chunk, cu_seqlens, mini_batch)
    return dispatch.explain(inputs, backend)


def scan_rule(
    rule: str | Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor | None = None,
    normalise: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
    **gates: Gate,
) -> tuple[Tensor, Tensor]:
    """`scan` with a fast rule's coefficients: `scan_rule("gated_delta", q, k, v, alpha=a, beta=b)`.

    A gate is a number or a tensor that broadcasts to [B, T, H]. Gates' values are looked at on a CPU and, with
    REBIND_DEBUG=1, anywhere. A decay of 0 is exact, and has gradient 0.
    """
    log_decay, erase, write = coefficients(get_rule(rule), k, v, gates)
    return scan(
        q,
        k,
        v,
        log_decay=log_decay,
        erase=erase,
        write=write,
        state=state,
        normalise=normalise,
        chunk=chunk,
        cu_seqlens=cu_seqlens,
        mini_batch=mini_batch,
        backend=backend,
    )


def coefficients(
    rule: Rule,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Gate],
    *,
    log_decay: Tensor | None = None,
    trusted: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """A rule's ln α, ε and η for keys [..., Hk, Dk] and values [..., H, Dv]: [..., H], or None for 1, 0 and 1.

    Args:
        rule: The rule.
        k: Keys [..., Hk, Dk].
        v: Values [..., H, Dv].
        gates: Numbers, or tensors that broadcast to [..., H].
        log_decay: ln α [..., H] for a rule that has a gate for α: given in that gate's stead, it is passed on as it is.
        trusted: Whether gates are known to be right, and nothing is asked of them: a layer makes its own.
    """
    dtype, shape = working_dtype(v), v.shape[:-1]
    sharing = max(v.shape[-2] // max(k.shape[-2], 1), 1)
    keys = k if sharing == 1 else k.repeat_interleave(sharing, dim=-2)
    given = _in(dtype, gates)
    values = not trusted and (DEBUG or v.device.type == "cpu")
    found = rule.unchecked_coefficients(keys, given) if trusted else rule.coefficients(keys, check_values=values, **given)

    def each(value: Gate | None, absent: float | None) -> Tensor | None:
        if value is None or (not isinstance(value, Tensor) and value == absent):
            return None
        number = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=v.device)
        number = number if number.dtype == dtype else number.to(dtype)
        return number if number.shape == shape else number.expand(shape)

    erase = each(found.erase, 0.0)
    same = isinstance(found.write, Tensor) and found.write is found.erase
    write = erase if same else each(found.write, 1.0)
    if log_decay is None:
        log_decay = _log_decay(rule, keys, found, gates)
    return each(log_decay, None), erase, write


def _log_decay(rule: Rule, k: Tensor, found: Coefficients, gates: dict[str, Gate]) -> Tensor | None:
    """ln α by way of float64, where ln(1 − β) of a small β keeps its digits; None for a rule that forgets nothing."""
    wide = torch.float32 if k.device.type == "mps" else torch.float64
    decay = found.decay
    if isinstance(decay, Tensor):
        decay = rule.unchecked_coefficients(k, _in(wide, gates)).decay  # the same formula, of wider gates
    elif decay == 1:
        return None
    return _log(torch.as_tensor(decay, dtype=wide, device=k.device))


def _in(dtype: torch.dtype, gates: dict[str, Gate]) -> dict[str, Gate]:
    return {
        name: gate.to(dtype) if isinstance(gate, Tensor) and gate.is_floating_point() else gate
        for name, gate in gates.items()
    }


def _log(decay: Tensor) -> Tensor:
    """ln α, −inf for 0; there its gradient is 0, where that of a plain logarithm would be infinite."""
    nothing = decay <= 0
    return decay.masked_fill(nothing, 1.0).log().masked_fill(nothing, float("-inf"))


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    state: Tensor | None,
    normalise: bool,
    chunk: int | None,
    cu_seqlens: Tensor | None,
    mini_batch: int | None,
) -> Inputs:
    if normalise and isinstance(v, Tensor) and v.ndim == 4:
        wide = working_dtype(v)  # half precision would round the sum of T terms, and overflow in float16
        q, k, v = q.to(wide), k.to(wide), torch.cat([v.to(wide), v.new_ones((*v.shape[:3], 1), dtype=wide)], dim=-1)
    return checked(q, k, v, log_decay, erase, write, state, cu_seqlens, chunk, mini_batch)


def _normalised(out: Tensor) -> Tensor:
    return out[..., :-1] / out[..., -1:]
