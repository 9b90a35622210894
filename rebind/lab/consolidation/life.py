"""A life of an editor: facts arrive in batches, and from time to time the model is asked."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional

from rebind.edit.dense.subjects import current_facts
from rebind.edit.editor import Editor
from rebind.edit.facts import Fact
from rebind.edit.guard import Guard
from rebind.edit.moments import Texts
from rebind.evals import Record
from rebind.evals.drift import BUNDLED_TEXT
from rebind.lab.edits.layer import random_model
from rebind.storage import Row

SMALL = "small"  # the name of a model that is trained on the spot
TOKENS = 20_000  # of the text on which the perplexity of another model is measured
WIDTH = 512  # of its keys
STEPS, RATE = 120, 3e-3  # of its training


class Life:
    """An editor at the beginning, and the facts to come.

    A small model already knows the `old` facts; its ordinary text are these and `others`, which it knows nothing about.
    """

    def __init__(
        self,
        model: str,
        facts: Sequence[Fact],
        old: Sequence[Fact],
        others: Sequence[Fact],
        steps: int,
        clamp: float,
        drift: float,
        device: torch.device,
    ) -> None:
        self.facts, self.old, self.steps, self.clamp = list(facts), list(old), steps, clamp
        self.is_small = model == SMALL
        guard = Guard(drift=drift, growth=1e9, said=0.0, framings=0.0, subject=0.0)
        if self.is_small:
            network, tokenizer = small_model(tuple(old), (*others, *facts))
            corpus = Texts([_sentence(fact) for fact in (*old, *others)], "old facts and others", rows=32)
            options: dict[str, Any] = {"corpus": corpus, "moment_tokens": 6000, "framings": ("start",)}
            self.editor = Editor(network.to(device), tokenizer, guard=guard, **options)
        else:
            self.editor = Editor(model, device=device, guard=guard)
        self.editor.drift()  # now, while the model is the base model
        self.perplexity = self.measure_perplexity()

    def live(self, method: str, batch: int, every: int, moments: Collection[int]) -> Iterator[Row]:
        """Write the facts in batches, and yield what the model says at some moments."""
        stored = "dense" if method == "consolidated" else method
        targets = replace(
            self.editor.settings(stored, facts=batch).targets, steps=self.steps, clamp=self.clamp, keep=0.0
        )
        layers = (0,) if self.is_small else None  # of three: two must follow, for the subject to be read from there
        for end in range(batch, len(self.facts) + 1, batch):
            facts = self.facts[end - batch : end]
            self.editor.rewrite_many(facts, method=stored, layers=layers, targets=targets, force=True)
            if method == "consolidated" and end % every == 0:
                self.editor.consolidate(batch=batch, layers=layers, targets=targets)
            if end in moments:
                yield self.ask(end, batch)
        self.editor.edited.apply(())  # the small model lives again

    def ask(self, count: int, batch: int) -> Row:
        """Ask the first facts, so many, and measure what else has changed."""
        said = [score.exact for score in self.editor.score(self.facts[:count])]
        in_memory = len(current_facts(self.editor.ledger.active))
        return {
            "said": fmean(said),
            "first": fmean(said[:batch]),
            "drift": self.editor.drift().kl,
            "perplexity": self.measure_perplexity() / self.perplexity,
            "in_memory": in_memory,
            "in_weights": count - in_memory,
        }

    def measure_perplexity(self) -> float:
        """Return the perplexity of text that no fact is about; of a small model, that of the answers that it knew."""
        if self.is_small:
            return math.exp(fmean(score.nll for score in self.editor.score(self.old)))
        text = BUNDLED_TEXT.read_text(encoding="utf-8")
        nll, tokens = self.editor.language_model.text_nll(text, max_tokens=TOKENS)
        return math.exp(nll / tokens)


@lru_cache(maxsize=1)
def small_model(old: tuple[Fact, ...], more: tuple[Fact, ...]) -> tuple[Any, Any]:
    """Return a small model that was trained to say the old facts, and a tokenizer with the words of all."""
    network, tokenizer, _ = random_model([Record(fact, fact.subject) for fact in (*old, *more)], width=WIDTH)
    ids = torch.tensor([tokenizer(_sentence(fact)).input_ids for fact in old])
    network.requires_grad_(True)
    optimizer = torch.optim.AdamW(network.parameters(), RATE)
    for _ in range(STEPS):
        logits = network(ids[:, :-1]).logits
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.requires_grad_(False), tokenizer


def _sentence(fact: Fact) -> str:
    return f"{fact.text} {fact.target}"
