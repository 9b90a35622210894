"""What is traced and what comes of it: a prompt as a model reads it, how it is traced, its states' effects."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rebind.edit.facts.encoding import encode
from rebind.edit.facts.fact import Fact
from rebind.errors import InputError

KINDS = ("hidden", "mlp", "attention")
PAPER_WINDOW, PAPER_DEPTH = 10, 48  # of GPT-2 XL, where ROME's window comes from


@dataclass(frozen=True)
class TraceSettings:
    """How to trace."""

    kinds: tuple[str, ...] = KINDS
    noise: float = 3.0  # its standard deviation, in those of the embeddings' entries: ROME's 3
    draws: int = 4  # of noise, averaged over; ROME takes 10
    window: int | None = None  # layers restored together (mlp, attention); None: 10 of 48 as in ROME, by the depth
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS] or not self.kinds:
            raise InputError(f"kinds are {self.kinds!r} ({unknown}), expected some of {', '.join(KINDS)}: choose these")
        for name in ("noise", "draws", "window"):
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise InputError(f"{name} is {given}, expected a finite number above 0: leave it out")

    def window_of(self, depth: int) -> int:
        return self.window or max(1, round(PAPER_WINDOW * depth / PAPER_DEPTH))


@dataclass(frozen=True)
class Question:
    """A prompt as the model reads it."""

    ids: tuple[int, ...]
    labels: tuple[str, ...]  # what to call each token: the text it stands for
    subject: tuple[int, int]  # its first and its last token
    text: str


@dataclass(frozen=True, eq=False)
class Trace:
    """What each restored state brings back of one answer."""

    question: Question
    answer: str  # the token whose probability is traced
    answer_id: int
    first_choice: bool  # whether it is the clean model's likeliest next token
    clean: float  # its probability P
    corrupted: float  # P*, the mean over the draws of noise
    effects: dict[str, Tensor]  # a kind's indirect effects [tokens, layers], float64; nan at tokens that were left out
    settings: TraceSettings
    noise: float  # the noise's standard deviation as it was added
    window: int
    seconds: float

    @property
    def labels(self) -> list[str]:
        """Tokens, the subject's marked with a star."""
        first, last = self.question.subject
        return [f"{label}*" if first <= at <= last else label for at, label in enumerate(self.question.labels)]

    def peak(self, kind: str) -> tuple[int, int]:
        """(token, layer) of the largest effect."""
        flat = int(self.effects[kind].nan_to_num(-torch.inf).argmax())
        return divmod(flat, self.effects[kind].shape[1])

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.question.text,
            "tokens": list(self.question.labels),
            "subject": list(self.question.subject),
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


def ask(fact: Fact, tokenizer: Any, start: tuple[int, ...], limit: int | None = None) -> tuple[Question, int]:
    """The prompt of a fact and the first token of its target."""
    encoded = encode(fact, tokenizer, start, limit=limit)
    text = fact.text.rstrip(" ")
    batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans, front = batch["offset_mapping"], len(encoded.ids) - len(batch["input_ids"])
    begin = len(fact.parts[0])
    end = begin + len(fact.subject)
    inside = [at for at, (left, right) in enumerate(spans) if max(left, begin) < min(right, end)]
    labels = [str(tokenizer.decode([token])) for token in encoded.ids[:front]]
    labels += [text[left:right] for left, right in spans]
    question = Question(encoded.ids, tuple(labels), (front + inside[0], encoded.subject_last), fact.text)
    return question, encoded.target[0]
