"""From answers to scores: which metric applies to which answers, and the means with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rebind.edit.facts.fact import Fact
from rebind.evals import metrics
from rebind.evals.answers import rows_by_fact
from rebind.evals.records import Record
from rebind.storage import Row


@dataclass(frozen=True)
class AnsweredRecord:
    """A record with the answers of the edited model and of the base model."""

    record: Record
    row: Row
    base: Row
    idf: Mapping[str, float]  # of the words in the references

    @property
    def neighbors(self) -> list[Row]:
        """The neighbors whose right answer is the fact's true target, which CounterFact compares."""
        pairs = zip(self.record.neighbors, self.row["neighbors"], strict=True)
        old = self.record.fact.old
        return [row for question, row in pairs if question.answer is not None and question.answer == old]


@dataclass(frozen=True)
class ScoreDefinition:
    """One score of a record; `compute` returns None if the record has nothing to compute it from."""

    name: str
    meaning: str
    compute: Callable[[AnsweredRecord], float | None]


Compute = Callable[[AnsweredRecord], float | None]
OverRows = Callable[[Sequence[Row]], float | None]


def _per_fact(compute: Callable[[Fact, Row], float | None]) -> Compute:
    """Turn a score of a fact into that of a record: the mean over those of its facts that have it."""

    def compute_record(answered: AnsweredRecord) -> float | None:
        facts = zip(answered.record.facts, rows_by_fact(answered.row), strict=True)
        values = [compute(fact, row) for fact, row in facts]
        return _mean(fmean, [value for value in values if value is not None])

    return compute_record


def _on_prompt(compute: OverRows) -> Compute:
    return _per_fact(lambda _, row: compute([row["prompt"]]))


def _on_paraphrases(compute: OverRows) -> Compute:
    return _per_fact(lambda _, row: compute(row["paraphrases"]))


def _mean(metric: Callable[[Any], float], items: Sequence[Any]) -> float | None:
    return metric(items) if items else None


def _over_pairs(metric: Callable[[Sequence[metrics.Pair]], float]) -> OverRows:
    """Apply a metric to the (new, true) pairs of NLLs of rows."""
    return lambda rows: _mean(metric, [(row["new"]["nll"], row["true"]["nll"]) for row in rows if "true" in row])


def _over_counts(metric: Callable[[Sequence[tuple[int, int]]], float], target: str = "new") -> OverRows:
    """Apply a metric to the (right, tokens) counts of one target of rows."""
    return lambda rows: _mean(metric, [(row[target]["right"], row[target]["tokens"]) for row in rows if target in row])


_efficacy = _over_pairs(metrics.efficacy_score)
_neighborhood = _over_pairs(metrics.neighborhood_score)
_magnitude = _over_pairs(metrics.magnitude)
_accuracy = _over_counts(metrics.accuracy)
_token_accuracy = _over_counts(metrics.token_accuracy)
_true_token_accuracy = _over_counts(metrics.token_accuracy, "true")


def _negative_magnitude(answered: AnsweredRecord) -> float | None:
    value = _magnitude(answered.neighbors)
    return None if value is None else -value


def _locality(answered: AnsweredRecord) -> float | None:
    before, after = ([row["new"]["first"] for row in side["neighbors"]] for side in (answered.base, answered.row))
    return metrics.locality(before, after) if after else None


def _portability(answered: AnsweredRecord) -> float | None:
    consequences = [wordings for wordings in answered.row["consequences"] if wordings]
    counts = [[(answer["right"], answer["tokens"]) for answer in wordings] for wordings in consequences]
    return _mean(metrics.portability, counts)


def _free(where: str) -> Compute:
    """Return whether greedy decoding says the target, after the prompt or the paraphrases."""

    def compute(fact: Fact, row: Row) -> float | None:
        texts = row.get("free", {}).get(where, [])
        texts = [texts] if isinstance(texts, str) else texts
        wrong = [] if fact.old is None else [fact.old]
        return _mean(fmean, [metrics.free_decoding(text, [fact.target], wrong) for text in texts])

    return _per_fact(compute)


