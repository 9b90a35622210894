"""Find the sites of a model: the matrix in each block that works as a memory.

In the feed-forward layer of a transformer the first map computes a key from the hidden state, and the last one reads a
value with it: v = W k (ROME's `W_proj`, MEMIT's `W_out`). This *down projection* is what is edited. It is located
by structure, not by name:

1. the blocks are the longest `ModuleList` in the language model;
2. in a block, attention and other token mixers are ignored, and so are routed experts;
3. the remaining linear maps are grouped by module; the down projection is the last map of a group that goes from the
   output width of another one back to the hidden size. In a mixture of experts it belongs to the shared expert;
4. a block with routed experts only has all of them as its site, as one memory (`rebind.models.experts`);
5. a block with no MLP at all (Mamba) has the output projection of its mixer as its site.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError, ShapeError
from rebind.models.experts import as_down_projections, experts_memory, experts_shape, find_experts, is_experts
from rebind.models.weights.placement import copy_into, full_tensor, load_offloaded
from rebind.models.weights.quantized import change_of, changed_matrix, set_change, write_matrix

# Modules that pass information between tokens. Their shapes may be those of an MLP (where all matrices are
# square), so names decide. Of a class name only the end counts: the beginning is the family (MambaMLP).
MIXER_NAME = re.compile(r"attn|attention|mamba|mixer|recurrent|temporal|rglru|ssm|conv", re.IGNORECASE)
MIXER_CLASS = re.compile(r"(attention|attn|mixer|recurrentblock|rglru|shortconv)\w{0,3}$", re.IGNORECASE)
MLP_CLASS = re.compile(r"(mlp|moe)$", re.IGNORECASE)  # Nemotron-H calls everything in a block "mixer"
EXPERTS_CLASS = re.compile(r"experts?(glu)?$", re.IGNORECASE)
MLP_NAME = re.compile(r"mlp|ffn|ff|feed_?forward|shared_expert|moe", re.IGNORECASE)
OUTPUT_NAMES = {"out_proj", "o_proj", "output_projection"}  # of a mixer
DOWN_NAMES = {"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "wo"}  # decide when all maps are square
PLAIN_TYPES = (nn.Parameter, DTensor)  # types of weights that are plain numbers
EDITABLE_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Site:
    """A memory that can be edited; `name` is its module and `block` its block, as in `named_modules()`."""

    layer: int
    block: str
    name: str
    d_k: int
    d_v: int
    experts: int = 1  # how many share the memory; its second moment has one block per expert


class _Linear(NamedTuple):
    """A linear map, plain or quantized."""

    path: str
    module: nn.Module
    d_in: int
    d_out: int
    in_mixer: bool


def find_sites(model: nn.Module) -> list[Site]:
    """Return the site of every layer, in order, or raise an error that says why there is none to edit."""
    _require_causal(model)
    config: Any = model.config
    hidden = getattr(config.get_text_config(), "hidden_size", None)
    prefix, blocks = _find_blocks(model)
    if not isinstance(hidden, int) or not blocks:
        reason = f"The architecture of {type(model).__name__} is not known"
        raise _cannot_edit(reason, "a hidden_size in its config and one ModuleList of blocks", "unknown_architecture")
    owners = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    return [_find_site(layer, f"{prefix}.{layer}", block, hidden, owners) for layer, block in enumerate(blocks)]


def _find_site(layer: int, path: str, block: nn.Module, hidden: int, owners: Counter[int]) -> Site:
    """Return the site of a block. A weight that other blocks own too (in Zamba) would change all of them."""
    maps = [x for x in _linears(path, block) if all(owners[id(weight)] == 1 for weight in x.module.parameters())]
    outside = [x for x in maps if not x.in_mixer]
    down = _down_projection(path, outside, hidden)
    if down is None and (experts := find_experts(block, hidden)) is not None:
        inner_path, module = experts
        d_v, d_k = experts_shape(module)
        _require_editable(f"{path}.{inner_path}", module)
        return Site(layer, path, f"{path}.{inner_path}", d_k, d_v, len(module.down_proj))  # type: ignore[arg-type]
    if down is None:
        _reject_unknown_experts(path, block)
        down = _last_named([x for x in maps if x.in_mixer and x.d_out == hidden], OUTPUT_NAMES)
    if down is None:
        others = ", ".join(f"{x.path} ({x.d_in} → {x.d_out})" for x in outside) or "none"
        reason = f"{path} ({type(block).__name__}) has no MLP; linear maps outside attention: {others}"
        expected = f"an up projection from the hidden size {hidden} and a down projection back to it"
        raise _cannot_edit(reason, expected, "mlp_not_found")
    _require_editable(down.path, down.module)
    return Site(layer, path, down.path, down.d_in, down.d_out)


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module with a name from `named_modules()`."""
    return model.get_submodule(name)


