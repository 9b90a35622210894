"""From answers to scores: which metric is taken of which answers, and their means with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.evals import metrics
from rebind.evals.answers import Row, by_fact
from rebind.evals.records import Record


@dataclass(frozen=True)
class Asked:
    """A record with what was said to it, now and by the base model."""

    record: Record
    row: Row
    base: Row
    idf: Mapping[str, float]  # of words in the references

    @property
    def neighbours(self) -> list[Row]:
        """Those whose right answer is the fact's true target: the ones that CounterFact compares on."""
        asked = zip(self.record.neighbours, self.row["neighbours"], strict=True)
        return [
            row for question, row in asked if question.answer is not None and question.answer == self.record.fact.old
        ]


@dataclass(frozen=True)
class Score:
    """One score of a record."""

    name: str
    meaning: str
    of: Callable[[Asked], float | None]


def _each(of: Callable[[Fact, Row], float | None]) -> Callable[[Asked], float | None]:
    """From a score of a fact to that of a record: the mean over those of its facts that have it."""

    def of_record(asked: Asked) -> float | None:
        found = [of(fact, row) for fact, row in zip(asked.record.facts, by_fact(asked.row), strict=True)]
        return _mean(fmean, [value for value in found if value is not None])

    return of_record


def _prompt(of: Callable[[Sequence[Row]], float | None]) -> Callable[[Asked], float | None]:
    return _each(lambda _, row: of([row["prompt"]]))


def _paraphrases(of: Callable[[Sequence[Row]], float | None]) -> Callable[[Asked], float | None]:
    return _each(lambda _, row: of(row["paraphrases"]))


def _pairs(rows: Sequence[Row]) -> list[metrics.Pair]:
    return [(row["new"]["nll"], row["true"]["nll"]) for row in rows if "true" in row]


def _counts(rows: Sequence[Row], name: str) -> list[tuple[int, int]]:
    return [(row[name]["right"], row[name]["tokens"]) for row in rows if name in row]


def _mean(metric: Callable[[Any], float], items: Sequence[Any]) -> float | None:
    return metric(items) if items else None


def _likelier(rows: Sequence[Row]) -> float | None:
    return _mean(metrics.efficacy_score, _pairs(rows))


def _staying(rows: Sequence[Row]) -> float | None:
    return _mean(metrics.neighbourhood_score, _pairs(rows))


def _margin(rows: Sequence[Row]) -> float | None:
    return _mean(metrics.magnitude, _pairs(rows))


def _exact(rows: Sequence[Row]) -> float | None:
    return _mean(metrics.accuracy, _counts(rows, "new"))


def _tokens(rows: Sequence[Row], name: str = "new") -> float | None:
    return _mean(metrics.token_accuracy, _counts(rows, name))


def _kept(asked: Asked) -> float | None:
    before, after = ([row["new"]["first"] for row in side["neighbours"]] for side in (asked.base, asked.row))
    return metrics.kept(before, after) if after else None


def _portability(asked: Asked) -> float | None:
    answered = [told for told in asked.row["consequences"] if told]
    return _mean(metrics.portability, [[(t["right"], t["tokens"]) for t in told] for told in answered])


def _free(fact: Fact, row: Row, where: str) -> float | None:
    said = row.get("free", {}).get(where, [])
    texts = [said] if isinstance(said, str) else said
    instead = [] if fact.old is None else [fact.old]
    return _mean(fmean, [metrics.free_decoding(text, [fact.target], instead) for text in texts])


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
        Score("ES", "new target likelier than the true one", _prompt(_likelier)),
        Score("PS", "the same, on paraphrases", _paraphrases(_likelier)),
        Score("NS", "true target still likelier, on neighbours", lambda a: _staying(a.neighbours)),
        Score("EA", "every target token first", _prompt(_exact)),
        Score("PA", "the same, on paraphrases", _paraphrases(_exact)),
        Score("free", "greedy decoding says the target", _each(lambda fact, row: _free(fact, row, "prompt"))),
        Score("free_paraphrases", "the same, on paraphrases", _each(lambda fact, row: _free(fact, row, "paraphrases"))),
        Score("portability", "share of tokens first, on consequences", _portability),
        Score("free_consequences", "greedy decoding says the consequence", _free_consequences),
        Score("kept", "neighbours' first token as before", _kept),
        Score("tokens", "share of tokens first: zsRE's efficacy", _prompt(_tokens)),
        Score("tokens_paraphrases", "the same, on paraphrases", _paraphrases(_tokens)),
        Score(
            "tokens_neighbours",
            "of neighbours' answers: its specificity",
            lambda a: _tokens(a.row["neighbours"], "true"),
        ),
        Score("EM", "p(new) − p(true)", _prompt(_margin)),
        Score("PM", "the same, on paraphrases", _paraphrases(_margin)),
        Score("NM", "p(true) − p(new), on neighbours", lambda a: _negative(_margin(a.neighbours))),
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
