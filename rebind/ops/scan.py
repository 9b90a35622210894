"""The scan: a rule over whole sequences, one operation for every rule.

    W~ = W_{t−1} diag(d_t)        W_t = W~ + η_t v_t k_tᵀ − ε_t (W~ p_t) e_tᵀ        o_t = W_t q_t

With one decay α per token and p = e = k it is W_t = α_t W_{t−1} (I − ε_t k_t k_tᵀ) + η_t v_t k_tᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rebind.errors import ShapeError
from rebind.memory.checks import require_tensors
from rebind.memory.precision import working_dtype
from rebind.memory.rules import Coefficients, Gate, Rule, get_rule
from rebind.ops import autograd, dispatch
from rebind.ops.dispatch import Explanation
from rebind.ops.inputs import DEBUG, ScanInputs
from rebind.ops.rows import as_rows


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
    state: Tensor | None = None,
    normalize: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Write every token into a memory in turn, and read the memory after each.

    Args:
        q: Queries [B, T, H_k, d_k].
        k: Keys [B, T, H_k, d_k]. Fewer key than value heads are shared: value head h uses key head h // (H // H_k).
            With n writes per token, k and v and what belongs to them have n · T rows, each token's n in order; q and
            `log_decay` have T, the memory decaying before the first write and being read after the last.
        v: Values [B, T, H, d_v].
        log_decay: ln α [B, T, H], or ln d [B, T, H, d_k] for a decay per key channel; 0 or less. −inf forgets
            everything before the token, and has gradient 0. None: nothing decays.
        erase: ε [B, T, H]. None: 0, or 1 if there is a probe or an erase key.
        write: η [B, T, H]. None: 1.
        probe: p [B, T, H_k, d_k], what reads the memory before the write. None: k.
        erase_key: e [B, T, H_k, d_k], the key at which what the probe read is taken away. None: k.
        probe_before_decay: Whether the probe reads W_{t−1}, the memory before it decays (Comba, RWKV-7).
        state: The memories to start from [N, H, d_v, d_k], N being B, or the number of packed sequences. None: zeros.
        normalize: Divide by what a further value of 1 returns (Schlag et al. eq. 19), in float32 or better. States
            then have d_v + 1 rows, the last for that value.
        chunk: Tokens processed together; it changes results by rounding only. None: the backend's choice.
        cu_seqlens: Boundaries [N + 1] of sequences laid end to end in a batch of one: 0, …, T.
        mini_batch: Tokens that read the memory as it was before the first of them (TTT-Linear: erase = write = 2η). It
            takes no decay; memory grows with its square. None: every token reads what the last one left.
        backend: "auto", "triton", "chunked" or "reference"; `explain` says what "auto" means here.

    Returns:
        The output [B, T, H, d_v] in v's dtype, and the memories at the end [N, H, d_v, d_k], in float32 or, for float64
        inputs, float64.
    """
    tensors = (q, k, v, log_decay, erase, write, probe, state)
    inputs = ScanInputs(*tensors, cu_seqlens, chunk, mini_batch, probe_before_decay)
    inputs, number = as_rows(_append_ones(inputs) if normalize else inputs, erase_key)
    out, final = autograd.run(inputs.checked(), backend)
    out = out if number == 1 else out[:, number - 1 :: number]
    return (out[..., :-1] / out[..., -1:]).to(v.dtype) if normalize else out, final


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    probe: Tensor | None = None,
    erase_key: Tensor | None = None,
    probe_before_decay: bool = False,
    state: Tensor | None = None,
    normalize: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
) -> Explanation:
    """Return which backend `scan` would run with these arguments, and why not the others."""
    tensors = (q, k, v, log_decay, erase, write, probe, state)
    inputs = ScanInputs(*tensors, cu_seqlens, chunk, mini_batch, probe_before_decay)
    inputs, _ = as_rows(_append_ones(inputs) if normalize else inputs, erase_key)
    return dispatch.explain(inputs.checked(), backend)


def scan_rule(
    rule: str | Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor | None = None,
    normalize: bool = False,
    chunk: int | None = None,
    cu_seqlens: Tensor | None = None,
    mini_batch: int | None = None,
    backend: str = "auto",
    **gates: Gate,
) -> tuple[Tensor, Tensor]:
    """Run `scan` with the coefficients of a fast rule: `scan_rule("gated_delta", q, k, v, alpha=a, beta=b)`.

    A gate is a number or a tensor that broadcasts to [B, T, H]; gates with channels may also be [B, T, H, d_k] or, for
    values, [B, T, H, d_v]. For rules with several writes per token, k, v and the gates of a write have n · T rows, as
    `scan` takes them. Values of gates are checked on a CPU and, with REBIND_DEBUG=1, anywhere. A decay of 0 is exact,
    and has gradient 0.
    """
    return scan(
        **scan_arguments(rule, q, k, v, gates),
        state=state,
        normalize=normalize,
        chunk=chunk,
        cu_seqlens=cu_seqlens,
        mini_batch=mini_batch,
        backend=backend,
    )


