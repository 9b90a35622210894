"""Find the linear map in which the attention of each block ends, by structure.

What attention adds to a token is the output of its last linear map (`o_proj`, `c_proj`, `dense`, ...). The module
around it is not a safe place to look: in BLOOM it also adds the residual stream, and others return a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from rebind.errors import InputError
from rebind.models.sites import MIXER_CLASS, MIXER_NAME, Site, module_at

OUTPUT_NAMES = {"o_proj", "c_proj", "out_proj", "dense", "Wo", "wo"}


def attention_outputs(model: nn.Module, sites: Sequence[Site]) -> list[nn.Module]:
    """Return the last linear map of the attention (or other token mixer) of each layer, in order."""
    return [_output_map(module_at(model, site.block), site) for site in sites]


def _output_map(block: nn.Module, site: Site) -> nn.Module:
    maps = [pair for mixer in _mixers(block) for pair in _linear_maps(mixer, site.d_v)]
    if not maps:
        raise InputError(
            f"{site.block} ({type(block).__name__}) has no attention that ends in a linear map to width {site.d_v}",
            advice="Trace hidden states or MLPs only, with {kind}",
            settings={"kind": "mlp"},
            code="no_attention_output",
        )
    named = [linear for name, linear in maps if name in OUTPUT_NAMES]
    return named[-1] if named else maps[-1][1]


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that pass information between tokens; norms are not, whatever their names."""
    for name, child in module.named_children():
        mixes = MIXER_NAME.search(name) or MIXER_CLASS.search(type(child).__name__)
        if mixes and any(True for _ in _linear_maps(child, None)):
            yield child
        elif not mixes:
            yield from _mixers(child)


def _linear_maps(module: nn.Module, d_out: int | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the linear maps inside, in order of definition, including quantized ones."""
    for path, inner in module.named_modules():
        width = inner.weight.shape[-1] if isinstance(inner, Conv1D) else getattr(inner, "out_features", None)
        if isinstance(width, int) and d_out in (None, width):
            yield path.rpartition(".")[2], inner
