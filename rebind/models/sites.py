"""Find the sites of a model: in each block the matrix that is read as a memory.

In the feed-forward layer of a transformer the first map computes a key from the hidden state, and the last one reads a
value with it: v = W k (ROME's `W_proj`, MEMIT's `W_out`). That *down projection* is what gets edited. It is found by
its structure, not by its name:

1. the blocks are the longest `ModuleList` of one type in the language model;
2. in a block, attention and other token mixers are ignored;
3. of the rest, linear maps in the same module are looked at together; the down projection is the last of them that goes
   from the output width of another one back to the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError, ShapeError

# Modules that pass information between tokens. Shapes cannot tell them from an MLP (with square matrices both look the
# same), so here names decide. Of a class name only the end counts: the beginning is the family (MambaMLP).
MIXER_NAME = re.compile(r"attn|attention|mamba|mixer|recurrent|temporal|rglru|ssm|conv", re.IGNORECASE)
MIXER_CLASS = re.compile(r"(attention|attn|mixer|recurrentblock|rglru|shortconv)\w{0,3}$", re.IGNORECASE)
EXPERT_NAME = re.compile(r"expert|router|moe(?![a-z])", re.IGNORECASE)
MLP_NAME = re.compile(r"mlp|ffn|ff|feed_?forward", re.IGNORECASE)
DOWN_NAMES = {"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "wo"}  # decide when all maps are square
EDITABLE_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Site:
    """A matrix that can be edited; `name` is its linear map and `block` its block, as in `named_modules()`."""

    layer: int
    block: str
    name: str
    d_k: int
    d_v: int


class _Linear(NamedTuple):
    """A linear map, plain or quantized."""

    path: str
    module: nn.Module
    d_in: int
    d_out: int


def find_sites(model: nn.Module) -> list[Site]:
    """Return the down projection of every layer, in order, or raise an error that says why there is none to edit."""
    _require_causal_attention(model)
    config: Any = model.config
    hidden = getattr(config.get_text_config(), "hidden_size", None)
    prefix, blocks = _find_blocks(model)
    if not isinstance(hidden, int) or not blocks:
        reason = f"The architecture of {type(model).__name__} is not known"
        raise _cannot_edit(reason, "a hidden_size in its config and a ModuleList of blocks", "unknown_architecture")
    sites = []
    for layer, block in enumerate(blocks):
        path = f"{prefix}.{layer}"
        _refuse_experts(path, block)
        down = _down_projection(path, block, hidden)
        _require_editable(down)
        sites.append(Site(layer, path, down.path, down.d_in, down.d_out))
    return sites


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module with a name from `named_modules()`."""
    return model.get_submodule(name)


def memory_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as a memory [d_v, d_k]: a view of the same storage, outside autograd."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    # GPT-2's Conv1D stores the transpose. The type decides, since the shape of a square weight does not tell.
    return weight.mT if isinstance(module, Conv1D) else weight


@torch.no_grad()
def write_memory(module: nn.Module, memory: Tensor) -> None:
    """Copy a memory [d_v, d_k] into the weight of a linear map, cast to its dtype.

    The copy is in place: whatever else holds this weight (a tied tensor, an optimizer) sees the new numbers.
    """
    weight = memory_of(module)
    if memory.shape != weight.shape:
        raise ShapeError(f"The memory is {list(memory.shape)}", expected=f"{list(weight.shape)}", code="memory_shape")
    weight.copy_(memory)


def _cannot_edit(reason: str, expected: str, code: str, advice: str = "Choose a model of another family") -> InputError:
    return InputError(reason, expected=expected, advice=advice, code=code)


def _require_causal_attention(model: Any) -> None:
    """Raise for recurrent layers too: target search shares prefixes, so their states must not change in place."""
    kind = type(model).__name__
    config, can_generate = getattr(model, "config", None), getattr(model, "can_generate", None)
    if config is None or can_generate is None or not can_generate() or config.is_encoder_decoder:
        raise _cannot_edit(f"{kind} has no next-token head", "a causal (decoder-only) language model", "not_causal")
    if model._supports_default_dynamic_cache():
        layers = DynamicCache(config=config).layers
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
            raise _cannot_edit(f"{kind} has recurrent layers", "attention in all layers", "recurrent_layers")


