"""Token mixers: the linear map that each block's attention ends in, found by structure.

What attention adds to a token is the output of its last map (`o_proj`, `c_proj`, `dense`, …). The module round it is
no safe place to look: BLOOM's adds the residual stream inside, others answer with a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError
from rebind.models.sites import MIXER_CLASS, MIXER_NAME, Site, module_at

OUT_NAMES = {"o_proj", "c_proj", "out_proj", "dense", "Wo", "wo"}


def mixer_outputs(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """The last linear map of each layer's attention (or other token mixer), first layer to last."""
    return [_output_of(module_at(model, site.block), site) for site in sites]


def _output_of(block: nn.Module, site: Site) -> nn.Module:
    linears = [pair for mixer in _mixers(block) for pair in _linears(mixer, site.d_v)]
    named = [linear for name, linear in linears if name in OUT_NAMES]
    if not linears:
        raise InputError(
            f"{site.block} ({type(block).__name__}) has no attention that ends in a map to the hidden size {site.d_v}, "
            f"expected one: trace hidden states or the MLP instead (--kind hidden, --kind mlp)"
        )
    return named[-1] if named else linears[-1][1]


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that pass information between tokens; norms named after them are not."""
    for name, child in module.named_children():
        mixes = MIXER_NAME.search(name) or MIXER_CLASS.search(type(child).__name__)
        if mixes and any(True for _ in _linears(child, None)):
            yield child
        elif not mixes:
            yield from _mixers(child)


def _linears(module: nn.Module, d_out: int | None) -> Iterator[tuple[str, nn.Module]]:
    """(name, map) of the linear maps inside, in order of definition, quantised ones too."""
    for path, inner in module.named_modules():
        width = inner.weight.shape[-1] if isinstance(inner, Conv1D) else getattr(inner, "out_features", None)
        if isinstance(width, int) and d_out in (None, width):
            yield path.rpartition(".")[2], inner
