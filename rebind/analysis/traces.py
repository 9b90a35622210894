"""Settings and results of causal tracing: one trace, and the average over the traces of many facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rebind.limits import MAX_DRAWS, MAX_SEED
from rebind.memory.checks import require_number, unknown_name
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import Prompt
from rebind.parallel import ranks, unite

KINDS = ("hidden", "mlp", "attention")
ROME_WINDOW, ROME_DEPTH = 10, 48  # ROME restores 10 layers of the 48 of GPT-2 XL together


@dataclass(frozen=True)
class TraceSettings:
    """Settings of causal tracing."""

    kinds: tuple[str, ...] = KINDS  # the states to restore
    noise: float = 3.0  # standard deviation of the noise, in standard deviations of the embeddings; 3 in ROME
    draws: int = 4  # draws of noise to average over; 10 in ROME
    window: int | None = None  # layers restored together (mlp, attention); None: the share of the depth in ROME
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown_name("kind", kind, KINDS)
        require_number("draws", self.draws, least=1, most=MAX_DRAWS, whole=True, code="not_positive")
        require_number("noise", self.noise, above=0.0, code="not_positive")
        require_number("seed", self.seed, most=MAX_SEED, whole=True, code="invalid_seed")

    def window_for(self, depth: int) -> int:
        """Return the number of layers restored together in a model with `depth` layers."""
        return self.window or max(1, round(ROME_WINDOW * depth / ROME_DEPTH))


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as the model reads it."""

    ids: tuple[int, ...]
    labels: tuple[str, ...]  # the text that each token stands for
    subject: tuple[int, int]  # the first and the last token of the subject
    text: str
    mentions: tuple[tuple[int, int], ...] = ()  # every corrupted mention of the subject; by default the marked one

    def __post_init__(self) -> None:
        object.__setattr__(self, "mentions", self.mentions or (self.subject,))

    def by_position(self) -> list[list[int]]:
        """Return the tokens at each of `POSITIONS`. A single token counts as the last one of its part."""
        (first, last), end = self.subject, len(self.ids) - 1
        subject = [range(first, min(first + 1, last)), range(first + 1, last), range(last, last + 1)]
        after = [range(last + 1, min(last + 2, end)), range(last + 2, end), range(max(end, last + 1), end + 1)]
        return [list(tokens) for tokens in (*subject, *after)]


def read_prompt(model: LanguageModel, prompt: Prompt) -> tuple[PromptTokens, int | None]:
    """Return the tokens of a prompt and the first token of its target, if it has one.

    In a chat the question often names the subject, and the beginning of the answer names it again.
    """
    encoded = model.encode([prompt])[0]
    target = encoded.target[0] if encoded.target else None
    if model.chat:
        begin, end = prompt.subject or (0, len(prompt.text))
        subject = prompt.text[begin:end].strip()
        mentions = tuple((_first_token(model, encoded.ids, last, subject), last) for last in encoded.mentions)
        marked = next(span for span in mentions if span[1] == encoded.subject_last)
        chat_labels = tuple(str(model.tokenizer.decode([token])) for token in encoded.ids)
        return PromptTokens(encoded.ids, chat_labels, marked, prompt.text, mentions), target
    text = prompt.text.rstrip(" ")
    batch = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans, start = batch["offset_mapping"], len(encoded.ids) - len(batch["input_ids"])
    begin, end = prompt.subject or (0, len(prompt.text))
    first = next(index for index, (left, right) in enumerate(spans) if max(left, begin) < min(right, end))
    labels = [str(model.tokenizer.decode([token])) for token in encoded.ids[:start]]
    labels += [text[left:right] for left, right in spans]
    tokens = PromptTokens(encoded.ids, tuple(labels), (start + first, encoded.subject_last), prompt.text)
    return tokens, target


def _first_token(model: LanguageModel, ids: Sequence[int], last: int, subject: str) -> int:
    """Return the first token of a mention of the subject that ends with the token `last`."""
    starts = range(last, -1, -1)
    return next((first for first in starts if subject in model.tokenizer.decode(ids[first : last + 1])), last)