def scan_arguments(
    rule: str | Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Gate],
    *,
    log_decay: Tensor | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Return what `scan` and `step` take for a rule: q, k, v, log_decay, erase, write, probe, erase_key and
    probe_before_decay, by name.

    Args:
        rule: The rule.
        q: Queries [..., H_k, d_k].
        k: Keys [..., H_k, d_k].
        v: Values [..., H, d_v].
        gates: Numbers, or tensors that broadcast to [..., H] or, if they have channels, to [..., H, width].
        log_decay: ln α [..., H] or [..., H, d_k], for a rule that has a gate for it: used instead of that gate.
        check: Whether to check the gates. A layer computes its own, which need no check.
    """
    rule = get_rule(rule)
    if check:
        require_tensors(2, q=q, k=k, v=v)
        if k.shape[:-2] != v.shape[:-2]:
            problem = f"Keys have shape {list(k.shape)} and values {list(v.shape)}"
            raise ShapeError(problem, expected="the same tokens", code="sequences_do_not_match")
    dtype, heads = working_dtype(v), v.shape[:-1]
    sharing = max(v.shape[-2] // max(k.shape[-2], 1), 1)
    keys = k if sharing == 1 else k.repeat_interleave(sharing, dim=-2)
    wide = _convert(gates, dtype)
    if check:
        values = rule.coefficients(keys, check_values=DEBUG or v.device.type == "cpu", **wide)
    else:
        values = rule.unchecked_coefficients(keys, wide)

    def expand(value: Gate, absent: float) -> Tensor | None:
        if not isinstance(value, Tensor) and value == absent:
            return None
        number = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device=v.device)
        number = number if number.dtype == dtype else number.to(dtype)
        return number if number.shape == heads else number.expand(heads)

    def expand_decay(decay: Tensor | None) -> Tensor | None:
        if decay is None:
            return None
        tokens = (*q.shape[:-2], v.shape[-2])  # not rows, of which a token may have several
        shape = (*tokens, k.shape[-1]) if decay.ndim > len(tokens) else tokens
        return decay.to(dtype).expand(shape)

    def like_keys(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.expand(*heads, k.shape[-1]).to(k.dtype)

    erase = expand(values.erase, 0.0)
    same = isinstance(values.write, Tensor) and values.write is values.erase
    write = erase if same else expand(values.write, 1.0)
    if log_decay is None:
        log_decay = _log_decay(rule, keys, values, gates)
    key, probe, erase_key = (like_keys(x) for x in (values.key, values.probe, values.erase_key))
    if sharing > 1 and any(x is not None for x in (key, probe, erase_key)):
        q, k = q.repeat_interleave(sharing, dim=-2), keys  # heads that share a key no longer do
    return {
        "q": q,
        "k": k if key is None else key,
        "v": v if not isinstance(values.value, Tensor) and values.value == 1 else (values.value * v).to(v.dtype),
        "log_decay": expand_decay(log_decay),
        "erase": erase,
        "write": write,
        "probe": probe,
        "erase_key": erase_key,
        "probe_before_decay": values.probe_before_decay,
    }


def _log_decay(rule: Rule, k: Tensor, values: Coefficients, gates: dict[str, Gate]) -> Tensor | None:
    """Return ln α by way of float64, where ln(1 − β) of a small β keeps its digits; None for a rule without decay.

    It is −inf for α = 0, with gradient 0, where that of a plain logarithm would be infinite.
    """
    wide = torch.float32 if k.device.type == "mps" else torch.float64
    decay = values.decay
    if isinstance(decay, Tensor):
        decay = rule.unchecked_coefficients(k, _convert(gates, wide)).decay  # the same formula, with wider gates
    elif decay == 1:
        return None
    decay = torch.as_tensor(decay, dtype=wide, device=k.device)
    nothing = decay <= 0
    return decay.masked_fill(nothing, 1.0).log().masked_fill(nothing, float("-inf"))


def _convert(gates: dict[str, Gate], dtype: torch.dtype) -> dict[str, Gate]:
    return {
        name: gate.to(dtype) if isinstance(gate, Tensor) and gate.is_floating_point() else gate
        for name, gate in gates.items()
    }


def _append_ones(inputs: ScanInputs) -> ScanInputs:
    """Append a 1 to every value: what it returns is the denominator.

    The scan then runs in the working dtype: half precision would round the sum of T terms, and overflow in float16.
    """
    q, k, v, *rest = inputs.tensors
    if not isinstance(v, Tensor) or v.ndim != 4 or q is None or k is None:
        return inputs  # the checks say what is wrong
    wide = working_dtype(v)
    values = torch.cat([v.to(wide), v.new_ones((*v.shape[:3], 1), dtype=wide)], dim=-1)
    return inputs.with_tensors([q.to(wide), k.to(wide), values, *rest])