def stored_weight(module: nn.Module) -> nn.Parameter:
    """Return the parameter that holds the memory of a linear map, or of routed experts.

    An offloaded parameter is loaded into memory first, so that it can be read and written.
    """
    load_offloaded(module)
    weight: nn.Parameter = module.down_proj if is_experts(module) else module.weight  # type: ignore[assignment]
    return weight


def memory_of(module: nn.Module) -> Tensor:
    """Return the weight of a site as a memory [d_v, d_k], outside autograd.

    It is a view of the weight, except for sharded and quantized weights and some routed experts, where it is a copy.
    """
    if is_quantized(module):
        return changed_matrix(module)
    weight = full_tensor(stored_weight(module).detach())
    if is_experts(module):
        return experts_memory(module, weight)
    # GPT-2's Conv1D stores the transpose. The type decides, since a square weight does not show it.
    return weight.mT if isinstance(module, Conv1D) else weight


@torch.no_grad()
def write_memory(module: nn.Module, memory: Tensor) -> None:
    """Copy a memory [d_v, d_k] into the weight of a site, cast to its dtype.

    The copy is in place, so tied tensors and optimizers see the new values. A
    quantized weight is not changed; the difference is stored beside it.
    """
    if is_quantized(module):
        write_matrix(module, memory)
        return
    weight = stored_weight(module)
    routed, transposed = is_experts(module), isinstance(module, Conv1D)
    shape = list(experts_shape(module) if routed else weight.shape[::-1] if transposed else weight.shape)
    if list(memory.shape) != shape:
        raise ShapeError(f"The memory is {list(memory.shape)}", expected=f"{shape}", code="memory_shape")
    if routed:
        memory = as_down_projections(module, memory)
    copy_into(weight, memory.mT if transposed else memory)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a linear map stores its weight in another form than a plain matrix."""
    return not is_experts(module) and not _is_plain(module)


def weight_restorer(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the weight of a site as it is now, byte for byte."""
    if is_quantized(module):
        change = change_of(module)
        return lambda: set_change(module, change)
    parameter = stored_weight(module)
    saved = parameter.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        parameter.copy_(saved)

    return restore


def _cannot_edit(reason: str, expected: str, code: str, advice: str = "Choose a model of another family") -> InputError:
    return InputError(reason, expected=expected, advice=advice, code=code)


def _require_causal(model: Any) -> None:
    kind = type(model).__name__
    config, can_generate = getattr(model, "config", None), getattr(model, "can_generate", None)
    if config is None or can_generate is None or not can_generate() or config.is_encoder_decoder:
        raise _cannot_edit(f"{kind} has no next-token head", "a causal (decoder-only) language model", "not_causal")


def _find_blocks(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the path of the decoder's blocks, and the blocks. Lists of experts inside them do not count."""
    decoder = model.get_decoder()
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        decoder = model  # ModernBERT calls its output head "decoder"
    inside = set(decoder.modules())
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and module in inside
        and any(_widths(inner) is not None for block in module for inner in block.modules())
    }
    outermost = {path: blocks for path, blocks in lists.items() if not any(path.startswith(f"{up}.") for up in lists)}
    longest = max(outermost.items(), key=lambda item: len(item[1]), default=("", nn.ModuleList()))
    kinds = [type(block) for block in longest[1]]
    alike = [path for path, blocks in outermost.items() if [type(block) for block in blocks] == kinds]
    if len(alike) > 1:
        reason = f"{type(model).__name__} has several stacks of blocks: {', '.join(alike)}"
        raise _cannot_edit(reason, "one stack, which every token passes once", "several_stacks")
    return longest


