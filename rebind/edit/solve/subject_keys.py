"""What a model makes of subjects: the key that enters a site, and the hidden state after a block.

Prompts are cut after the subject's last token, for nothing behind it matters there. Editing asks about one
layer after another, upwards, so the prompts are run once: they wait above the last block that is settled, and
the next question goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rebind.edit.targets.objective import Request
from rebind.models.batching import in_portions
from rebind.models.trunk import Tokens, Trunk

AT_ONCE = 65_536  # tokens


@dataclass(eq=False)
class _Portion:
    """Prompts that are run together."""

    rows: list[int]  # which they are
    tokens: Tokens
    hidden: Tensor | None = None  # [rows, tokens, width]: output of the block they wait above; None at the bottom


class Subjects:
    """The prompts of requests, on their way up."""

    def __init__(self, trunk: Trunk, requests: Sequence[Request], *, tokens_at_once: int = AT_ONCE) -> None:
        self.trunk, self.tokens_at_once = trunk, tokens_at_once
        self._rows: list[tuple[int, ...]] = []
        owner, weights, self._bare = [], [], list[int]()
        for index, request in enumerate(requests):
            self._bare.append(len(self._rows))
            others = len(request.prompts) - 1
            for place, prompt in enumerate(request.prompts):
                self._rows.append(prompt.ids[: prompt.subject_last + 1])
                owner.append(index)
                weights.append(1.0 if not others else 0.5 if place == 0 else 0.5 / others)
        self._owner = torch.tensor(owner)
        self._weights = torch.tensor(weights, dtype=torch.float64)
        self._level = -1  # the block above which the prompts wait
        self._portions: list[_Portion] | None = None

    def keys(self, layer: int, module: nn.Module) -> Tensor:
        """The input of `module`, in block `layer`, at each subject's last token, [n, d_k] float64.

        The bare prompt weighs half and the other contexts share the other half, as in MEMIT's own code. The blocks
        below `layer` must be settled: what is written to them later is not seen.
        """
        self._climb(layer - 1)
        last = self._each(lambda portion: self._inputs(module, portion))
        total = last.new_zeros(len(self._bare), last.shape[-1], dtype=torch.float64)
        weighed = last.double() * self._weights.to(last.device).unsqueeze(-1)
        return total.index_add(0, self._owner.to(last.device), weighed)

    def states(self, layer: int) -> Tensor:
        """The hidden state of each bare prompt's subject after a block, [n, width] float64."""
        bare = set(self._bare)

        def run(portion: _Portion) -> Tensor | None:
            here = [place for place, row in enumerate(portion.rows) if row in bare]
            return self._after(layer, _select(portion, here))[:, -1] if here else None

        portions = self._prepared()
        found = [state for portion in portions if (state := run(portion)) is not None]
        order = [row for portion in portions for row in portion.rows if row in bare]
        return _in_order(torch.cat(found), order).double()

    def _climb(self, level: int) -> None:
        """Go up until the prompts wait above block `level`."""
        if level <= self._level:
            return
        if self._portions is None:
            self._portions = self._cut(lambda portion: setattr(portion, "hidden", self._after(level, portion)))
        else:
            for portion in self._portions:
                portion.hidden = self._after(level, portion)
        self._level = level

    def _each(self, run: Callable[[_Portion], Tensor]) -> Tensor:
        """`run` on every portion, a row a prompt, in the prompts' order."""
        found = [run(portion) for portion in self._prepared()]
        return _in_order(torch.cat(found), [row for portion in self._prepared() for row in portion.rows])

    def _prepared(self) -> list[_Portion]:
        if self._portions is None:
            self._portions = self._cut(lambda portion: self._after(0, portion))  # a first run finds what fits
        return self._portions

    def _cut(self, run: Callable[[_Portion], object]) -> list[_Portion]:
        """Portions that fit in memory, found by running them; prompts of like length together."""
        sizes = [(1, len(row)) for row in self._rows]
        order = sorted(range(len(self._rows)), key=lambda index: len(self._rows[index]))

        def start(rows: list[int]) -> _Portion:
            portion = _Portion(rows, Tokens.left_padded([self._rows[row] for row in rows], self.trunk.device))
            run(portion)
            return portion

        return [portion for _, portion in in_portions(sizes, order, self.tokens_at_once, start)]

    def _after(self, layer: int, portion: _Portion) -> Tensor:
        return self.trunk.after(layer, portion.tokens, start=self._start(portion))

    def _inputs(self, module: nn.Module, portion: _Portion) -> Tensor:
        (entered,) = self.trunk.inputs([module], portion.tokens, start=self._start(portion))
        return entered[:, -1].clone()  # not a view: that would keep the other tokens' in memory

    def _start(self, portion: _Portion) -> tuple[int, Tensor] | None:
        return None if portion.hidden is None else (self._level, portion.hidden)


def subject_keys(
    trunk: Trunk, layer: int, module: nn.Module, requests: Sequence[Request], *, tokens_at_once: int = AT_ONCE
) -> Tensor:
    """`Subjects.keys` of one layer alone."""
    return Subjects(trunk, requests, tokens_at_once=tokens_at_once).keys(layer, module)


def subject_states(trunk: Trunk, layer: int, requests: Sequence[Request], *, tokens_at_once: int = AT_ONCE) -> Tensor:
    """`Subjects.states` of one layer alone."""
    return Subjects(trunk, requests, tokens_at_once=tokens_at_once).states(layer)


def _select(portion: _Portion, places: list[int]) -> _Portion:
    if len(places) == len(portion.rows):
        return portion
    chosen = torch.tensor(places, device=portion.tokens.ids.device)
    hidden = None if portion.hidden is None else portion.hidden[chosen.to(portion.hidden.device)]
    return _Portion([portion.rows[place] for place in places], portion.tokens.select(chosen), hidden)


def _in_order(found: Tensor, order: Sequence[int]) -> Tensor:
    return found[torch.tensor(order, device=found.device).argsort()]
