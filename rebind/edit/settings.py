"""The settings of an edit: chosen by the caller, known for the model, or derived from its depth.

`KNOWN_MODELS` holds published and measured settings. Layers that `rebind layers` measured on this machine are stored
in the cache folder (`save_measured_layers`) and used for models that are not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rebind.edit.ledger.edit import JSON
from rebind.edit.methods import DENSE_SEARCH, Method
from rebind.edit.targets.objective import TargetSettings
from rebind.errors import InputError
from rebind.memory.checks import require_number, require_type
from rebind.storage import cache_dir, path_inside, read_sealed_json, seal_json, write_json

DENSE_DEPTH = 0.27  # layer 8 of SmolLM2's 30
BY_DEPTH = "by the depth of the model"  # the source of layers that are neither measured nor published


@dataclass(frozen=True)
class EditSettings:
    """Everything a method needs to edit one model."""

    method: Method
    layers: tuple[int, ...]  # the edited layers, in order; targets belong to the last one
    lam: float | None  # λ; None: choose it from the keys (`rebind.edit.solve.choose_lambda`)
    targets: TargetSettings
    source: str = "chosen by hand"  # where the layers come from
    published_lam: float | None = None  # λ of published runs on this model: shown to users, not used


@dataclass(frozen=True)
class KnownModel:
    """Published or measured settings for a model."""

    methods: tuple[str, ...]
    model: str  # a part of its name, in lower case
    depth: int  # its number of blocks: models of other sizes have similar names
    layers: tuple[int, ...]
    targets: TargetSettings
    lam: float | None = None
    source: str = "published"
    facts: int = 1  # the entry is for edits of at least this many facts


def _search(steps: int, rate: float, decay: float, clamp: float) -> TargetSettings:
    return TargetSettings(steps=steps, rate=rate, decay=decay, clamp=clamp)


ROME, EMMET, DENSE, SEVERAL = ("rome",), ("emmet",), ("dense",), ("memit", "alphaedit", "recursive")
MANY_FACTS = TargetSettings(enough=0.2, keep=0.0)
DENSE_SEARCH_OF_MANY = replace(DENSE_SEARCH, steps=16, rate=0.3, clamp=0.5, keep=0.0)
LLAMA_LAYERS = (4, 5, 6, 7, 8)

# The published λ has our unit, λ·E[kkᵀ], but is only shown: it was tuned for one number of facts (2,000 or 10,000 at
# once) and for moments of about 40 million tokens of Wikipedia. λ chosen from the keys adapts to the number of facts
# and to the moments at hand. MEMIT's own code on SmolLM2 scores S .89 at λ = 1,500 and .64 at the published 15,000.
KNOWN_MODELS = (
    KnownModel(ROME, "gpt2-medium", 24, (8,), _search(20, 0.5, 0.5, 3.0)),
    KnownModel(ROME, "gpt2-large", 36, (12,), _search(20, 0.5, 0.5, 4.0)),
    KnownModel(ROME, "gpt2-xl", 48, (17,), _search(20, 0.5, 0.5, 4.0)),
    KnownModel(ROME, "gpt-j", 28, (5,), _search(20, 0.5, 0.5, 4.0)),
    KnownModel(ROME, "gpt-neox-20b", 44, (15,), _search(20, 0.5, 0.5, 4.0)),
    KnownModel(ROME, "llama-3-8b", 32, (5,), _search(25, 0.5, 1e-3, 4.0)),
    KnownModel(ROME, "qwen2.5-7b", 28, (5,), _search(25, 0.5, 1e-3, 4.0)),
    KnownModel(EMMET, "gpt2-xl", 48, (17,), _search(20, 0.5, 0.5, 0.75)),
    KnownModel(EMMET, "gpt-j", 28, (5,), _search(25, 0.5, 0.5, 0.75)),
    KnownModel(EMMET, "llama-2-7b", 32, (5,), _search(25, 0.5, 1e-3, 4.0)),
    KnownModel(SEVERAL, "gpt2-xl", 48, (13, 14, 15, 16, 17), _search(20, 0.5, 0.5, 0.75), 20_000.0),
    KnownModel(SEVERAL, "gpt-j", 28, (3, 4, 5, 6, 7, 8), _search(25, 0.5, 0.5, 0.75), 15_000.0),
    KnownModel(SEVERAL, "llama-2-7b", 32, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    KnownModel(SEVERAL, "mistral-7b", 32, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    KnownModel(SEVERAL, "qwen2.5-7b", 28, LLAMA_LAYERS, _search(25, 0.5, 1e-3, 4.0), 15_000.0),
    KnownModel(SEVERAL, "llama-3-8b", 32, LLAMA_LAYERS, _search(25, 0.1, 0.5, 0.75), 15_000.0),
    # A few facts are recalled best from layers 1 to 5. Many facts compete, so no target is reached in full: an
    # approximate one is as good, and one layer lower the edit disturbs the rest of the model less. Keeping the
    # subjects would take room that the facts themselves need.
    KnownModel(SEVERAL, "smollm2", 30, (0, 1, 2, 3, 4), MANY_FACTS, source="measured", facts=400),
    KnownModel(SEVERAL, "smollm2", 30, (1, 2, 3, 4, 5), TargetSettings(), source="measured"),
    KnownModel(ROME, "smollm2", 30, (2,), TargetSettings(clamp=4.0), source="measured"),
    # Deeper layers tell subjects apart better, and the memory fires less on other text. From layer 11 on, paraphrases
    # are recognized less often. In a thousand facts and more, what is kept about their subjects costs answers in texts
    # and chats, and most of the time.
    KnownModel(DENSE, "smollm2", 30, (8,), DENSE_SEARCH_OF_MANY, source="measured", facts=1_000),
    KnownModel(DENSE, "smollm2", 30, (8,), DENSE_SEARCH, source="measured"),
)


def default_settings(method: Method, name: str, depth: int, facts: int = 1) -> EditSettings:
    """Return the known settings of a model, or else layers derived from its depth and the search of the method.

    A method without an entry takes the layers of another method that edits one or several layers, as it does.
    """
    entries = [
        entry for entry in KNOWN_MODELS if entry.model in name.lower() and entry.depth == depth and entry.facts <= facts
    ]
    for entry in entries:
        if method.name in entry.methods:
            published = None if method.lam is not None else entry.lam  # AlphaEdit's λ belongs to the method
            source = f"{entry.source} for {entry.model}"
            return EditSettings(method, entry.layers, method.lam, entry.targets, source, published)
    for entry in entries:
        if (len(entry.layers) > 1) is method.several_layers and not method.dense:
            source = f"{entry.source} for {entry.model} with {entry.methods[0]}"
            return EditSettings(method, entry.layers, method.lam, method.targets, source)
    return EditSettings(
        method, _layers_by_depth(method, depth), method.lam, method.targets, f"{BY_DEPTH}, {depth} blocks"
    )


def _layers_by_depth(method: Method, depth: int) -> tuple[int, ...]:
    """Return layers up to a sixth of the depth: on SmolLM2 (30 blocks), 1 to 5 did better than 2 to 6.

    A dense memory is read at a quarter of the depth, where states tell subjects apart.
    """
    if method.dense:
        return (max(0, min(depth - 2, round(depth * DENSE_DEPTH))),)
    last = max(0, min(depth - 2, max(1, round(depth / 6))))
    return tuple(range(max(0, last - 4), last + 1)) if method.several_layers else (last,)


def choose_settings(
    method: Method,
    name: str,
    depth: int,
    *,
    facts: int = 1,
    layers: Sequence[int] | None = None,
    lam: float | None = None,
    targets: TargetSettings | None = None,
    measured: tuple[int, ...] | None = None,
) -> EditSettings:
    """Return the settings of the caller, completed by defaults.

    `measured` layers (see `measured_layers`) replace those that are only derived from the model's depth.
    """
    settings = default_settings(method, name, depth, facts)
    if measured is not None and settings.source.startswith(BY_DEPTH) and not method.dense:
        layers_here = measured if method.several_layers else (measured[len(measured) // 2],)
        settings = replace(settings, layers=layers_here, source="measured on this machine")
    if layers is not None:
        require_type("layers", layers, Sequence, "a list of layers, such as [8]")
        settings = replace(settings, layers=tuple(sorted(set(layers))), source="chosen by hand")
    if lam is not None:
        settings = replace(settings, lam=lam)
    _require_valid(settings, depth)
    if targets is not None:
        require_type("targets", targets, TargetSettings, "TargetSettings, such as TargetSettings(steps=60)")
        settings = replace(settings, targets=targets)
    return settings


def _require_valid(settings: EditSettings, depth: int) -> None:
    method, layers = settings.method, list(settings.layers)
    if len(layers) > 1 and not method.several_layers:
        raise InputError(
            f"Method {method.name} got layers {layers}",
            expected="one layer, because it writes a fact to a single layer",
            advice="Choose one layer, or use {method}",
            settings={"method": "memit"},
            code="too_many_layers",
        )
    if settings.lam is not None and method.exact:
        raise InputError(
            f"Method {method.name} got λ = {settings.lam:g}, which it does not use",
            advice="Leave out {lam}, or use {method}",
            settings={"lam": None, "method": "memit"},
            code="lambda_not_used",
        )
    if settings.lam is not None:
        require_number("lam", settings.lam, above=0.0, code="invalid_lambda")
    if not layers or not 0 <= layers[0] <= layers[-1] < depth - 1:
        raise InputError(
            f"Layers are {layers}",
            expected=f"some of 0 to {depth - 2}, because at least one block must follow the last edited one",
            code="layers_out_of_range",
        )


# Layers measured on this machine


def layers_file(fingerprint: str) -> Path:
    """Return the file that stores the measured layers of a model."""
    return path_inside(cache_dir(), f"layers/{fingerprint[:32]}.json")


def measured_layers(fingerprint: str) -> tuple[int, ...] | None:
    """Return the layers that were measured for a model on this machine; None without a measurement."""
    record = read_sealed_json(layers_file(fingerprint)) or {}  # a damaged file counts as absent
    try:
        return layers_from_json(record["layers"]) if record.get("fingerprint") == fingerprint else None
    except (LookupError, TypeError, ValueError):
        return None


def layers_from_json(value: Any) -> tuple[int, ...]:
    """Return stored layers in order; raise TypeError or ValueError for anything else, which may be forged."""
    for layer in value:
        require_number("layer", layer, whole=True)
    if not value:
        raise ValueError("no layers")
    return tuple(sorted(set(value)))


def save_measured_layers(fingerprint: str, layers: Sequence[int], report: Mapping[str, JSON] | None = None) -> None:
    """Store the layers measured for a model, with a report of the measurement, for later edits."""
    record = {**(report or {}), "fingerprint": fingerprint, "layers": list(layers)}
    write_json(layers_file(fingerprint), seal_json(record))
