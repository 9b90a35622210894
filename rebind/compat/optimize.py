"""Published models of transformers on the operations of rebind.

    rebind.optimize(model)                 # from now on
    rebind.optimize(model, off=True)       # as it was
    with rebind.optimize(model): ...       # in this block

transformers has the gated delta rule, Kimi Delta Attention and their short convolution as functions of a model's
module, which the `forward` of a layer calls by name. Here every such layer gets a copy of its `forward` in which these
names mean functions of rebind, and the gated norm inside of it a `forward` of rebind. Weights, caches and everything
else stay those of transformers, and other models of the same family are not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebind.compat import fla
from rebind.compat.fla.shared import needs_gradients
from rebind.errors import InputError
from rebind.memory.precision import working_dtype
from rebind.nn.parts.documents import Documents
from rebind.ops import short_convolution
from rebind.ops.norm import gated_norm

OURS = "_forward_of_rebind"  # the attribute of a layer that is optimized
SILU = ("silu", "swish")


def optimize(model: nn.Module, *, off: bool = False) -> Optimization:
    """Run the gated delta, KDA and short-convolution functions of a model of transformers on rebind's operations.

    Logits are the same to rounding. Packed documents (`cu_seq_lens_q` or `seq_idx`) are kept apart, for which
    transformers would need other packages. `position_ids` alone name no documents to these layers: transformers passes
    them to attention only.

    Args:
        model: A model of transformers with Gated DeltaNet or KDA layers: Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear
            and others that are built alike.
        off: Whether to undo it.

    Returns:
        The layers that run on rebind now; in a `with` statement they are restored at its end.
    """
    untyped: object = model
    if not isinstance(untyped, nn.Module):
        problem, advice = f"The model is a {type(untyped).__name__}", "Load it first, with from_pretrained"
        raise InputError(problem, expected="a model of transformers", advice=advice, code="not_a_model")
    if off:
        for layer in model.modules():
            _restore(layer)
        return Optimization(model, {})
    layers = {name: layer for name, layer in model.named_modules() if _scan_names(layer)}
    if not layers:
        raise InputError(
            f"{type(model).__name__} has no layer that calls a gated delta rule or Kimi Delta Attention",
            expected="a model of transformers such as Qwen3-Next, Qwen3.5, OLMo Hybrid or Kimi Linear",
            code="nothing_to_optimize",
        )
    changed = {name: layer for name, layer in layers.items() if not _is_optimized(layer)}
    for layer in changed.values():
        _restore(layer)
        _replace(layer)
    return Optimization(model, changed)


@dataclass(frozen=True, eq=False)
class Optimization:
    """The layers that a call of `optimize` changed."""

    model: nn.Module
    layers: dict[str, nn.Module] = field(repr=False)

    def __repr__(self) -> str:
        kinds = sorted({type(layer).__name__ for layer in self.layers.values()})
        return f"{type(self).__name__}({len(self.layers)} layers{': ' if kinds else ''}{', '.join(kinds)})"

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for layer in self.layers.values():
            _restore(layer)


# Functions with the arguments that transformers passes


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, with a decay per token or per channel, over a sequence or one token.

    On a CPU everything is converted to float32 first, as transformers does; kernels compute in it from what they read.
    """
    dtype = value.dtype
    if value.device.type == "cpu":
        query, key, value = (x.to(working_dtype(x)) for x in (query, key, value))
    out, state = fla.chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=_boundaries(kwargs),
    )
    return out.to(dtype), state


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """A causal convolution of each channel of [B, C, T], of each document by itself."""
    tokens, before = hidden_states.mT.contiguous(), weight.shape[-1] - 1
    bounds = _boundaries(kwargs)
    places = None
    if bounds is not None:
        windows = tokens.new_zeros(len(bounds) - 1, before, tokens.shape[-1])
        tokens, places = Documents(bounds.long(), tokens.shape[1]).insert_windows(tokens, windows)
    window = tokens.new_zeros(len(tokens), before, tokens.shape[-1])
    if bias is None and activation in SILU:
        out = short_convolution(tokens.to(weight.dtype), weight, window)
    else:
        padded = torch.cat([window, tokens], dim=1).to(weight.dtype)
        out = _activate(functional.conv1d(padded.mT, weight.unsqueeze(1), bias, groups=len(weight)).mT, activation)
    return (out if places is None else out[:, places]).mT.to(hidden_states.dtype)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same for tokens [B, C, T] that follow `conv_state` [B, C, S], which is changed in place."""
    tokens = torch.cat([conv_state, hidden_states], dim=-1)
    conv_state.copy_(tokens[:, :, -conv_state.shape[-1] :])
    size, length = weight.shape[-1], hidden_states.shape[-1]
    windows = tokens[:, :, -(size + length - 1) :].to(weight.dtype).unfold(-1, size, 1)  # [B, C, T, size]
    out = (windows * weight.unsqueeze(1)).sum(-1)
    return _activate(out if bias is None else out + bias.unsqueeze(-1), activation).to(hidden_states.dtype)


def norm_and_gate(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The `forward` of a gated norm, weight · x / rms(x) · silu(gate); ours where its gradients are faster."""
    dtypes = {hidden_states.dtype, gate.dtype, self.weight.dtype}
    if hidden_states.device.type == "cpu" and dtypes == {torch.float32} and needs_gradients(hidden_states, gate):
        return gated_norm(hidden_states, gate, self.weight, self.variance_epsilon)
    out: Tensor = type(self).forward(self, hidden_states, gate)
    return out


