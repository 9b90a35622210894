"""Keys as a language model has them: what enters an MLP's down projection, on text."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from rebind.errors import InputError


def mlp_keys(model: str, layer: int, device: torch.device, window: int = 128) -> Tensor:
    """Keys [n, d] of one layer at every token of the held text, those of each window's first token left out.

    The first key of a text is an outlier, the same each time.
    """
    from rebind.models.load import load_model
    from rebind.models.sites import find_sites, module_at

    loaded = load_model(model, device=device)
    sites = find_sites(loaded.model)
    if layer >= len(sites):
        raise InputError(
            f"layer is {layer}, {model} has {len(sites)}, expected 0 to {len(sites) - 1}: choose one of them"
        )
    text = files("rebind.evals").joinpath("data/held.txt").read_text(encoding="utf-8")
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False).input_ids, device=device)
    ids = ids[: len(ids) // window * window].reshape(-1, window)
    seen: list[Tensor] = []
    module = module_at(loaded.model, sites[layer].name)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(*ids.shape, -1)))
    try:
        with torch.no_grad():
            loaded.model(ids)
    finally:
        handle.remove()
    return seen[0][:, 1:].flatten(0, 1).double()
