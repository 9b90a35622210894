"""From answers to scores: which metric is taken of which answers, and their means with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rebind.evals import metrics
from rebind.evals.answers import Row
from rebind.evals.metrics import efficacy_score as efficacy
from rebind.evals.metrics import neighbourhood_score as staying
from rebind.evals.records import Record


@dataclass(frozen=True)
class Asked:
    """A record with what was said to it, now and by the base model."""

    record: Record
    row: Row
    base: Row
    idf: Mapping[str, float]  # of words in the references

    def pairs(self, rows: Sequence[Row]) -> list[metrics.Pair]:
        return [(row["new"]["nll"], row["true"]["nll"]) for row in rows if "true" in row]

    @property
    def neighbours(self) -> list[Row]:
        """Those whose right answer is the fact's true target: the ones that CounterFact compares on."""
        asked = zip(self.record.neighbours, self.row["neighbours"], strict=True)
        return [
            row for question, row in asked if question.answer is not None and question.answer == self.record.fact.old
        ]

    @property
    def instead(self) -> list[str]:
        return [] if self.record.fact.old is None else [self.record.fact.old]


@dataclass(frozen=True)
class Score:
    """One score of a record."""

    name: str
    meaning: str
    of: Callable[[Asked], float | None]


def _counts(rows: Sequence[Row], name: str) -> list[tuple[int, int]]:
    return [(row[name]["right"], row[name]["tokens"]) for row in rows if name in row]


def _mean(metric: Callable[[Any], float], items: Sequence[Any]) -> float | None:
    return metric(items) if items else None


def _kept(asked: Asked) -> float | None:
    before, after = ([row["new"]["first"] for row in side["neighbours"]] for side in (asked.base, asked.row))
    return metrics.kept(before, after) if after else None


def _tokens(rows: Sequence[Row], name: str) -> float | None:
    return _mean(metrics.token_accuracy, _counts(rows, name))


def _portability(asked: Asked) -> float | None:
    answered = [told for told in asked.row["consequences"] if told]
    return _mean(metrics.portability, [[(t["right"], t["tokens"]) for t in told] for told in answered])


def _free(asked: Asked, where: str) -> float | None:
    said = asked.row.get("free", {}).get(where, [])
    texts = [said] if isinstance(said, str) else said
    return _mean(fmean, [metrics.free_decoding(text, [asked.record.fact.target], asked.instead) for text in texts])


def _free_consequences(asked: Asked) -> float | None:
    if "free" not in asked.row:
        return None
    asks = zip(asked.record.consequences, asked.row["free"]["consequences"], strict=True)
    answered = [(text, question.answers) for question, text in asks if question.answers]
    return _mean(fmean, [metrics.free_decoding(text, answers) for text, answers in answered])


def _consistency(asked: Asked) -> float | None:
    if not asked.row.get("texts") or not asked.record.references:
        return None
    return metrics.consistency(" ".join(asked.row["texts"]), " ".join(asked.record.references), asked.idf)


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


SCORES = {
    score.name: score
    for score in (
        Score("ES", "new target likelier than the true one", lambda a: _mean(efficacy, a.pairs([a.row["prompt"]]))),
        Score("PS", "the same, on paraphrases", lambda a: _mean(efficacy, a.pairs(a.row["paraphrases"]))),
        Score("NS", "true target still likelier, on neighbours", lambda a: _mean(staying, a.pairs(a.neighbours))),
        Score("EA", "every target token first", lambda a: _mean(metrics.accuracy, _counts([a.row["prompt"]], "new"))),
        Score(
            "PA", "the same, on paraphrases", lambda a: _mean(metrics.accuracy, _counts(a.row["paraphrases"], "new"))
        ),
        Score("free", "greedy decoding says the target", lambda a: _free(a, "prompt")),
        Score("free_paraphrases", "the same, on paraphrases", lambda a: _free(a, "paraphrases")),
        Score("portability", "share of tokens first, on consequences", _portability),
        Score("free_consequences", "greedy decoding says the consequence", _free_consequences),
        Score("kept", "neighbours' first token as before", _kept),
        Score("tokens", "share of tokens first: zsRE's efficacy", lambda a: _tokens([a.row["prompt"]], "new")),
        Score("tokens_paraphrases", "the same, on paraphrases", lambda a: _tokens(a.row["paraphrases"], "new")),
        Score(
            "tokens_neighbours",
            "of neighbours' answers: its specificity",
            lambda a: _tokens(a.row["neighbours"], "true"),
        ),
        Score("EM", "p(new) − p(true)", lambda a: _mean(metrics.magnitude, a.pairs([a.row["prompt"]]))),
        Score("PM", "the same, on paraphrases", lambda a: _mean(metrics.magnitude, a.pairs(a.row["paraphrases"]))),
        Score(
            "NM",
            "p(true) − p(new), on neighbours",
            lambda a: _negative(_mean(metrics.magnitude, a.pairs(a.neighbours))),
        ),
        Score("GE", "fluency: entropy of longer texts", lambda a: _mean(metrics.fluency, a.row.get("texts", []))),
        Score("RS", "consistency: cosine with reference texts", _consistency),
    )
}
SHARES = ("S", "ES", "PS", "NS", "EA", "PA", "free", "free_paraphrases", "portability", "free_consequences", "kept")
S_OF = ("ES", "PS", "NS")


def scores_of(records: Sequence[Record], rows: Sequence[Row], base: Sequence[Row]) -> dict[str, list[float | None]]:
    """A column for every score, one value for each record; None where the record has nothing for it."""
    idf = metrics.inverse_document_frequencies([" ".join(record.references) for record in records if record.references])
    asked = [Asked(record, row, first, idf) for record, row, first in zip(records, rows, base, strict=True)]
    return {name: [score.of(one) for one in asked] for name, score in SCORES.items()}


def summarise(
    records: Sequence[Record], rows: Sequence[Row], base: Sequence[Row], *, seed: int = 0, rounds: int = 1000
) -> dict[str, dict[str, float]]:
    """Every score that the records have, with its interval: {name: {value, low, high, records}}."""
    columns = scores_of(records, rows, base)
    found = metrics.bootstrap(columns, {"S": S_OF}, seed=seed, rounds=rounds)
    order = ["S", *SCORES]
    return {
        name: {key: round(value, 6) for key, value in asdict(found[name]).items()} for name in order if name in found
    }