norm_and_gate.__name__ = "forward"  # which a model that was saved as a whole looks up

SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "recurrent_kimi_delta_attention": chunk_gated_delta_rule,
}
FUNCTIONS = {**SCANS, "causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}


def _activate(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    if activation in SILU:
        return functional.silu(x)
    from transformers.activations import ACT2FN

    out: Tensor = ACT2FN[activation](x)
    return out


def _boundaries(arguments: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of the documents of a row, which transformers passes under three names, or None."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if arguments.get(name) is not None:
            bounds: Tensor = arguments[name]
            return bounds
    owner: Tensor | None = arguments.get("seq_idx")
    if owner is None:
        return None
    starts = functional.pad(owner.flatten().diff() != 0, (1, 1), value=True)
    return starts.nonzero()[:, 0]


# Replacing them


def _functions(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield a function and those that it wraps."""
    if isinstance(function, FunctionType):
        yield function
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, FunctionType):
                yield from _functions(cell.cell_contents)


def _scan_names(layer: nn.Module) -> set[str]:
    """Return which scans of transformers the `forward` of a layer calls."""
    return {name for part in _functions(type(layer).forward) for name in part.__code__.co_names if name in SCANS}


def _is_optimized(layer: nn.Module) -> bool:
    """Return whether a layer runs on rebind. One that was saved as a whole and loaded runs as its class says."""
    ours = vars(layer).get(OURS)
    return ours is not None and ours.__func__ is not type(layer).forward


def _replace(layer: nn.Module) -> None:
    # accelerate, which moves weights, replaces `forward` and calls `_old_forward`
    place = "_old_forward" if "_old_forward" in vars(layer) else "forward"
    if place == "forward" and "forward" in vars(layer):
        problem = f"The `forward` of a {type(layer).__name__} was replaced by something else"
        raise InputError(problem, advice="Optimize the model first", code="forward_was_replaced")
    forward = MethodType(_copy_with_functions(type(layer).forward), layer)
    vars(layer)[OURS] = vars(layer)[place] = forward
    for norm in _gated_norms(layer):
        if "forward" not in vars(norm):
            vars(norm)[OURS] = vars(norm)["forward"] = MethodType(norm_and_gate, norm)


def _gated_norms(layer: nn.Module) -> list[nn.Module]:
    """Return the norms of a layer that multiply by silu of a gate."""
    named = [part for part in layer.children() if type(part).__name__.endswith("RMSNormGated")]
    return [norm for norm in named if getattr(norm, "activation", None) in SILU]


def _restore(layer: nn.Module) -> None:
    for norm in _gated_norms(layer):
        _restore(norm)
    ours = vars(layer).pop(OURS, None)
    if ours is None:
        return
    if vars(layer).get("_old_forward") is ours:
        vars(layer)["_old_forward"] = MethodType(type(layer).forward, layer)
    elif vars(layer).get("forward") is ours:
        del vars(layer)["forward"]


def _copy_with_functions(function: FunctionType | Any) -> FunctionType:
    """Return a copy of a function of a model, and of those it wraps, for which FUNCTIONS have their names."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    copies = [CellType(_copy_with_functions(x) if isinstance(x, FunctionType) else x) for x in cells]
    names = function.__globals__
    if set(function.__code__.co_names) & set(FUNCTIONS):
        names = vars(_twin(function.__module__))
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, tuple(copies) or None)
    copy.__kwdefaults__, copy.__dict__ = function.__kwdefaults__, dict(vars(function))
    return copy


def _twin(module: str) -> ModuleType:
    """Return a module with everything that `module` has, and FUNCTIONS in place of functions of these names.

    It is listed among the imported modules, since torch.compile looks global names up there.
    """
    name = f"{__name__}.{module}"
    if name not in sys.modules:
        twin = ModuleType(name, f"{module} with functions of rebind")
        original = vars(sys.modules[module])
        vars(twin).update({**original, **{key: own for key, own in FUNCTIONS.items() if key in original}})
        twin.__name__, twin.__spec__ = name, None
        sys.modules[name] = twin
    return sys.modules[name]
