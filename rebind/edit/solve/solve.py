"""From facts to requests, which a search for targets is asked, and from targets to writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from rebind.edit.facts.encoding import encode_many
from rebind.edit.facts.fact import Fact
from rebind.edit.methods import Method, Old
from rebind.edit.solve.layer_writes import Place, spread, suitable_lambda
from rebind.edit.targets.objective import Prompt, Request
from rebind.memory import Write
from rebind.models.load import Loaded
from rebind.models.trunk import Trunk

EMPTY: Mapping[str, Tensor] = {}


def requests_of(
    facts: Sequence[Fact], loaded: Loaded, contexts: Sequence[str], *, chat: bool, limit: int | None
) -> list[Request]:
    """Every fact behind every context, the bare prompt first."""
    encode = partial(encode_many, facts, loaded.tokenizer, loaded.start, chat=chat, limit=limit)
    bare = encode()
    targets = [one.target for one in bare]
    encoded = [bare, *(encode(context=context, targets=targets) for context in contexts)]
    return [
        Request(tuple(Prompt(one.ids, one.subject_last) for one in rows), rows[0].target)
        for rows in zip(*encoded, strict=True)
    ]


def solve(
    trunk: Trunk,
    places: Sequence[Place],
    requests: Sequence[Request],
    hidden: Tensor,
    method: Method,
    lam: float | None,
    old: Mapping[str, Old],
    earlier: Mapping[str, Tensor] = EMPTY,
) -> tuple[dict[str, Write], float | None]:
    """A method's write at each place that brings the subjects to `hidden`, and its λ: by default a suitable one.

    `earlier` are keys by place that count as written before. An editor names none: later layers' keys depend on
    this gain, and they are stored; what earlier edits change comes in when the ledger is folded.
    """

    def gain(place: Place, keys: Tensor) -> Tensor:
        nonlocal lam
        if lam is None:  # the first layer's keys decide for all
            lam = suitable_lambda(keys, old[place.name].factored)
        return method.gain(keys, old[place.name], lam, earlier.get(place.name, keys[:0]))

    return spread(trunk, places, requests, hidden, gain), lam
