"""Sites: the matrix in each block that is read as a memory, found by the shape of the model.

In a transformer's feed-forward layer the first map makes a key of the hidden state and the last one
reads a value with it: v = W k (ROME's `W_proj`, MEMIT's `W_out`). That *down
projection* is what gets edited. It is found by what it does, not by what it is called:

1. the blocks are the longest `ModuleList` of one type under the language model;
2. in a block, attention and other token mixers are set aside;
3. of what is left, modules that hold linear maps side by side are looked at together; the down
   projection is the last of them that goes from the width another one makes back to the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError, ShapeError, UnknownNameError

# Modules that pass information between tokens. Widths cannot tell them from an MLP (with square matrices both look
# the same), so here names decide. Of a class name only the end counts: the front is the family's (MambaMLP).
MIXER_NAME = re.compile(r"attn|attention|mamba|mixer|recurrent|temporal|rglru|ssm|conv", re.IGNORECASE)
MIXER_CLASS = re.compile(r"(attention|attn|mixer|recurrentblock|rglru|shortconv)\w{0,3}$", re.IGNORECASE)
ROUTED = re.compile(r"expert|router|moe(?![a-z])", re.IGNORECASE)
FEED_FORWARD = re.compile(r"mlp|ffn|ff|feed_?forward", re.IGNORECASE)
DOWN_NAMES = {"down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "w2", "wo"}  # read only when all maps are square
PLAIN_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Site:
    """One editable memory: `name` is the linear map, `block` the layer it is in, as in `named_modules()`."""

    layer: int
    block: str
    name: str
    d_k: int
    d_v: int


@dataclass(frozen=True)
class _Linear:
    """Anything that maps one width to another, plain or quantised."""

    path: str
    module: nn.Module
    d_in: int
    d_out: int

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


def find_sites(model: nn.Module) -> list[Site]:
    """The down projection of every layer, in order, or an error that says why this model has none to edit."""
    _require_causal(model)
    _require_cache(model)
    hidden = _hidden_size(model)
    prefix, blocks = _find_blocks(model)
    _refuse_experts(prefix, blocks)
    sites, owners = [], dict[int, int]()
    for layer, block in enumerate(blocks):
        down = _down_projection(f"{prefix}.{layer}", block, hidden)
        _require_plain(down)
        if (first := owners.setdefault(id(down.module.weight), layer)) != layer:
            raise InputError(
                f"layers {first} and {layer} share one {down.name} weight, expected one for each layer: writing to "
                f"one would write to both, so choose a model whose layers have weights of their own"
            )
        sites.append(Site(layer, f"{prefix}.{layer}", down.path, down.d_in, down.d_out))
    return sites


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module of that name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UnknownNameError(
            f"{type(model).__name__} has no module {name!r}, expected a name from its named_modules(): "
            f"take one from find_sites(model)"
        ) from None


def memory_of(module: nn.Module) -> Tensor:
    """The map's weight as a memory [d_v, d_k]: a view of the same storage, outside autograd."""
    return _oriented(module, _weight_of(module).detach())


def write_memory(module: nn.Module, memory: Tensor) -> None:
    """Copy a memory [d_v, d_k] into the map's weight, cast to its dtype.

    In place: whatever else holds this weight (a tied tensor, an optimiser) sees the new numbers.
    """
    weight = memory_of(module)
    if memory.shape != weight.shape:
        raise ShapeError(
            f"memory is {list(memory.shape)}, this {type(module).__name__} holds {list(weight.shape)} as "
            f"[d_v, d_k]: pass what memory_of returned, with the same orientation"
        )
    with torch.no_grad():
        weight.copy_(memory)


def _oriented(module: nn.Module, weight: Tensor) -> Tensor:
    """[d_v, d_k], by the module's type: GPT-2's Conv1D stores the transpose, and a square one gives no hint."""
    return weight.mT if isinstance(module, Conv1D) else weight


def _weight_of(module: nn.Module) -> Tensor:
    if not isinstance(module, (nn.Linear, Conv1D)):
        raise InputError(
            f"{type(module).__name__} is no linear map, expected nn.Linear or Conv1D: pass the module of a site, "
            f"module_at(model, site.name)"
        )
    if module.weight.is_meta:
        raise InputError(
            f"this {type(module).__name__}'s weight is offloaded (it is on the meta device), expected it in memory: "
            f"load the model with a device_map that keeps all layers on devices"
        )
    return module.weight


def _require_causal(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if config is None:
        raise InputError(
            f"{type(model).__name__} has no config, expected a Hugging Face causal language model: "
            f"load one with rebind.models.load.load_model"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder, expected a causal (decoder-only) language model: "
            f"choose one that predicts the next token of its own input, such as 'smollm2'"
        )
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise InputError(
            f"{type(model).__name__} predicts no next token, expected a causal language model with its head: "
            f"load it with AutoModelForCausalLM"
        )


def _require_cache(model: Any) -> None:
    """Searches share prefixes: what a prefix leaves must be kept apart from what comes after it."""
    if model._supports_default_dynamic_cache():
        layers = DynamicCache(config=model.config).layers
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
            raise InputError(
                f"{type(model).__name__} has recurrent layers, whose states every run changes in place, expected "
                f"attention in all of them: choose another family"
            )


def _hidden_size(model: nn.Module) -> int:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "hidden_size", None)
    if not isinstance(hidden, int):
        raise _unknown(model, "a hidden_size in its config")
    return hidden


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder's blocks and their path. Experts are lists too, and may be longer: the outermost list wins."""
    get_decoder: Callable[[], nn.Module] | None = getattr(model, "get_decoder", None)
    decoder = get_decoder() if get_decoder else model
    within = {id(module) for module in decoder.modules()}
    if not any(isinstance(module, nn.ModuleList) for module in decoder.modules()):
        within = {id(module) for module in model.modules()}  # ModernBERT calls its output head "decoder"
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and id(module) in within
        and len(module)
        and len({type(block) for block in module}) == 1
        and any(_widths(inner) is not None for inner in module[0].modules())
    }
    outermost = {path: found for path, found in lists.items() if not any(path.startswith(f"{up}.") for up in lists)}
    if not outermost:
        raise _unknown(model, "a ModuleList of blocks of one type with linear maps in them")
    return max(outermost.items(), key=lambda item: len(item[1]))


