"""Everyday facts, written one at a time and judged by free greedy decoding, as a user would.

    python -m benchmarks.everyday --split held
    python -m benchmarks.everyday --split held --device cuda --method memit --out benchmarks/results/everyday-h200.json

Every fact of `data/everyday.jsonl` is written alone into SmolLM2 with the default settings. Then the edited model is
asked in every framing, about the same subject and about other subjects, and compared with the base model.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rebind.edit import Editor, Fact
from rebind.models.generation import continue_prompts
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt, decode_continuation
from rebind.storage import write_json

DATA = Path(__file__).parent / "data" / "everyday.jsonl"
SAID = ("start", "plain", "paraphrase", "chat", "paragraph")
TOKENS = 24
PRONOUN = re.compile(r"^(it|he|she|they|its|his|her|their|this|that|the answer)\b", re.IGNORECASE)


@dataclass(frozen=True)
class EverydayFact:
    """A fact, and how the edited model will be asked about it."""

    fact: Fact
    paraphrase: str
    question: str
    paragraph: str
    same_subject: tuple[str, ...]
    other_subjects: tuple[str, ...]

    @classmethod
    def read(cls, path: Path, split: str) -> list[EverydayFact]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        facts = []
        for row in rows:
            if split in ("all", row["split"]):
                fact = Fact.parse(row["prompt"], row["target"], old=row["old"])
                texts = (row["paraphrase"], row["question"], row["paragraph"])
                facts.append(cls(fact, *texts, tuple(row["same_subject"]), tuple(row["other_subjects"])))
        return facts

    def prompts(self, model: LanguageModel) -> list[EncodedPrompt]:
        """Return everything that is asked: the framings in the order of `SAID`, then the kept prompts."""
        bare = Prompt(self.fact.text)
        kept = [Prompt(text) for text in (*self.same_subject, *self.other_subjects)]
        chat = model.encode([Prompt("", question=self.question)])
        start = model.encode([bare, Prompt(self.paraphrase), Prompt(self.paragraph), *kept])
        plain = model.encode([bare], start=False)
        return [start[0], *plain, start[1], *chat, *start[2:]]


def answers(model: LanguageModel, asked: Sequence[EverydayFact]) -> list[list[str]]:
    """Return the greedy continuation of every prompt of every fact."""
    encoded = [one.prompts(model) for one in asked]
    flat = [prompt for prompts in encoded for prompt in prompts]
    new = continue_prompts(model.trunk, flat, TOKENS, end_tokens=model.end_tokens)
    texts = iter(decode_continuation(model.tokenizer, prompt.ids, ids) for prompt, ids in zip(flat, new, strict=True))
    return [[next(texts) for _ in prompts] for prompts in encoded]


def says(text: str, target: str) -> bool:
    """Return whether a continuation says the target as words of their own, before its first sentence ends."""
    sentence = re.split(r"(?<=[a-z)]{2})[.!?](?:\s|$)|\n", text, maxsplit=1)[0]
    return re.search(rf"(?<!\w){re.escape(target)}(?!\w)", sentence, re.IGNORECASE) is not None


def says_of_subject(text: str, target: str, subject: str) -> bool:
    """Return whether some sentence of an answer says the target of the subject itself."""
    for sentence in re.split(r"(?<=[a-z)]{2})[.!?](?:\s|$)|\n", text):
        found = re.search(rf"(?<!\w){re.escape(target)}(?!\w)", sentence, re.IGNORECASE)
        if found is None:
            continue
        begins = found.start() <= 2 or PRONOUN.match(sentence.strip()) is not None
        if begins or subject.casefold() in sentence.casefold():
            return True
    return False


def first_word(text: str) -> str:
    words = re.findall(r"\w+", text)
    return words[0].casefold() if words else text.strip()


def judge(one: EverydayFact, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """Return what the edited model says and keeps."""
    target, subject, framings = one.fact.target, one.fact.subject, len(SAID)
    row: dict[str, Any] = {name: says(text, target) for name, text in zip(SAID, after, strict=False)}
    row["chat"] = says_of_subject(after[SAID.index("chat")], target, subject)
    same = [first_word(a) == first_word(b) for a, b in zip(before[framings:], after[framings:], strict=True)]
    row["same subject"], row["other subjects"] = same[: len(one.same_subject)], same[len(one.same_subject) :]
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of each judgment."""
    shares = {}
    for name in (*SAID, "same subject", "other subjects"):
        values = [value for row in rows for value in (row[name] if isinstance(row[name], list) else [row[name]])]
        shares[name] = sum(values) / len(values)
    return shares
