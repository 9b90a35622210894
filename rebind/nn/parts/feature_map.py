"""A feature map inside a module: its fixed tensors move and are saved with the layer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rebind.memory.features import Feature, get_feature
from rebind.nn.parts.normalizers import Normaliser, get_normaliser
from rebind.precision import without_autocast


class FeatureMap(nn.Module):
    """φ with its normaliser. What the feature keeps (FAVOR+'s projection) becomes a buffer."""

    def __init__(self, feature: str | Feature, normalise: str | Normaliser, dim: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # drawn from its seed even while a checkpoint is being loaded on "meta"
            self._feature = copy.copy(get_feature(feature, dim))
        self.normalise = get_normaliser(normalise)
        self.normalise.check(self._feature)
        self._names = tuple(self._feature.state)
        for name, tensor in self._feature.state.items():
            self.register_buffer(name, tensor.to(torch.get_default_dtype()))

    @property
    def feature(self) -> Feature:
        """φ with the buffers as they are now: on this device, from this checkpoint."""
        for name in self._names:
            setattr(self._feature, name, getattr(self, name))
        return self._feature

    @property
    def width(self) -> int:
        return self._feature.width

    @property
    def keeps(self) -> bool:
        """Whether what goes in is there until the gradients come: it is what comes out, or its norm's."""
        return self._feature.name == "identity" and not self.normalise.paired

    def key(self, k: Tensor) -> Tensor:
        with without_autocast(k):
            return self.normalise.key(self.feature, k)

    def query(self, q: Tensor) -> Tensor:
        with without_autocast(q):
            return self.normalise.query(self.feature, q)

    def pair(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [..., 2, heads, dim] where they are treated alike: as one, and each contiguous."""
        q, k = self.key(both.movedim(-3, 0).contiguous()).unbind(0)
        return q, k

    def extra_repr(self) -> str:
        return f"{self.feature!r}, {self.normalise!r}"
