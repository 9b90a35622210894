"""An edited model: the fold of some edits over the base model, in its weights and in its dense memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rebind.edit.dense.layers import DenseLayers
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.fold import EditedWeights, require_same_moments
from rebind.edit.moments import Moments
from rebind.memory.dense import Dense
from rebind.models.language_model import LanguageModel

Folded = tuple[dict[str, Tensor], dict[int, Dense]]  # the weights of every site, the dense memory of every layer


class EditedModel:
    """The weights and the dense memory of a model, which always belong to the same edits."""

    def __init__(self, model: LanguageModel, moments: Moments) -> None:
        self.moments = moments
        self.weights = EditedWeights(model.model, moments)
        self.dense = DenseLayers(model, moments)

    def apply(self, edits: Sequence[Edit]) -> None:
        """Bring the model to the fold of these edits: all of it or, if the fold fails, nothing."""
        folded = self.fold(edits)
        try:
            self._set(*folded)
        except BaseException:  # an interrupt in the middle
            self._set(*folded)
            raise

    def fold(self, edits: Sequence[Edit]) -> Folded:
        """Return the weights and memories after these edits; the model is not changed."""
        require_same_moments([edit for edit in edits if edit.has_rows], self.moments)
        with self.dense.off():  # what is computed here is computed on the base model
            weights = self.weights.fold(edits)
            if layers := self.dense.missing(edits):
                with self.weights.base_weights():
                    for layer in layers:
                        self.dense.load(layer)
        return weights, self.dense.fold(edits)

    def _set(self, weights: Mapping[str, Tensor], memories: Mapping[int, Dense]) -> None:
        self.weights.write(weights)
        self.dense.set(memories)
