"""Documents packed end to end in one row, with nothing between them, so that no token of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rebind.errors import InputError, ShapeError
from rebind.memory.checks import known
from rebind.nn.parts.padding import Packing, take_tokens


@dataclass(frozen=True, eq=False)
class Documents:
    """The boundaries of N documents in a row of T tokens: document n is the tokens from bounds[n] to bounds[n + 1]."""

    bounds: Tensor  # [N + 1]: 0, …, T
    length: int  # T, which a GPU would have to be waited for

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens per document [N]."""
        return self.bounds.diff()

    @cached_property
    def owner(self) -> Tensor:
        """The document of each token [T]."""
        numbers = torch.arange(len(self), device=self.bounds.device)
        return torch.repeat_interleave(numbers, self.lengths, output_size=self.length)

    @cached_property
    def position(self) -> Tensor:
        """The position of each token in its document [T]."""
        return torch.arange(self.length, device=self.bounds.device) - self.bounds[self.owner]

    @cached_property
    def mask(self) -> Tensor:
        """Which tokens of `to_rows` are real [N, longest]."""
        return torch.arange(self.longest, device=self.bounds.device) < self.lengths[:, None]

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest document. On a GPU it has to be waited for."""
        return int(self.lengths.max())

    def to_rows(self, x: Tensor) -> Tensor:
        """Return tokens [1, T, ...] with a row for each document [N, longest, ...], and zeros behind the shorter."""
        rows = x.new_zeros(len(self), self.longest, *x.shape[2:])
        return rows.index_put((self.owner, self.position), x[0])

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the tokens of `to_rows` packed again, [1, T, ...]."""
        return rows[self.owner, self.position].unsqueeze(0)

    def insert_windows(self, x: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [1, T, ...] with windows [N, size, ...] before their documents, and where each token is now."""
        size = windows.shape[1]
        places = torch.arange(self.length, device=x.device) + (self.owner + 1) * size
        fronts = self.bounds[:-1, None] + torch.arange(len(self), device=x.device)[:, None] * size
        slots = (fronts + torch.arange(size, device=x.device)).flatten()
        longer = x.new_zeros(1, x.shape[1] + len(slots), *x.shape[2:])
        longer = longer.index_copy(1, places, x).index_copy(1, slots, windows.to(x.dtype).flatten(0, 1).unsqueeze(0))
        return longer, places

    def last_tokens(self, longer: Tensor, size: int) -> Tensor:
        """Return the last `size` tokens of every document [N, size, ...] of what `insert_windows` returned."""
        ends = self.bounds[1:, None] + torch.arange(1, len(self) + 1, device=longer.device)[:, None] * size
        return longer[0, ends - size + torch.arange(size, device=longer.device)]


def as_documents(cu_seqlens: Tensor, batch: int, length: int, mask: Tensor | None) -> Documents:
    """Check the boundaries of documents in `batch` rows of `length` tokens, which must be one row without padding."""
    if mask is not None:
        problem, advice = "There are both a mask and cu_seqlens", "Leave padding out when documents are packed"
        raise InputError(problem, expected="one of them", advice=advice, code="mask_with_documents")
    if batch != 1:
        problem, advice = f"The batch has {batch} rows", "Lay the documents of all rows end to end"
        raise ShapeError(problem, expected="one row with cu_seqlens", advice=advice, code="documents_need_one_row")
    require_boundaries(cu_seqlens=cu_seqlens)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        problem = f"cu_seqlens is a {cu_seqlens.dtype} tensor of shape {list(cu_seqlens.shape)}"
        raise ShapeError(problem, expected="integers [N + 1]: 0, …, T", code="invalid_boundaries")
    fits = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
    if known(fits) is False:
        problem = f"cu_seqlens goes from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}"
        expected = f"boundaries that never decrease, from 0 to {length}, the number of tokens"
        raise InputError(problem, expected=expected, code="invalid_boundaries")
    return Documents(cu_seqlens.long(), length)


def require_boundaries(**bounds: object) -> None:
    """Require boundaries that are tensors."""
    for name, value in bounds.items():
        if not isinstance(value, Tensor):
            problem = f"{name} is a {type(value).__name__}"
            advice = f"Convert it with torch.tensor({name})"
            raise InputError(problem, expected="a tensor of integers", advice=advice, code="invalid_boundaries")


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of tokens [B, T] as documents: their real tokens, laid end to end."""

    documents: Documents
    real: Tensor | None  # [B, T] true for the tokens that are in a document; None: all are
    shape: tuple[int, int]

    @property
    def has_next(self) -> Tensor:
        """Which tokens are followed by another of their document [B, T]."""
        bounds, count = self.documents.bounds, self.documents.length
        return self.restore(
            torch.ones(1, count, dtype=torch.bool, device=bounds.device).index_fill(1, bounds[1:] - 1, False)
        )

    def flatten(self, x: Tensor) -> Tensor:
        """Return the real tokens of x [B, T, ...] as one row [1, n, ...]."""
        return (x.flatten(0, 1) if self.real is None else x[self.real]).unsqueeze(0)

    def restore(self, x: Tensor) -> Tensor:
        """Return one row [1, n, ...] as the rows it came from [B, T, ...], with zeros for padding."""
        if self.real is None:
            return x[0].unflatten(0, self.shape)
        rows = x.new_zeros(*self.shape, *x.shape[2:])
        return rows.index_put((self.real,), x[0])


# What `DataCollatorWithFlattening` of transformers sends beside `position_ids`; lengths follow from the boundaries.
DOCUMENT_ARGUMENTS = {"cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
DEFAULTS = {"output_attentions": False, "return_dict": True}  # what a model does anyway


def find_documents(
    x: Tensor, mask: Tensor | None, position_ids: Tensor | None, arguments: dict[str, Any]
) -> PackedBatch | None:
    """Return the documents of x [B, T, ...] that a call of a model names, or None if every row is one sequence.

    Args:
        x: Tokens or their vectors.
        mask: Real tokens [B, T]. None: all are.
        position_ids: As for `pack_batch`.
        arguments: The arguments that the signature of the model does not name; those that mean nothing are refused.
    """
    others = {name: value for name, value in arguments.items() if name not in DOCUMENT_ARGUMENTS}
    refuse_unknown(others, also=("position_ids", *sorted(DOCUMENT_ARGUMENTS)))
    names = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
    named = {name: arguments[name] for name in names if arguments.get(name) is not None}
    require_boundaries(**named)
    bounds = list(named.values())
    if any(not torch.equal(bounds[0], other) for other in bounds[1:]):
        problem = "cu_seqlens, cu_seq_lens_q and cu_seq_lens_k differ"
        raise InputError(problem, expected="the same boundaries", code="documents_disagree")
    cu_seqlens = bounds[0] if bounds else None
    return pack_batch((x.shape[0], x.shape[1]), mask, position_ids, arguments.get("seq_idx"), cu_seqlens)


def refuse_unknown(arguments: dict[str, Any], also: Sequence[str] = ()) -> None:
    """Refuse the arguments of a call that the signature of a model does not name, unless they ask for nothing.

    Args:
        arguments: The arguments by name.
        also: What the model knows besides its signature, for the message.
    """
    for name, value in arguments.items():
        if value is not None and (name not in DEFAULTS or value != DEFAULTS[name]):
            raise InputError(
                f"The model has no argument {name!r}",
                expected=", ".join(["the arguments that its signature names", *also]),
                advice="Remove it from the batch or from the call",
                code="unknown_argument",
            )


def pack_batch(
    shape: tuple[int, int],
    mask: Tensor | None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> PackedBatch | None:
    """Return the documents of a batch of tokens, or None if every row is one sequence.

    Args:
        shape: B and T.
        mask: Real tokens [B, T]. None: all are.
        position_ids: Positions [B or 1, T], which start again with every document. Those of padding do not matter.
        seq_idx: The number of the document of each token [B or 1, T].
        cu_seqlens: Boundaries [N + 1] of documents in the rows laid end to end.
    """
    batch, length = shape
    sources = []
    if position_ids is not None and length > 1:  # a single token always continues what is there
        sources.append(_find_starts("position_ids", position_ids, shape, mask))
    if seq_idx is not None and length > 1:
        sources.append(_find_starts("seq_idx", seq_idx, shape, mask))
    if cu_seqlens is not None:
        bounds = as_documents(cu_seqlens, 1, batch * length, mask).bounds
        flat = torch.zeros(batch * length + 1, dtype=torch.bool, device=bounds.device).index_fill(0, bounds, True)
        sources.append(flat[:-1].unflatten(0, shape).index_fill(1, bounds.new_zeros(1), True))
    # Values decide here, so a compiler has to break the graph: to go on without them would mix documents.
    if any(not torch.equal(sources[0], other) for other in sources[1:]):
        problem = "position_ids, seq_idx and cu_seqlens name different documents"
        raise InputError(problem, advice="Pass one of them", code="documents_disagree")
    if not sources or sources[0].sum(1).max() < 2:
        return None
    starts = sources[0].flatten() if mask is None else sources[0][mask]
    bounds = functional.pad(starts.nonzero()[:, 0], (0, 1), value=len(starts))
    return PackedBatch(Documents(bounds, len(starts)), mask, shape)


def _find_starts(name: str, values: Tensor, shape: tuple[int, int], mask: Tensor | None) -> Tensor:
    """Return which tokens [B, T] begin a document, by the positions or the documents' numbers [B or 1, T]."""
    if values.ndim != 2 or values.shape[1] != shape[1] or len(values) not in (1, shape[0]):
        raise ShapeError(
            f"{name} has shape {list(values.shape)}", expected=str(list(shape)), code=f"wrong_{name}_shape"
        )
    values = values.expand(shape)
    packing = None if mask is None else Packing.from_mask(mask)  # padding does not separate tokens
    change = (values if packing is None else take_tokens(values, packing.order)).diff(dim=1)
    begins = change != 0 if name == "seq_idx" else change <= 0
    if name == "position_ids":
        skips = change > 1
        if packing is not None:
            skips &= torch.arange(1, shape[1], device=skips.device) < packing.counts[:, None]
        if skips.any():
            expected = "positions that grow by 1, and start again with a document"
            raise InputError("position_ids leave positions out", expected=expected, code="position_ids_with_gaps")
    starts = functional.pad(begins, (1, 0), value=True)
    return starts if packing is None or mask is None else take_tokens(starts, packing.position) & mask