def _refuse_experts(prefix: str, blocks: nn.ModuleList) -> None:
    routed = {
        layer: path
        for layer, block in enumerate(blocks)
        for path, _ in block.named_modules()
        if ROUTED.search(path.rpartition(".")[2])
    }
    if routed:
        layer, path = next(iter(routed.items()))
        raise InputError(
            f"{prefix}.{layer}.{path} belongs to a mixture of experts (in {len(routed)} of {len(blocks)} layers), "
            f"expected one MLP a layer; not yet: which expert runs depends on the token, so one key does not "
            f"address one matrix. Choose a dense model"
        )


def _down_projection(path: str, block: nn.Module, hidden: int) -> _Linear:
    groups: dict[str, list[_Linear]] = {}
    for linear in _linears(path, block):
        groups.setdefault(linear.parent, []).append(linear)
    found = {parent: down for parent, group in groups.items() if (down := _down_of(group, hidden))}
    if len(found) > 1:  # Gemma 3n's per-layer gates, say, beside its MLP
        found = {parent: down for parent, down in found.items() if FEED_FORWARD.search(parent.removeprefix(path))}
    if len(found) != 1:
        seen = ", ".join(f"{x.path} ({x.d_in} → {x.d_out})" for group in groups.values() for x in group) or "none"
        raise InputError(
            f"{path} ({type(block).__name__}) has {len(found)} MLPs, expected one: an up projection from the hidden "
            f"size {hidden} and a down projection back to it, side by side and outside attention. Linear maps seen: "
            f"{seen}. Choose a supported architecture, or open an issue with this message"
        )
    return next(iter(found.values()))


def _down_of(group: list[_Linear], hidden: int) -> _Linear | None:
    """The last map from an inner width, made by another map of the group, back to the hidden size.

    A fused gate and up projection (Phi-3) makes twice the inner width.
    """
    downs = [
        x
        for x in group
        if x.d_out == hidden
        and any(up is not x and up.d_in == hidden and up.d_out in (x.d_in, 2 * x.d_in) for up in group)
    ]
    named = [x for x in downs if x.name in DOWN_NAMES]
    return next(reversed(named or downs), None)


def _linears(path: str, module: nn.Module) -> Iterator[_Linear]:
    """Linear maps under a module in order of definition, token mixers left out."""
    for name, child in module.named_children():
        here = f"{path}.{name}"
        if MIXER_NAME.search(name) or MIXER_CLASS.search(type(child).__name__):
            continue
        if (widths := _widths(child)) is not None:
            yield _Linear(here, child, *widths)
        else:
            yield from _linears(here, child)


def _widths(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear map; quantised ones and adapters keep these attributes whatever their weight looks like."""
    if isinstance(module, Conv1D):
        return module.weight.shape[0], module.weight.shape[1]
    for names in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        widths = tuple(getattr(module, name, None) for name in names)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            return widths[0], widths[1]
    return None


def _require_plain(linear: _Linear) -> None:
    """A weight that can be read and written as the matrix the map multiplies by."""
    module, kind = linear.module, f"{type(linear.module).__module__}.{type(linear.module).__name__}"
    if hasattr(module, "base_layer"):
        raise InputError(
            f"{linear.path} is wrapped by an adapter ({kind}), expected a plain nn.Linear or Conv1D: "
            f"merge the adapter into the model first (merge_and_unload()), or edit the base model"
        )
    weight = getattr(module, "weight", None)
    if not (_multiplies_by_its_weight(module) and type(weight) is nn.Parameter and weight.dtype in PLAIN_DTYPES):
        dtype = f" with {weight.dtype} weights" if isinstance(weight, Tensor) else ""
        raise InputError(
            f"{linear.path} is a {kind}{dtype}, expected nn.Linear or Conv1D in float64, float32, bfloat16 or float16: "
            f"quantised weights cannot take a small change, so edit the unquantised model and export the edit as an "
            f"adapter for the quantised one"
        )


def _multiplies_by_its_weight(module: nn.Module) -> bool:
    """Whether the forward pass is the plain map: not a subclass that quantises on the fly."""
    if not isinstance(module, (nn.Linear, Conv1D)):
        return False
    own_forward = type(module).forward not in (nn.Linear.forward, Conv1D.forward)
    return not own_forward or type(module).__module__.startswith("transformers.models.")  # FalconLinear


def _unknown(model: nn.Module, looked_for: str) -> InputError:
    return InputError(
        f"{type(model).__name__} has no known shape, expected {looked_for}: "
        f"choose a decoder-only transformer with one MLP a block, or open an issue naming this model"
    )