def _find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the path of the decoder's blocks, and the blocks. A list of experts may be longer: the outermost wins."""
    decoder = model.get_decoder()
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        decoder = model  # ModernBERT calls its output head "decoder"
    inside = set(decoder.modules())
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and module in inside
        and len({type(block) for block in module}) == 1
        and any(_widths(inner) is not None for inner in module[0].modules())
    }
    outermost = {path: blocks for path, blocks in lists.items() if not any(path.startswith(f"{up}.") for up in lists)}
    return max(outermost.items(), key=lambda item: len(item[1]), default=("", nn.ModuleList()))


def _refuse_experts(path: str, block: nn.Module) -> None:
    """Raise for a mixture of experts: which one runs depends on the token, so one key does not address one matrix."""
    for name, _ in block.named_modules():
        if EXPERT_NAME.search(name.rpartition(".")[2]):
            reason = f"{path}.{name} belongs to a mixture of experts"
            raise _cannot_edit(reason, "one MLP per layer", "mixture_of_experts", "Choose a dense model")


def _down_projection(path: str, block: nn.Module, hidden: int) -> _Linear:
    groups: dict[str, list[_Linear]] = {}
    for linear in _linears(path, block):
        groups.setdefault(linear.path.rpartition(".")[0], []).append(linear)
    downs = {parent: down for parent, group in groups.items() if (down := _down_of_group(group, hidden))}
    if len(downs) > 1:  # for example the per-layer gates of Gemma 3n, beside its MLP
        downs = {parent: down for parent, down in downs.items() if MLP_NAME.search(parent.removeprefix(path))}
    if len(downs) != 1:
        maps = ", ".join(f"{x.path} ({x.d_in} → {x.d_out})" for group in groups.values() for x in group) or "none"
        reason = f"{path} ({type(block).__name__}) has {len(downs)} MLPs; linear maps outside attention: {maps}"
        expected = f"one, with an up projection from the hidden size {hidden} and a down projection back to it"
        raise _cannot_edit(reason, expected, "mlp_not_found")
    return next(iter(downs.values()))


def _down_of_group(group: list[_Linear], hidden: int) -> _Linear | None:
    """Return the last map from an inner width, made by another map of the group, back to the hidden size.

    A fused gate and up projection (Phi-3) makes twice the inner width.
    """
    downs = [
        x
        for x in group
        if x.d_out == hidden
        and any(up is not x and up.d_in == hidden and up.d_out in (x.d_in, 2 * x.d_in) for up in group)
    ]
    named = [x for x in downs if x.path.rpartition(".")[2] in DOWN_NAMES]
    return next(reversed(named or downs), None)


def _linears(path: str, module: nn.Module) -> Iterator[_Linear]:
    """Yield the linear maps in a module in the order of definition, without those of token mixers."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        if MIXER_NAME.search(name) or MIXER_CLASS.search(type(child).__name__):
            continue
        if (widths := _widths(child)) is not None:
            yield _Linear(child_path, child, *widths)
        else:
            yield from _linears(child_path, child)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear map; quantized ones and adapters have these attributes, whatever their weight."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    d_in, d_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (d_in, d_out) if isinstance(d_in, int) and isinstance(d_out, int) else None


def _require_editable(linear: _Linear) -> None:
    """Raise unless the weight can be read and written as the matrix that the map multiplies by."""
    module, weight = linear.module, getattr(linear.module, "weight", None)
    kind = type(module)
    # A subclass with a forward of its own may quantize on the fly; those of transformers do not (FalconLinear).
    is_plain = isinstance(module, (nn.Linear, Conv1D)) and (
        kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__module__.startswith("transformers.models.")
    )
    if is_plain and type(weight) is nn.Parameter and weight.dtype in EDITABLE_DTYPES:
        return
    if hasattr(module, "base_layer"):
        code, advice = "adapter", "Merge the adapter into the model first (merge_and_unload()), or edit the base model"
    else:
        code = "quantized_weights"
        advice = "Edit the model without quantization, and export the edit as an adapter for the quantized one"
    dtype = f" with {weight.dtype} weights" if isinstance(weight, Tensor) else ""
    reason = f"{linear.path} is a {kind.__module__}.{kind.__name__}{dtype}"
    raise _cannot_edit(reason, "nn.Linear or Conv1D in float64, float32, bfloat16 or float16", code, advice)