def _free_consequences(answered: AnsweredRecord) -> float | None:
    if "free" not in answered.row:
        return None
    pairs = zip(answered.record.consequences, answered.row["free"]["consequences"], strict=True)
    return _mean(fmean, [metrics.free_decoding(text, question.answers) for question, text in pairs if question.answers])


def _fluency(answered: AnsweredRecord) -> float | None:
    return _mean(metrics.fluency, answered.row.get("texts", []))


def _consistency(answered: AnsweredRecord) -> float | None:
    if not answered.row.get("texts") or not answered.record.references:
        return None
    return metrics.consistency(" ".join(answered.row["texts"]), " ".join(answered.record.references), answered.idf)


SCORES = {
    score.name: score
    for score in (
        ScoreDefinition("ES", "new target likelier than the true one", _on_prompt(_efficacy)),
        ScoreDefinition("PS", "the same, on paraphrases", _on_paraphrases(_efficacy)),
        ScoreDefinition("NS", "true target still likelier, on neighbors", lambda a: _neighborhood(a.neighbors)),
        ScoreDefinition("EA", "every target token is the first choice", _on_prompt(_accuracy)),
        ScoreDefinition("PA", "the same, on paraphrases", _on_paraphrases(_accuracy)),
        ScoreDefinition("free", "greedy decoding says the target", _free("prompt")),
        ScoreDefinition("free_paraphrases", "the same, on paraphrases", _free("paraphrases")),
        ScoreDefinition("portability", "share of tokens right, on consequences", _portability),
        ScoreDefinition("free_consequences", "greedy decoding says the consequence", _free_consequences),
        ScoreDefinition("locality", "first token unchanged, on neighbors", _locality),
        ScoreDefinition("tokens", "share of tokens right: zsRE's efficacy", _on_prompt(_token_accuracy)),
        ScoreDefinition("tokens_paraphrases", "the same, on paraphrases", _on_paraphrases(_token_accuracy)),
        ScoreDefinition(
            "tokens_neighbors",
            "the same, on neighbors: specificity",
            lambda a: _true_token_accuracy(a.row["neighbors"]),
        ),
        ScoreDefinition("EM", "p(new) − p(true)", _on_prompt(_magnitude)),
        ScoreDefinition("PM", "the same, on paraphrases", _on_paraphrases(_magnitude)),
        ScoreDefinition("NM", "p(true) − p(new), on neighbors", _negative_magnitude),
        ScoreDefinition(
            "GE", "fluency: entropy of longer texts", lambda a: _mean(metrics.fluency, a.row.get("texts", []))
        ),
        ScoreDefinition("RS", "consistency: cosine with reference texts", _consistency),
    )
}
SHARES = ("S", "ES", "PS", "NS", "EA", "PA", "free", "free_paraphrases", "portability", "free_consequences", "locality")
PARTS_OF_S = ("ES", "PS", "NS")


def compute_scores(
    records: Sequence[Record], rows: Sequence[Row], base: Sequence[Row]
) -> dict[str, list[float | None]]:
    """Return a column per score with one value per record; None where a record has nothing for it."""
    idf = metrics.inverse_document_frequencies([" ".join(record.references) for record in records if record.references])
    answered = [AnsweredRecord(record, row, first, idf) for record, row, first in zip(records, rows, base, strict=True)]
    return {name: [score.compute(one) for one in answered] for name, score in SCORES.items()}


def summarize(
    records: Sequence[Record], rows: Sequence[Row], base: Sequence[Row], *, seed: int = 0, rounds: int = 1000
) -> dict[str, dict[str, float]]:
    """Return every score that the records have, with its interval: {name: {value, low, high, records}}."""
    columns = compute_scores(records, rows, base)
    estimates = metrics.bootstrap(columns, {"S": PARTS_OF_S}, seed=seed, rounds=rounds)
    return {
        name: {key: round(value, 6) for key, value in asdict(estimates[name]).items()}
        for name in ("S", *SCORES)
        if name in estimates
    }
