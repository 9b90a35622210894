"""Everyday facts and how an edited model answers them by free greedy decoding, as a user would ask it.

`data/everyday.jsonl` has 69 facts: 24 and 21 to tune settings with (the splits "tune" and "dev", the latter about
relations that are mostly not in the catalog), and 24 that were held out at first ("held"). `benchmarks.framings` writes
each of them alone, asks the edited model in every framing, about the same subject and about other subjects, and
compares its answers with those of the base model. Some of the questions are so natural that target search asks them,
too; the share among the others is reported beside.

`data/everyday-fresh.jsonl` has 32 more facts, the split "fresh": another author wrote them without sight of the
library's catalog of relations and questions, and checked them on the base model alone, never on an edited one. They
have since helped to choose settings. `data/everyday-second.jsonl` has 39 facts made in the same way, the split
"second". The base model says their old targets after the prompt, after the paraphrase and in the chat: an edit can
hardly be recalled where the old fact is not. For other splits, the share among such prompts is reported beside. Its
author did not check the prompts about the same subject, and the base model is often unsure of them (the median
probability of its first choice is .40, in the other sets .72 to .76), so the share among those that it is sure of is
reported as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebind.edit import Fact
from rebind.edit.facts.questions import paraphrases_of, questions_of
from rebind.edit.facts.relations import RELATIONS, fill
from rebind.models.judging import first_word, says, says_of_subject
from rebind.models.language_model import LanguageModel
from rebind.models.prompts import EncodedPrompt, Prompt

DATA = Path(__file__).parent / "data" / "everyday.jsonl"
FILES = {split: DATA.with_name(f"everyday-{split}.jsonl") for split in ("fresh", "second")}  # other splits: DATA
SAID = ("start", "plain", "paraphrase", "chat", "paragraph")
SURE = 0.5  # the probability from which a first choice of the base model is more than a guess
TOKENS, CHAT_TOKENS = 24, 40  # the first sentence of an answer in a chat is often longer than 24 tokens


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
    def read(cls, split: str) -> list[EverydayFact]:
        """Return the facts of a split: "tune", "dev", "held", these three ("all"), "fresh" or "second"."""
        rows = [json.loads(line) for line in FILES.get(split, DATA).read_text(encoding="utf-8").splitlines()]
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
    at = SAID.index("chat")
    chats = model.generate_encoded([prompts[at] for prompts in encoded], CHAT_TOKENS)
    others = iter(
        model.generate_encoded([p for prompts in encoded for p in (*prompts[:at], *prompts[at + 1 :])], TOKENS)
    )
    texts = [[next(others) for _ in prompts[1:]] for prompts in encoded]
    return [[*own[:at], chat, *own[at:]] for own, chat in zip(texts, chats, strict=True)]


def confidence(model: LanguageModel, asked: Sequence[EverydayFact]) -> list[list[float]]:
    """Return how probable the model's first choice is after every prompt about the same and other subjects."""
    kept = [(*one.same_subject, *one.other_subjects) for one in asked]
    best = model.next_token_log_probs([text for texts in kept for text in texts]).max(-1).values.exp()
    probabilities = iter(best.tolist())
    return [[next(probabilities) for _ in texts] for texts in kept]


def judge(one: EverydayFact, before: Sequence[str], sure: Sequence[float], after: Sequence[str]) -> dict[str, Any]:
    """Return what the edited model says and keeps. `sure` are the probabilities of the base model's first choices."""
    target, subject, framings = one.fact.target, one.fact.subject, len(SAID)
    row: dict[str, Any] = {name: says(text, target) for name, text in zip(SAID, after, strict=False)}
    row["chat"] = says_of_subject(after[SAID.index("chat")], target, subject)
    same = [first_word(a) == first_word(b) for a, b in zip(before[framings:], after[framings:], strict=True)]
    for name, asked, seen in (
        ("paraphrase", one.paraphrase, paraphrases_of(one.fact)),
        ("chat", one.question, questions_of(one.fact)),
    ):
        row[f"{name}, not seen by the search"] = [] if asked in seen else [row[name]]
        row[f"{name}, known before"] = [row[name]] if says(before[SAID.index(name)], one.fact.old or "") else []
    wordings = {fill(wording, one.fact) for relation in RELATIONS for wording in relation.wordings}
    pairs = zip(one.same_subject, same, strict=False)
    row["same subject, not in the catalog"] = [value for text, value in pairs if text not in wordings]
    row["same subject"], row["other subjects"] = same[: len(one.same_subject)], same[len(one.same_subject) :]
    pairs = zip(row["same subject"], sure, strict=False)
    row["same subject, sure before"] = [value for value, probability in pairs if probability >= SURE]
    return row


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of each judgment."""
    shares = {}
    for name in rows[0]:
        values = [value for row in rows for value in (row[name] if isinstance(row[name], list) else [row[name]])]
        shares[name] = sum(values) / max(len(values), 1)
    return shares