def _down_projection(path: str, maps: Sequence[_Linear], hidden: int) -> _Linear | None:
    """Return the down projection of the MLP that these maps form; of several MLPs, the last."""
    groups: dict[str, list[_Linear]] = {}
    for linear in maps:
        groups.setdefault(linear.path.rpartition(".")[0], []).append(linear)
    downs = {parent: down for parent, group in groups.items() if (down := _down_of_group(group, hidden))}
    if not downs:  # each map may be in a module of its own
        return _down_of_group(maps, hidden)
    # There may be others, for example the per-layer gates of Gemma 3n beside its MLP.
    named = [down for parent, down in downs.items() if MLP_NAME.search(parent.removeprefix(path))]
    return next(reversed(named or list(downs.values())), None)


def _down_of_group(group: Sequence[_Linear], hidden: int) -> _Linear | None:
    """Return the last map from an inner width, the output of another map of the group, back to the hidden size.

    The output of a fused gate and up projection (Phi-3) has twice the inner width.
    """
    downs = [
        x
        for x in group
        if x.d_out == hidden
        and any(up is not x and up.d_in == hidden and up.d_out in (x.d_in, 2 * x.d_in) for up in group)
    ]
    return _last_named(downs, DOWN_NAMES)


def _last_named(maps: Sequence[_Linear], names: Collection[str]) -> _Linear | None:
    """Return the last map with one of the names, or else the last map."""
    named = [x for x in maps if x.path.rpartition(".")[2] in names]
    return next(reversed(named or maps), None)


def _reject_unknown_experts(path: str, block: nn.Module) -> None:
    for name, module in block.named_modules():
        kind = type(module)
        if not EXPERTS_CLASS.search(kind.__name__):
            continue
        if not kind.__module__.startswith("transformers.models."):  # such as gpt-oss with the kernels for MXFP4
            _require_editable(f"{path}.{name}", module)
        reason = f"{path}.{name} ({kind.__name__}) has experts in an unknown layout"
        raise _cannot_edit(reason, "fused experts with a down_proj, as in Mixtral", "unknown_experts")


def _linears(path: str, module: nn.Module, in_mixer: bool = False) -> Iterator[_Linear]:
    """Yield the linear maps in a module in the order of definition, except those of routed experts."""
    for name, child in module.named_children():
        if "norm" in name:  # a gated norm looks like an MLP
            continue
        kind = type(child).__name__
        mixes = MIXER_NAME.search(name) or MIXER_CLASS.search(kind)
        inside = in_mixer or bool(mixes and not MLP_CLASS.search(kind))
        if (widths := _widths(child)) is not None:
            yield _Linear(f"{path}.{name}", child, *widths, inside)
        elif not (isinstance(child, nn.ModuleList) and name == "experts"):
            yield from _linears(f"{path}.{name}", child, inside)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """Return (d_in, d_out) of a linear map, quantized or with an adapter, or None for another module."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    d_in, d_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (d_in, d_out) if isinstance(d_in, int) and isinstance(d_out, int) else None


def _is_plain(module: nn.Module) -> bool:
    """Return whether the weight can be read and written as the matrix that the module multiplies by."""
    kind, weight = type(module), getattr(module, "down_proj" if is_experts(module) else "weight", None)
    # A subclass with its own forward may quantize on the fly; those of transformers do not (FalconLinear).
    is_linear = isinstance(module, (nn.Linear, Conv1D)) and kind.forward in (nn.Linear.forward, Conv1D.forward)
    is_linear = is_linear or kind.__module__.startswith("transformers.models.")
    return is_linear and isinstance(weight, Tensor) and type(weight) in PLAIN_TYPES and weight.dtype in EDITABLE_DTYPES


def _require_editable(path: str, module: nn.Module) -> None:
    """Raise unless the weight can be edited: it is plain, or belongs to a quantized linear map."""
    if _is_plain(module):
        return
    kind, weight = type(module), getattr(module, "down_proj" if is_experts(module) else "weight", None)
    if hasattr(module, "base_layer"):
        code, advice = "adapter", "Merge the adapter into the model first (merge_and_unload()), or edit the base model"
    elif is_experts(module) or _widths(module) is None:
        code, advice = "quantized_weights", "Load the model without quantization"
    else:
        return
    dtype = f" with {weight.dtype} weights" if isinstance(weight, Tensor) else ""
    reason = f"{path} is a {kind.__module__}.{kind.__name__}{dtype}"
    raise _cannot_edit(reason, "a plain weight in float64, float32, bfloat16 or float16", code, advice)
