"""An edited model: the fold of edits over the base model, in its weights and in its dense memory.

Outside of `base_model` and `trial`, these are the active edits of the ledger, including those of other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from rebind.edit.dense.layers import DenseLayers
from rebind.edit.guard import CANARY_PROMPTS, Drift, measure_drift
from rebind.edit.ledger.edit import Edit
from rebind.edit.ledger.edits import EditSequence
from rebind.edit.ledger.fold import EditedWeights, require_same_moments
from rebind.edit.ledger.ledger import Ledger
from rebind.edit.moments import Moments
from rebind.errors import LedgerError, StorageError
from rebind.memory.dense import Dense
from rebind.models.language_model import LanguageModel

Fold = tuple[dict[str, Tensor], dict[int, Dense]]  # the weights of every site, the dense memory of every layer


class EditedModel:
    """A model whose weights and dense memory always belong to the same edits."""

    def __init__(self, model: LanguageModel, moments: Moments, ledger: Ledger) -> None:
        self.model, self.moments, self.ledger = model, moments, ledger
        self.weights = EditedWeights(model.model, moments)
        self.dense = DenseLayers(model, moments)
        self._base_log_probs: Tensor | None = None  # of the next token after each canary prompt, [n, vocabulary]
        self._base_depth = 0  # how many `base_model` blocks are open
        self._trial_edits: tuple[Edit, ...] = ()  # in the model but not, or not yet, in the ledger

    def refresh(self) -> None:
        """Bring the model to the fold of the ledger's active edits."""
        self.apply(() if self._base_depth else self.ledger.active + self._trial_edits)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Run a block on the base model; afterwards the edits are restored, even after an exception."""
        self._base_depth += 1
        try:
            self.apply(())
            yield
        finally:
            self._base_depth -= 1
            self.refresh()

    @contextmanager
    def trial(self, edit: Edit) -> Iterator[None]:
        """Run a block on the model with one more edit; afterwards the model equals the ledger again."""
        active = self.ledger.active
        self._trial_edits = (edit,)
        try:
            self.refresh()
            yield
        finally:
            self._trial_edits = ()
            try:
                self.refresh()
            except (LedgerError, StorageError):  # the ledger itself cannot be read
                self.apply(active)
                raise
            except BaseException:  # an interrupt, perhaps after the edit was appended
                self.refresh()
                raise

    def drift(self) -> Drift:
        """Measure how far the model is from its base model, on canary prompts and in its weights."""
        model = self.model.with_chat(False)
        if self._base_log_probs is None:
            with self.base_model():
                self._base_log_probs = model.next_token_log_probs(CANARY_PROMPTS, truncate=True)
        edited = model.next_token_log_probs(CANARY_PROMPTS, truncate=True)
        return measure_drift(self._base_log_probs, edited, self.weights.growth())

    def apply(self, edits: Sequence[Edit]) -> None:
        """Bring the model to the fold of these edits: all of it or, if the fold fails, nothing."""
        fold = self.fold(edits)
        try:
            self._set(*fold)
        except BaseException:  # an interrupt in the middle
            self._set(*fold)
            raise

    def fold(self, edits: Sequence[Edit]) -> Fold:
        """Return the weights and memories after these edits; the model is not changed."""
        edits, snapshots = EditSequence.of(edits), self.ledger.snapshots
        self.dense.require_no_other()
        self._require_places(edits)
        require_same_moments(edits.where(lambda kind: kind.has_rows), self.moments)
        with self.dense.off():  # old keys are computed on the base model
            weights = self.weights.fold(edits, snapshots)
            self._load_dense(edits)
        return weights, self.dense.fold(edits, snapshots)

    def _load_dense(self, edits: EditSequence) -> None:
        if layers := self.dense.missing(edits):
            with self.weights.base_weights():
                for layer in layers:
                    self.dense.load(layer)

    def _require_places(self, edits: EditSequence) -> None:
        """Raise if an edit names sites or layers that the model does not have: a ledger may be forged."""
        sites = {site.name for site in self.model.sites}
        for kind in edits.kinds():
            unknown = [*(set(kind.sites) - sites), *(layer for layer in kind.layers if layer >= len(self.model.sites))]
            if unknown or (kind.has_rows and not kind.layers):
                edit = edits.where(lambda one, kind=kind: one == kind)[0]  # type: ignore[misc]
                place = unknown[0] if unknown else "no layer"
                raise LedgerError(
                    f"Edit {edit.id or '(new)'} changes {place}, which {self.model.name} does not have",
                    advice="Undo the edit, or restore the ledger from a copy",
                    code="edit_does_not_fit",
                )

    def _set(self, weights: Mapping[str, Tensor], memories: Mapping[int, Dense]) -> None:
        self.weights.write(weights)
        self.dense.set(memories)