@dataclass(frozen=True, eq=False)
class Trace:
    """The indirect effect of every restored state on the probability of one answer."""

    prompt: PromptTokens
    answer: str  # the traced token
    answer_id: int
    first_choice: bool  # whether the answer is the most likely next token of the clean run
    clean: float  # its probability P
    corrupted: float  # P*, the mean over the draws of noise
    effects: dict[
        str, Tensor
    ]  # kind → indirect effects [tokens, layers] float64; NaN for tokens that were not restored
    settings: TraceSettings
    noise: float  # standard deviation of the noise
    window: int
    seconds: float

    @property
    def labels(self) -> list[str]:
        """The tokens; a star marks those of the subject."""
        in_subject = {index for first, last in self.prompt.mentions for index in range(first, last + 1)}
        return [f"{label}*" if index in in_subject else label for index, label in enumerate(self.prompt.labels)]

    def peak(self, kind: str) -> tuple[int, int]:
        """Return (token, layer) of the largest effect."""
        flat = int(self.effects[kind].nan_to_num(-torch.inf).argmax())
        return divmod(flat, self.effects[kind].shape[1])

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt.text,
            "tokens": list(self.prompt.labels),
            "subject": list(self.prompt.subject),
            "answer": self.answer,
            "first_choice": self.first_choice,
            "clean": self.clean,
            "corrupted": self.corrupted,
            "effects": {kind: rows.tolist() for kind, rows in self.effects.items()},
            "peaks": {kind: dict(zip(("token", "layer"), self.peak(kind), strict=True)) for kind in self.effects},
            "settings": asdict(self.settings),
            "noise": self.noise,
            "window": self.window,
        }


def unite_traces(traces: Sequence[Trace]) -> list[Trace]:
    """Return the traces of all processes, in the order of the facts that were divided between them."""
    if ranks().count == 1:
        return list(traces)
    return [
        Trace(
            **row
            | {
                "prompt": PromptTokens(**_tuples(row["prompt"])),
                "settings": TraceSettings(**_tuples(row["settings"])),
            }
        )
        for row in unite([asdict(trace) for trace in traces])
    ]


def _tuples(value: Any) -> Any:
    """Return nested fields with lists, which messages have, turned back into tuples."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# Averages: the figure in section 2 of ROME

SUBJECT = ("first subject token", "middle subject tokens", "last subject token")
POSITIONS = (*SUBJECT, "first token after", "further tokens", "last token")


@dataclass(frozen=True, eq=False)
class AverageTrace:
    """Mean indirect effects by the position of a token relative to the subject."""

    effects: dict[str, Tensor]  # kind → [positions, layers], float64; 0 if no fact has such a token
    counts: tuple[int, ...]  # facts with a token at each position
    clean: float
    corrupted: float
    traces: tuple[Trace, ...]
    window: int
    labels: tuple[str, ...] = POSITIONS

    @property
    def facts(self) -> int:
        return len(self.traces)

    def to_json(self) -> dict[str, Any]:
        traces = [trace.to_json() for trace in self.traces]
        return {
            "facts": self.facts,
            "positions": list(POSITIONS),
            "counts": list(self.counts),
            "clean": self.clean,
            "corrupted": self.corrupted,
            "effects": {kind: rows.tolist() for kind, rows in self.effects.items()},
            **{name: traces[0][name] for name in ("settings", "noise", "window")},
            "prompts": [{name: trace[name] for name in ("prompt", "answer", "clean", "corrupted")} for trace in traces],
        }


def average_traces(traces: Sequence[Trace]) -> AverageTrace:
    """Average traces by position. At each position a fact counts once, by the mean over its tokens there."""
    tokens = [trace.prompt.by_position() for trace in traces]
    counts = tuple(sum(map(bool, groups)) for groups in zip(*tokens, strict=True))
    effects = {}
    for kind in traces[0].effects:
        rows = [
            [trace.effects[kind][group].mean(0) for group in groups]
            for trace, groups in zip(traces, tokens, strict=True)
        ]
        effects[kind] = torch.stack([torch.stack(row) for row in rows]).nanmean(0).nan_to_num()  # NaN: no token there
    clean, corrupted = fmean(trace.clean for trace in traces), fmean(trace.corrupted for trace in traces)
    return AverageTrace(effects, counts, clean, corrupted, tuple(traces), traces[0].window)
